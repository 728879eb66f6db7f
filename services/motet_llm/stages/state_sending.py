"""Send what the model computes of a request's tokens to the next stage: a state for each token.

What a state is depends on the family (`state_sources.py`). All tokens of such a request are computed
here, once: neither the prefix cache nor a prefill worker provides them, and nothing is drafted.

Shapes: R tokens, W numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from motet_llm.engine.feature import Feature
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.engine.request import Request, RequestOptions
from motet_llm.scheduling.work import Work
from motet_shared.errors import InternalError

from .state_sources import StateSource
from .states import SentStates


@dataclass(slots=True, frozen=True)
class SentRows:
    """Tokens of a step whose states are sent.

    rows: positions among the step's tokens. start: position of the first in its request. ids: the
    tokens.
    """

    request: Request
    rows: range
    start: int
    ids: list[int]


class StateSending(Feature):
    """Send the states of requests with the option `sends_states`."""

    def __init__(self, runner: ModelRunner, source: StateSource):
        self._runner, self._source = runner, source
        self._next: dict[Request, int] = {}  # position of the next token to send
        self._count = 0

    def admit(self, request: Request, options: RequestOptions) -> None:
        if not options.get("sends_states"):
            return
        self._next[request] = 0
        request.constraints.match_end = 0
        request.constraints.drafts_end = 0

    def forget(self, request: Request) -> None:
        self._next.pop(request, None)

    def rows(self, works: Sequence[Work]) -> list[SentRows]:
        """Return the rows of a step to send; those that were sent before a preemption are not."""
        if not self._next:
            return []
        found = []
        starts = [0, *accumulate(work.num_tokens for work in works)]
        for offset, work in zip(starts, works, strict=False):
            begin, end = work.span
            low = max(begin, self._next.get(work.request, end))
            if low < end:
                rows = range(offset + low - begin, offset + end - begin)
                found.append(SentRows(work.request, rows, low, work.request.tokens[low:end]))
        return found

    @torch.inference_mode()
    def compute(self, sent: Sequence[SentRows], forward: Forward) -> dict[Request, SentStates]:
        """Return the states of the step that the model has just computed, by request."""
        return {one.request: self._states(one, forward) for one in sent}

    def _states(self, one: SentRows, forward: Forward) -> SentStates:
        shape, images = self._runner.image_shape, one.request.images
        ids_R = torch.tensor(one.ids, device=forward.hidden_ND.device)
        media_R = torch.zeros_like(ids_R, dtype=torch.bool)
        if shape is not None:
            media_R = torch.isin(ids_R, torch.tensor(shape.placeholders, device=ids_R.device))
            media_R[max(0, one.request.num_prompt - one.start) :] = False  # the reply has none
        states_RW = self._source.states(forward, one.rows, ids_R, media_R)
        positions = None
        if images is not None and shape is not None and shape.axes > 1:
            found = images.positions(one.start, one.start + len(one.ids))
            positions = np.ascontiguousarray(found, dtype=np.int32)
        return SentStates(one.start, states_RW.cpu(), positions)

    def take(self, states: dict[Request, SentStates]) -> None:
        """Continue behind states that are about to be sent."""
        for request, one in states.items():
            if request in self._next:
                self._next[request] = one.start + len(one.states_RW)
                self._count += len(one.states_RW)

    def stats(self) -> dict[str, float]:
        """Return the number of states that were sent."""
        return {"states_sent": self._count}

    def check_integrity(self, requests: set[Request]) -> None:
        if not self._next.keys() <= requests:
            raise InternalError("states of requests that have ended are sent")
