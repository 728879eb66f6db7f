"""Run speculation: drafts guess tokens cheaply, and the model verifies them in one step.

A draft token is right if the model draws the same token at its position. Noise is keyed by (seed,
output position, token), so that token is exactly the one that would have been drawn without any
draft: the output does not depend on the drafts, neither under greedy decoding nor under sampling.
Drafts only decide how many steps it takes.

Drafts come from an implementation of `Drafts`; how many tokens to draft is decided in
`controller.py`. Shapes: R rows that draw.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from motet_llm.config import EngineConfig
from motet_llm.engine.feature import Feature
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.engine.request import Request
from motet_llm.engine.sampler import Sampled
from motet_llm.scheduling.work import Work
from motet_llm.weights.tensor_files import TensorFiles
from motet_shared.errors import ConfigError, InternalError

from .controller import AcceptanceEstimate, SpeculationController
from .draft_model import DraftModel
from .eagle import EagleDrafts
from .medusa import MedusaDrafts, are_heads
from .ngram import NgramDrafts
from .verification import AcceptedTokens


class Drafts(Protocol):
    """Propose the next tokens of requests.

    needs_model: it computes on the model's thread. catch_up_tokens: those that the
    last `propose` computed, of requests that were new to it or had gone without drafts for a while.
    """

    @property
    def needs_model(self) -> bool: ...

    @property
    def catch_up_tokens(self) -> int: ...

    def catch_up_for(self, request: Request) -> int:
        """Return the catch-up tokens that drafting for this request would need."""

    def observe(self, works: Sequence[Work], forward: Forward, sampled: Sampled) -> None:
        """Read the results of a step before its tokens are accepted, on the model's thread."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Return drafts of up to the wanted number of tokens, for requests that decode."""

    def forget(self, request: Request) -> None:
        """Free what is kept for a request that has ended."""

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if the state is inconsistent or belongs to other requests."""


@dataclass(slots=True)
class Verified:
    """Draft tokens of one request that the model accepted and rejected."""

    accepted: int = 0
    rejected: int = 0


@dataclass(slots=True)
class DraftCounts:
    """Count drafts and their cost since the start.

    `skipped`: request-steps without a draft because none was expected to gain time.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    skipped: int = 0
    off_steps: int = 0
    off_seconds: float = 0.0


class Speculation(Feature):
    """Run speculation for one engine.

    Call `wanted` and `draft` before a step, `count` and `record` after it.
    """

    def __init__(self, drafts: Drafts, controller: SpeculationController):
        self.drafts = drafts
        self._controller = controller
        self._estimates: dict[Request, AcceptanceEstimate] = {}
        self._verified: dict[Request, Verified] = {}
        self._counts = DraftCounts()
        self.seconds = 0.0  # drafting time of the current step
        self._drafted = False  # whether drafts were proposed for that step
        self._decoding = 0  # requests that decode in it
        self._has_prefill = False  # whether it computes prompts too

    def wanted(self, works: Sequence[Work]) -> list[tuple[Request, int]]:
        """Return the requests to draft for in this step, with the number of tokens of each.

        Empty where the step computes prompts too: the cost of drafts could not be told apart from
        theirs, and such a step is long enough.
        """
        self.seconds, self._drafted = 0.0, False
        decoding = [
            w.request
            for w in works
            if w.num_tokens == 1 and w.draws and w.request.constraints.chunk_end is None
        ]
        self._decoding, self._has_prefill = len(decoding), len(decoding) < len(works)
        if not decoding or (self._has_prefill and not self._controller.always):
            return []
        catch_up = [self.drafts.catch_up_for(request) for request in decoding]
        lengths = self._controller.lengths(
            [self._estimate_of(request) for request in decoding], catch_up
        )
        self._counts.skipped += lengths.count(0)
        pairs = zip(decoding, lengths, strict=True)
        counts = ((r, min(length, r.max_length - len(r.tokens) - 1)) for r, length in pairs)
        return [(request, count) for request, count in counts if count > 0]

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Return the drafts of the requests, and measure the time that drafting takes."""
        began = time.perf_counter()
        self._drafted = True
        drafts = self.drafts.propose(wanted)
        self.seconds = time.perf_counter() - began
        return drafts

    def count(self, works: Sequence[Work], accepted: Sequence[AcceptedTokens | None]) -> None:
        """Count a step's draft tokens by request; `accepted`: None for a work that failed."""
        for work, one in zip(works, accepted, strict=True):
            if work.draft and one is not None:
                verified = self._verified.setdefault(work.request, Verified())
                verified.accepted += one.num_drafted
                verified.rejected += len(work.draft) - one.num_drafted

    def verified(self, request: Request) -> Verified:
        """Return the draft tokens of a request so far."""
        return self._verified.get(request, Verified())

    def record(self, works: Sequence[Work], accepted: Sequence[int], seconds: float) -> None:
        """Record a step's duration without drafting, and the accepted draft tokens of each work."""
        drafted, num_accepted = sum(len(work.draft) for work in works), sum(accepted)
        for work, count in zip(works, accepted, strict=True):
            if work.draft and (estimate := self._estimates.get(work.request)) is not None:
                self._controller.record_draft(estimate, len(work.draft), count)
        seconds += self.seconds
        self._count(drafted, num_accepted, seconds)
        if self._has_prefill:
            self._controller.record_prefill_step(seconds)
        elif self._drafted and (drafted or self.drafts.needs_model):
            self._controller.record_drafted_step(
                len(works), drafted, num_accepted, seconds, catch_up=self.drafts.catch_up_tokens
            )
        else:
            self._controller.record_plain_step(len(works), seconds)

    def _count(self, drafted: int, accepted: int, seconds: float) -> None:
        counts = self._counts
        counts.steps += bool(drafted)
        counts.drafted += drafted
        counts.accepted += accepted
        counts.seconds += self.seconds
        if self._decoding and not self._drafted:
            counts.off_steps += 1
            counts.off_seconds += seconds

    def _estimate_of(self, request: Request) -> AcceptanceEstimate:
        estimate = self._estimates.get(request)
        if estimate is None:
            estimate = self._estimates[request] = self._controller.new_estimate()
        return estimate

    def forget(self, request: Request) -> None:
        """Free what is kept for a request that has ended or left this engine."""
        self._estimates.pop(request, None)
        self._verified.pop(request, None)
        self.drafts.forget(request)

    def stats(self) -> dict[str, float]:
        """Return counters since the start.

        They are steps with drafts, tokens drafted and accepted, seconds of drafting, request-steps
        without a draft because none was expected to gain time, and the steps, with their seconds, in which
        requests decoded but nothing was drafted.
        """
        counts = self._counts
        return {
            "speculated_steps": counts.steps,
            "drafted_tokens": counts.drafted,
            "accepted_tokens": counts.accepted,
            "draft_seconds": counts.seconds,
            "drafts_skipped": counts.skipped,
            "speculation_off_steps": counts.off_steps,
            "speculation_off_seconds": counts.off_seconds,
        }

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if anything is kept for a request that is not in `requests`."""
        if gone := (self._estimates.keys() | self._verified.keys()) - requests:
            raise InternalError(f"drafts are kept for {len(gone)} requests that are gone")
        self.drafts.check_integrity(requests)


def build(config: EngineConfig, runner: ModelRunner) -> Speculation | None:
    """Return the speculation that the settings ask for; None for "off".

    Raises ConfigError for a drafter that does not fit the model, and for a model with recurrent
    layers.
    """
    if config.speculate == "off":
        return None
    if runner.states is not None:
        raise ConfigError(
            f"speculate={config.speculate!r}: {runner.model_type} has recurrent layers, whose state cannot be taken "
            "back behind a wrong token; leave it off for this model"
        )
    return Speculation(
        _drafts(config, runner),
        SpeculationController(config.draft_tokens, always=config.always_speculate),
    )


def _drafts(config: EngineConfig, runner: ModelRunner) -> Drafts:
    if config.speculate == "ngram":
        return NgramDrafts()
    folder = Path(config.speculate)
    if "fc.weight" in TensorFiles(folder):
        return EagleDrafts(config, runner)
    return MedusaDrafts(config, runner) if are_heads(folder) else DraftModel(config, runner)
