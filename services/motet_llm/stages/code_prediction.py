"""Compute the further codes of each frame whose first code a talker draws, and keep them.

They are a part of the input of the next token, and are needed again after a preemption.

Shapes: B frames of a step, N tokens, K further codes of a frame, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from motet_llm.engine.feature import Feature
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.engine.request import Request, RequestOptions
from motet_llm.scheduling.work import Work
from motet_shared.errors import BadRequest, InternalError

from .code_predictor import NO_CODE, CodePredictor

Codes = dict[Request, list[int]]


@dataclass(slots=True)
class CodePrediction(Feature):
    """Hold the further codes of the frames of requests. Without a predictor it does nothing."""

    runner: ModelRunner
    _frames: dict[Request, list[Sequence[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.predictor is not None:
            self.predictor.to(self.runner.device, self.runner.dtype)

    @property
    def predictor(self) -> CodePredictor | None:
        """Return what computes the codes; None: the model's frames have one."""
        return self.runner.predictor

    def admit(self, request: Request, options: RequestOptions) -> None:
        """Take the codes of the output so far. Raises BadRequest for others."""
        if self.predictor is None:
            return
        given = options.get("given_states")
        frames = [] if given is None else list(given.codes)
        if len(frames) != request.num_output or any(
            len(one) != self.predictor.groups for one in frames
        ):
            raise BadRequest(
                f"output: has {request.num_output} frames; give {self.predictor.groups + 1} codes of each",
                param="output",
            )
        self._frames[request] = frames

    def forget(self, request: Request) -> None:
        self._frames.pop(request, None)

    def of_step(self, works: Sequence[Work]) -> Tensor | None:
        """Return the codes `[N, K]` of a step's tokens; None if the model's frames have one."""
        if self.predictor is None:
            return None
        count = sum(work.num_tokens for work in works)
        codes_NK = torch.full((count, self.predictor.groups), NO_CODE)
        starts = accumulate((work.num_tokens for work in works), initial=0)
        for offset, work in zip(starts, works, strict=False):
            start, stop = work.span
            first = max(start, work.request.num_prompt)
            if first < stop:
                frames = self._frames[work.request]
                known = frames[first - work.request.num_prompt : stop - work.request.num_prompt]
                codes_NK[offset + first - start : offset + stop - start] = torch.tensor(known)
        return codes_NK

    def compute(
        self, works: Sequence[Work], forward: Forward, drawn: Sequence[int | None]
    ) -> Codes:
        """Return the further codes of the frames that a step begins; those that end have none.

        drawn: the first codes, of the works that draw.
        """
        predictor = self.predictor
        if predictor is None:
            return {}
        drawing = [work.request for work in works if work.draws]
        begun = [
            (row, request, code)
            for row, (request, code) in enumerate(zip(drawing, drawn, strict=True))
            if code is not None and code not in request.stop_ids
        ]
        if not begun:
            return {}
        rows_B = torch.tensor([row for row, _, _ in begun], device=forward.hidden_ND.device)
        ids_B = torch.tensor([code for _, _, code in begun], device=rows_B.device)
        found_BK = predictor.draw(
            forward.hidden_ND[forward.draws_R[rows_B]],
            self.runner.model.get_input_embeddings()(ids_B),
            [(request.sampling, request.num_output) for _, request, _ in begun],
        )
        codes = found_BK.tolist()
        return {request: one for (_, request, _), one in zip(begun, codes, strict=True)}

    def take(self, codes: Codes) -> None:
        """Keep the codes of frames whose first code is about to be appended."""
        for request, one in codes.items():
            if request in self._frames:
                self._frames[request].append(one)

    def check_integrity(self, requests: set[Request]) -> None:
        if not self._frames.keys() <= requests:
            raise InternalError("codes of requests that have ended are held")
