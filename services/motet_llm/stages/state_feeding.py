"""Feed a request with states of another model, one per token, as they come.

The states of the prompt's first tokens take the place of their embeddings; those of all later
tokens are added to them. A token is computed once its state is here; when no more come, the last
one serves for all further tokens.

Shapes: M states of a request, N tokens of a step, W numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from motet_llm.engine.feature import Feature
from motet_llm.engine.request import Key, Request, RequestOptions
from motet_llm.scheduling.scheduler import Scheduler
from motet_llm.scheduling.work import Work
from motet_shared.errors import BadRequest, InternalError

from .code_prediction import CodePrediction
from .states import StepStates


@dataclass(slots=True)
class _Input:
    """Hold the states of one request, in parts that are joined when a step needs them."""

    parts: list[Tensor]
    count: int
    replacing: int
    positions: np.ndarray | None
    ended: bool

    def between(self, start: int, stop: int) -> Tensor:
        """Return the states of tokens `start` to `stop`."""
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts)]
        states_MW = self.parts[0]
        if stop <= self.count:
            return states_MW[start:stop]
        return states_MW[torch.arange(start, stop).clamp(max=self.count - 1)]

    def positions_of(self, start: int, stop: int) -> np.ndarray:
        """Return rotary positions `[3, stop - start]`."""
        if self.positions is None:
            return np.broadcast_to(np.arange(start, stop), (3, stop - start))
        known = self.positions.shape[1]
        after = np.arange(max(start, known), max(stop, known)) - known + self.positions.max() + 1
        return np.concatenate(
            (self.positions[:, start:stop], np.broadcast_to(after, (3, len(after)))), axis=1
        )


@dataclass(slots=True)
class StateFeeding(Feature):
    """Hold the states of requests with the option `given_states`; also an `AdmissionPolicy`.

    width: numbers of a state. needed: the model computes nothing without them. predicting: has the
    further codes of frames.
    """

    width: int
    needed: bool
    predicting: CodePrediction
    _inputs: dict[Request, _Input] = field(default_factory=dict)
    _by_key: dict[Key, Request] = field(default_factory=dict)

    def admit(self, request: Request, options: RequestOptions) -> None:
        """Take the first states. Raises BadRequest if they are missing, or of another width."""
        given = options.get("given_states")
        if given is None:
            if self.needed:
                raise BadRequest(
                    "input_states: this model goes on from another's states; give them",
                    param="input_states",
                )
            return
        self._check(given.states_MW)
        if not 0 <= given.replacing <= request.num_prompt or not len(given.states_MW):
            raise BadRequest(
                f"input_states: {given.replacing} of {request.num_prompt} tokens are replaced by"
                f" {len(given.states_MW)} states; give at least one, and no more than the prompt",
                param="input_states",
            )
        self._inputs[request] = _Input(
            [given.states_MW],
            len(given.states_MW),
            given.replacing,
            given.positions,
            given.ended,
        )
        self._by_key[request.key] = request
        request.constraints.match_end = 0
        request.constraints.drafts_end = 0
        self._constrain(request)

    def _check(self, states_MW: Tensor) -> None:
        if not self.needed:
            raise BadRequest(
                "input_states: this model takes none; leave them out", param="input_states"
            )
        if states_MW.ndim != 2 or states_MW.shape[1] != self.width:
            raise BadRequest(
                f"input_states: is {list(states_MW.shape)}; give [tokens, {self.width}]",
                param="input_states",
            )

    def forget(self, request: Request) -> None:
        self._inputs.pop(request, None)
        self._by_key.pop(request.key, None)

    def feed(self, key: Key, states_MW: Tensor, *, ended: bool) -> None:
        """Add the next states of a request; `ended`: no more come. Unknown keys are ignored."""
        request = self._by_key.get(key)
        if request is None:
            return
        held = self._inputs[request]
        if len(states_MW):
            self._check(states_MW)
            held.parts.append(states_MW)
            held.count += len(states_MW)
        held.ended = held.ended or ended
        self._constrain(request)

    def _constrain(self, request: Request) -> None:
        """Hold a request where its states end."""
        held = self._inputs[request]
        waits = not held.ended and len(request.tokens) > held.count
        request.constraints.chunk_end = held.count if waits else None
        request.constraints.awaits_input = waits and request.num_computed >= held.count

    def admitted(self, request: Request, scheduler: Scheduler) -> None:
        """Hold a request that has just been admitted as far as its states are missing."""
        if request in self._inputs:
            self._constrain(request)

    def released(self, request: Request) -> None:
        """Do nothing: a request that is preempted is held again when it is admitted."""

    def after_step(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.request in self._inputs:
                self._constrain(work.request)

    def of_step(self, works: Sequence[Work]) -> StepStates | None:
        """Return the states of a step; None if no request has any."""
        if not any(work.request in self._inputs for work in works):
            return None
        count = sum(work.num_tokens for work in works)
        states_NW, keeps_N = torch.zeros(count, self.width), torch.ones(count, dtype=torch.bool)
        is_text = all(one.positions is None for one in self._inputs.values())
        positions = []
        starts = accumulate((work.num_tokens for work in works), initial=0)
        for offset, work in zip(starts, works, strict=False):
            start, stop = work.span
            held = self._inputs.get(work.request) or _Input([], 0, 0, None, False)
            positions.append(held.positions_of(start, stop))
            if held.parts:
                states_NW[offset : offset + stop - start] = held.between(start, stop)
                keeps_N[offset : offset + max(0, min(stop, held.replacing) - start)] = False
        positions_3N = None if is_text else np.concatenate(positions, axis=1)
        return StepStates(states_NW, keeps_N, positions_3N, self.predicting.of_step(works))

    def check_integrity(self, requests: set[Request]) -> None:
        if not self._inputs.keys() <= requests:
            raise InternalError("states of requests that have ended are held")
