"""Run the LLM engine on its thread: take calls between steps, wake when a deadline passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Unpack

from torch import Tensor

from motet_llm.disaggregation.kv_transfer import KvPart
from motet_shared.errors import MotetError
from motet_shared.messages import Sampling
from motet_shared.process import engine_thread

from .engine import Engine
from .outputs import StepOutput
from .request import Key, RequestOptions

Step = Callable[[], list[StepOutput]]


class EngineThread(engine_thread.EngineThread[Engine, StepOutput]):
    """Run an `Engine`; with overlap, outputs leave while the model computes the next step."""

    # Set on the engine's thread only.
    around_step: Callable[[Step], list[StepOutput]] | None = None

    def start(self) -> None:
        """Start the thread, which owns the engine from then on."""
        self.engine.owner.release()
        super().start()

    def stop(self) -> None:
        super().stop()
        self.engine.close()

    def submit(
        self,
        key: Key,
        prompt: list[int],
        sampling: Sampling,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Call `Engine.add`; a refusal arrives as a `StepOutput` with `error`."""
        self._submit(key, partial(self.engine.add, key, prompt, sampling, **options))

    def grant(self, key: Key, total: int) -> None:
        self.between_steps(partial(self.engine.grant, key, total))

    def receive(self, key: Key, part: KvPart, content: Tensor, dtype: str) -> None:
        """Call `KvReceiver.receive` between steps."""
        self.between_steps(partial(self.engine.receiver.receive, key, part, content, dtype))

    def feed_states(self, key: Key, states_MW: Tensor, *, ended: bool) -> None:
        """Call `StateFeeding.feed` between steps."""
        feed = self.engine.parts.feeding.feed
        self.between_steps(partial(feed, key, states_MW, ended=ended))

    def end_transfer(self, key: Key, cause: str) -> None:
        """Call `KvReceiver.end` between steps."""
        self.between_steps(partial(self.engine.receiver.end, key, cause))

    def _refusal(self, key: Key, error: MotetError) -> StepOutput:
        return StepOutput(key, [], error=error)

    def _step(self) -> list[StepOutput]:
        step, around = partial(self.engine.step, self._emit), self.around_step
        return step() if around is None else around(step)

    def _patience(self) -> float | None:
        if self.engine.take_memory():
            return 0.0
        deadline = self.engine.next_deadline
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())
