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
from collections.abc import Callable
from typing import Any

import torch

from motet_diffusion.config import EngineConfig
from motet_diffusion.pipeline.estimate import Colours
from motet_diffusion.pipeline.pipeline_factory import PipelineFactory
from motet_shared.errors import Overloaded

from .denoise_loop import DenoiseLoop
from .merge import joined, parted
from .request import Done, Drawing, Event, Key
from .step_batcher import Asked, StepBatcher
from .step_cache import StepCache

_PATIENCE = 0.05  # seconds that a step waits for a forward pass to compute


class Engine:
    """Draw with one model. Pictures join and leave between steps, without effect on the others.

    `add`, `cancel` and `step` are called on one thread. `emit` is called on others, in order for
    one picture.
    """

    def __init__(self, config: EngineConfig, emit: Callable[[Event], object]):
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config = config
        self.studio = PipelineFactory(config)
        self.colours = Colours(self.studio.vae, int(self.studio.pipeline.vae_scale_factor))
        self.cache = (
            StepCache(self.studio.denoiser, config.step_cache) if config.step_cache else None
        )
        self.meeting = StepBatcher()
        self._emit = emit
        self._waiting: OrderedDict[Key, Drawing] = OrderedDict()
        self._lock = threading.Lock()
        self._painters: dict[Key, DenoiseLoop] = {}
        self._leaving: dict[Key, DenoiseLoop] = {}  # cancelled, but the thread still runs
        self.passes = self.rows = self.pictures = 0
        self.seconds = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._painters)

    def add(self, key: Key, drawing: Drawing) -> None:
        """Queue a picture.

        Raises BadRequest for what cannot be drawn, Overloaded when the queue is full.
        """
        if key in self._waiting or key in self._painters or key in self._leaving:
            raise ValueError(f"{key!r} is drawn already")
        self.studio.adapters.check(drawing.loras)
        drawing = self.studio.rules.settled(drawing)
        if len(self._waiting) >= self.config.max_waiting + self.config.max_running:
            raise Overloaded(f"{len(self._waiting)} pictures wait already (max_waiting)")
        self._waiting[key] = drawing

    def cancel(self, key: Key) -> None:
        """Drop a picture at once: it is not part of the next step. Unknown keys are ignored."""
        self._waiting.pop(key, None)
        with self._lock:
            painter = self._painters.pop(key, None)
            if painter is not None:
                self._leaving[key] = painter
                painter.dismiss()

    def step(self) -> None:
        """Compute one forward pass for the call that has waited longest and all that fit it.

        Waits up to _PATIENCE seconds if there is none.
        """
        self._admit()
        asked = self.meeting.gather(_PATIENCE, self.config.max_rows)
        if asked:
            began = time.perf_counter()
            self._answer(asked)
            self.seconds += time.perf_counter() - began

    def close(self, timeout: float = 10.0) -> None:
        """Cancel all pictures and wait up to `timeout` seconds for each of their threads."""
        for key in [*self._waiting, *self._painters]:
            self.cancel(key)
        for painter in list(self._leaving.values()):
            painter.join(timeout)

    def _admit(self) -> None:
        while self._waiting and len(self._painters) + len(self._leaving) < self.config.max_running:
            key, drawing = self._waiting.popitem(last=False)
            painter = DenoiseLoop(self.studio, self.meeting, key, drawing, self._told, self._ended)
            self._painters[key] = painter
            painter.start()

    def _answer(self, asked: list[Asked]) -> None:
        """Compute one pass for all calls; if it fails, one each, so that only faulty calls fail."""
        try:
            answers = self._computed(asked)
        except Exception as error:
            if len(asked) == 1:
                self.meeting.answer(asked[0], error=error)
                return
            for one in asked:
                self._answer([one])
            return
        for one, answer in zip(asked, answers, strict=True):
            self.meeting.answer(one, answer)

    def _computed(self, asked: list[Asked]) -> list[Any]:
        rows = [one.rows for one in asked]
        if self.cache is not None:
            self.cache.begin([(one.key, row) for one in asked for row in range(one.rows)])
        self.studio.adapters.denoiser.set([(one.loras, one.rows) for one in asked])
        with torch.no_grad():
            answer = self.studio.denoiser(**joined([one.call for one in asked]))
        self.passes += 1
        self.rows += sum(rows)
        return parted(answer, rows)

    # ------------------------------------------------------------------------ on the loops' threads
    def _told(self, event: Event) -> None:
        if isinstance(event, Done) and event.error is None:
            self.pictures += 1
        self._emit(event)

    def _ended(self, key: Key) -> None:
        with self._lock:
            self._painters.pop(key, None)
            self._leaving.pop(key, None)
        if self.cache is not None:
            self.cache.forget(key)
        self.meeting.wake()

    # --------------------------------------------------------------------------------------- health
    def stats(self) -> dict[str, float]:
        return {
            "running": len(self._painters),
            "waiting": len(self._waiting),
            "passes": self.passes,
            "rows_per_pass": round(self.rows / max(self.passes, 1), 2),
            "rows_skipped": self.cache.skipped if self.cache is not None else 0,
            "pictures": self.pictures,
            "busy_seconds": round(self.seconds, 3),
        }

    def check_integrity(self) -> None:
        """Raise RuntimeError if calls wait that belong to no picture."""
        if len(self.meeting) > len(self._painters):
            raise RuntimeError(
                f"{len(self.meeting)} forward passes are asked for by {len(self._painters)} pictures"
            )
