"""Run the diffusion engine: prompts in, pictures out, batched by step; no network in it.

    engine = Engine(EngineConfig(model="models/pocket-draw"), emit=print)  # emit: on any thread
    engine.add("a", Drawing(prompt="two red circles"))
    while engine.has_work:
        engine.step()

Each picture's loop is a `DenoiseLoop` on its own thread; `step` computes the forward passes that
the loops wait for, one per kind of call (in effect, latent size) and step. Meanwhile prompts are
encoded and pixels are decoded on the loops' threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from motet_diffusion.config import EngineConfig
from motet_diffusion.pipeline.estimate import RGBPreview
from motet_diffusion.pipeline.pipeline_factory import PipelineFactory
from motet_diffusion.pipeline.trial import alike
from motet_kernels.runtime.missing_memory import check_device
from motet_shared.errors import ConfigError, Overloaded, as_motet_error
from motet_shared.process.batch_isolation import computed

from .denoise_loop import DenoiseLoop
from .merge import Call, merge_calls, rows_of, split_output
from .model_call import DENOISER, ModelCall
from .request import Event, Key, PictureDone, PictureRequest
from .step_batcher import PendingCall, StepBatcher
from .step_cache import StepCache

_IDLE_WAIT = 0.05  # seconds that a step waits for a forward pass to compute


class Engine:
    """Draw with one model. Pictures join and leave between steps, without effect on the others.

    `add`, `cancel` and `step` are called on one thread. `emit` is called on others, in order for
    each picture.
    """

    def __init__(self, config: EngineConfig, emit: Callable[[Event], object]):
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config = config
        self.factory = PipelineFactory(config)
        self.max_rows = config.max_rows if self.factory.merges else 1
        self.rgb_preview = RGBPreview(self.factory.vae, self.factory.rules.vae_scale)
        self.cache = (
            StepCache(self.factory.denoiser, config.step_cache, self.factory.of_rows)
            if config.step_cache
            else None
        )
        if self.cache is not None:
            self._check_cache(self.cache)
        self.batcher = StepBatcher()
        self._emit = emit
        self._waiting: OrderedDict[Key, PictureRequest] = OrderedDict()
        self._lock = threading.Lock()
        self._loops: dict[Key, DenoiseLoop] = {}
        self._cancelled: dict[Key, DenoiseLoop] = {}  # cancelled, but the thread still runs
        self._lost: Exception | None = None  # error of a lost GPU, on the thread of a loop
        self.passes = self.rows = self.pictures = 0
        self.seconds = 0.0

    def _check_cache(self, cache: StepCache) -> None:
        """Raise ConfigError if a pass that leaves blocks out does not repeat what they added."""
        call = self.factory.trial.calls[0][0]
        rows, key = rows_of(call), object()
        try:
            with torch.no_grad():
                first, second = (self._cached(cache, call, rows, key) for _ in range(2))
            is_known = cache.skipped == rows and alike(first, second)
        except Exception:  # whatever blocks raise that get another's result
            is_known = False
        cache.forget(key)
        cache.computed = cache.skipped = 0
        if not is_known:
            kind = type(self.factory.denoiser).__name__
            message = f"step_cache={self.config.step_cache}: what the blocks of a {kind} add cannot"
            raise ConfigError(f"{message} be told apart; give 0")

    def _cached(self, cache: StepCache, call: Call, rows: int, key: Key) -> Any:
        cache.begin([(key, (0, row)) for row in range(rows)])
        return self.factory.compute(call, [ModelCall(call)], [rows])

    @property
    def has_work(self) -> bool:
        """Return True if `step` would do something."""
        return bool(self._waiting or self._loops) or self._lost is not None

    def add(self, key: Key, drawing: PictureRequest) -> None:
        """Queue a picture.

        Raises BadRequest for what cannot be drawn, Overloaded when the queue is full.
        """
        if key in self._waiting or key in self._loops or key in self._cancelled:
            raise ValueError(f"key: {key!r} is in use by another picture")
        self.factory.check(drawing)
        drawing = self.factory.rules.completed(drawing)
        if len(self._waiting) >= self.config.max_waiting + self.config.max_running:
            raise Overloaded(
                f"{len(self._waiting)} pictures are queued; try again later (max_waiting)"
            )
        self._waiting[key] = drawing

    def cancel(self, key: Key) -> None:
        """Drop a picture at once: it is not part of the next step. Unknown keys are ignored."""
        self._waiting.pop(key, None)
        with self._lock:
            loop = self._loops.pop(key, None)
            if loop is not None:
                self._cancelled[key] = loop
                loop.cancel()

    def step(self) -> None:
        """Compute one forward pass for the call that has waited longest and all that fit it.

        Waits up to _IDLE_WAIT seconds if there is none. Raises the error of a lost GPU.
        """
        if self._lost is not None:
            raise self._lost
        self._admit()
        calls = self.batcher.take(_IDLE_WAIT, self.max_rows)
        if calls:
            started = time.perf_counter()
            self._answer_calls(calls)
            self.seconds += time.perf_counter() - started

    def close(self, timeout: float = 10.0) -> None:
        """Cancel all pictures and wait up to `timeout` seconds for each of their threads."""
        for key in [*self._waiting, *self._loops]:
            self.cancel(key)
        for loop in list(self._cancelled.values()):
            loop.join(timeout)

    def _admit(self) -> None:
        while self._waiting and len(self._loops) + len(self._cancelled) < self.config.max_running:
            key, drawing = self._waiting.popitem(last=False)
            loop = DenoiseLoop(
                self.factory,
                self.batcher,
                key,
                drawing,
                self._on_event,
                self._on_end,
                self._on_device_lost,
            )
            self._loops[key] = loop
            try:
                loop.start()
            except (RuntimeError, MemoryError) as error:  # no thread can be started now
                del self._loops[key]
                self._emit(PictureDone(key, error=as_motet_error(error)))

    def _answer_calls(self, calls: list[PendingCall]) -> None:
        """Compute one pass for all calls; a call fails alone if it cannot be computed alone."""
        for call, output in zip(calls, computed(self._denoise, calls), strict=True):
            if isinstance(output, Exception):
                check_device(output)
                self.batcher.deliver(call, error=output)
            else:
                self.batcher.deliver(call, output)

    def _denoise(self, calls: Sequence[PendingCall]) -> list[Any]:
        rows = [call.rows for call in calls]
        if self.cache is not None and calls[0].call.target == DENOISER:
            self.cache.begin([(c.key, (c.call.part, row)) for c in calls for row in range(c.rows)])
        with torch.no_grad():
            output = self.factory.compute(
                merge_calls([call.call.call for call in calls]), [call.call for call in calls], rows
            )
        self.passes += 1
        self.rows += sum(rows)
        return split_output(output, rows)

    # ------------------------------------------------------------------------ on the loops' threads
    def _on_event(self, event: Event) -> None:
        if isinstance(event, PictureDone) and event.error is None:
            self.pictures += 1
        self._emit(event)

    def _on_device_lost(self, error: Exception) -> None:
        self._lost = error

    def _on_end(self, key: Key) -> None:
        with self._lock:
            self._loops.pop(key, None)
            self._cancelled.pop(key, None)
        if self.cache is not None:
            self.cache.forget(key)
        self.batcher.wake()

    # --------------------------------------------------------------------------------------- health
    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the numbers of running and waiting pictures."""
        return {
            "running": len(self._loops),
            "waiting": len(self._waiting),
            "passes": self.passes,
            "rows_per_pass": round(self.rows / max(self.passes, 1), 2),
            "rows_skipped": self.cache.skipped if self.cache is not None else 0,
            "pictures": self.pictures,
            "busy_seconds": round(self.seconds, 3),
        }

    def check_integrity(self) -> None:
        """Raise RuntimeError if calls wait that belong to no picture."""
        if len(self.batcher) > len(self._loops):
            raise RuntimeError(
                f"{len(self.batcher)} forward passes are pending for {len(self._loops)} pictures"
            )
