"""Speculation: tokens that may come next are guessed cheaply, and the model computes them all in one step.

A guess is right if the model draws the same token in its place. Noise is keyed by (seed, output position, token), so
that token is the very one that would have been drawn without any guess: output does not change, under greedy decoding
and under sampling, whatever is guessed. Drafts only decide how many steps it takes.

Who guesses is a `Drafts`; this asks it in time, as long as it pays (`draft_switch.py`). Shapes: R rows that draw.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from motet_shared.errors import ConfigError, InternalError

from .config import EngineConfig
from .draft_eagle import EagleDrafts
from .draft_heads import HeadDrafts, are_heads
from .draft_model import DraftModel
from .draft_ngram import NgramDrafts
from .draft_switch import Odds, Switch
from .model_runner import Forward, ModelRunner
from .request import Request
from .sampler import Sampled
from .scheduler import Work
from .tensor_files import TensorFiles


class Drafts(Protocol):
    """Guesses what comes next.

    needs_model: it computes on the thread of the model. overdue: tokens of requests that it did not know, or not for
    long, which the last `propose` had to compute before it could guess.
    """

    @property
    def needs_model(self) -> bool: ...

    @property
    def overdue(self) -> int: ...

    def due(self, request: Request) -> int:
        """Tokens that will be overdue if it is to guess for this request."""

    def observe(self, works: Sequence[Work], forward: Forward, sampled: Sampled) -> None:
        """A step, before its tokens are taken; on the thread of the model."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """For requests that decode, up to so many tokens that may come next."""

    def forget(self, request: Request) -> None:
        """It has ended."""

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if what it keeps is not of these requests, or not whole."""


@dataclass(slots=True)
class Counts:
    """Since the start. `rested`: requests that decoded a step without a draft because it would not have paid."""

    steps: int = 0
    drafted: int = 0
    right: int = 0
    seconds: float = 0.0
    rested: int = 0
    off_steps: int = 0
    off_seconds: float = 0.0


class Speculation:
    """Of one engine. `wanted` and `draft` go before a step, `note` after it."""

    def __init__(self, drafts: Drafts, switch: Switch):
        self.drafts = drafts
        self._switch = switch
        self._odds: dict[Request, Odds] = {}
        self._counts = Counts()
        self.seconds = 0.0  # that drafting took for the step under way
        self._asked = False  # the drafts, for that step
        self._decoding = 0  # requests that decode in it
        self._mixed = False  # it computes prompts too

    def wanted(self, works: Sequence[Work]) -> list[tuple[Request, int]]:
        """For whom to guess how many tokens in this step. For nobody where prompts are computed too: what a draft
        costs could not be told apart, and such a step is long enough."""
        self.seconds, self._asked = 0.0, False
        decoding = [w.request for w in works if w.num_tokens == 1 and w.draws and w.request.watching is None]
        self._decoding, self._mixed = len(decoding), len(decoding) < len(works)
        if not decoding or (self._mixed and not self._switch.always):
            return []
        dues = [self.drafts.due(request) for request in decoding]
        lengths = self._switch.lengths([self._odds_of(request) for request in decoding], dues)
        self._counts.rested += lengths.count(0)
        pairs = zip(decoding, lengths, strict=True)
        counts = ((r, min(length, r.max_length - len(r.tokens) - 1)) for r, length in pairs)
        return [(request, count) for request, count in counts if count > 0]

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """What comes next, perhaps."""
        began = time.perf_counter()
        self._asked = True
        drafts = self.drafts.propose(wanted)
        self.seconds = time.perf_counter() - began
        return drafts

    def note(self, works: Sequence[Work], right: Sequence[int], seconds: float) -> None:
        """A step took `seconds` without drafting; `right` of the drafted tokens of each work were."""
        drafted, num_right = sum(len(work.draft) for work in works), sum(right)
        for work, count in zip(works, right, strict=True):
            if work.draft and (odds := self._odds.get(work.request)) is not None:
                self._switch.note_draft(odds, len(work.draft), count)
        seconds += self.seconds
        self._count(drafted, num_right, seconds)
        if self._mixed:
            self._switch.note_other(seconds)
        elif self._asked and (drafted or self.drafts.needs_model):
            self._switch.note_drafted(len(works), drafted, num_right, seconds, overdue=self.drafts.overdue)
        else:
            self._switch.note_plain(len(works), seconds)

    def _count(self, drafted: int, right: int, seconds: float) -> None:
        counts = self._counts
        counts.steps += bool(drafted)
        counts.drafted += drafted
        counts.right += right
        counts.seconds += self.seconds
        if self._decoding and not self._asked:
            counts.off_steps += 1
            counts.off_seconds += seconds

    def _odds_of(self, request: Request) -> Odds:
        odds = self._odds.get(request)
        if odds is None:
            odds = self._odds[request] = self._switch.odds()
        return odds

    def forget(self, request: Request) -> None:
        """It has ended, here at least."""
        self._odds.pop(request, None)
        self.drafts.forget(request)

    def stats(self) -> dict[str, float]:
        """Steps with drafts, tokens drafted and those of them that were right, seconds that drafting took; how often a
        request went without a draft because it would not have paid; steps, and their seconds, in which nobody guessed.
        """
        counts = self._counts
        return {
            "speculated_steps": counts.steps,
            "drafted_tokens": counts.drafted,
            "accepted_tokens": counts.right,
            "draft_seconds": counts.seconds,
            "draft_rests": counts.rested,
            "speculation_off_steps": counts.off_steps,
            "speculation_off_seconds": counts.off_seconds,
        }

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if one is remembered that is gone."""
        if not self._odds.keys() <= requests:
            raise InternalError(f"drafts are kept for {len(self._odds.keys() - requests)} requests that are gone")
        self.drafts.check_integrity(requests)


def build(config: EngineConfig, runner: ModelRunner) -> Speculation | None:
    """As the settings say; None if they say "off". Raises ConfigError for what does not go together."""
    if config.speculate == "off":
        return None
    if runner.states is not None:
        raise ConfigError(
            f"speculate={config.speculate!r}: {runner.model_type} has recurrent layers, whose state cannot be taken "
            "back behind a wrong token; leave it off for this model"
        )
    return Speculation(_drafts(config, runner), Switch(config.draft_tokens, always=config.always_speculate))


def _drafts(config: EngineConfig, runner: ModelRunner) -> Drafts:
    if config.speculate == "ngram":
        return NgramDrafts()
    folder = Path(config.speculate)
    if "fc.weight" in TensorFiles(folder):
        return EagleDrafts(config, runner)
    return HeadDrafts(config, runner) if are_heads(folder) else DraftModel(config, runner)
