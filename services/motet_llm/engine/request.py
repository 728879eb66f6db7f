"""Represent one request inside the engine: its tokens, blocks, rank, credit and times.

Only what every request has is here. What a feature keeps for a request lives in the feature, by
request; what it wants of the scheduler it writes into `Request.constraints`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from motet_llm.cache.request_blocks import RequestBlocks
from motet_llm.models.image_embeddings import ImageEmbedding, ImageEmbeddings
from motet_shared.messages import Sampling
from motet_shared.text.prefixes import ROOT, chained

if TYPE_CHECKING:
    from motet_llm.adapters.bank import ResidentAdapter
    from motet_llm.grammar.grammar import GrammarState
    from motet_llm.stages.states import GivenStates

Key = Hashable


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class RequestOptions(TypedDict, total=False):
    """Hold optional arguments of `Engine.add`.

    output: tokens emitted before a move. They count for positions, penalties, max_tokens and
        min_tokens and are prefilled with the prompt, but are not emitted again.
    credit: `StepOutput`s with tokens that may be emitted before the first `grant`; unbounded by
        default.
    deadline: on the clock of `time.monotonic()`.
    priority: higher ones go first and may preempt lower ones; 0 by default.
    tenant: the tenant whose share of the engine the request uses.
    images: the images in its prompt, in the order of placeholders.
    grammar_state: the grammar state of the reply, `output` included; the reply ends with it.
    adapter: LoRA adapter of this request; it stays in its slot until the request has left.
    send_from: the prompt is computed for another engine, which has its tokens up to here; no token
        is drawn.
    sends_states: outputs have the states of all tokens, for the next stage of a model.
    given_states: the states of the stage before, as far as they are known.
    """

    output: Sequence[int]
    credit: int
    deadline: float | None
    priority: int
    tenant: str
    images: Sequence[ImageEmbedding]
    grammar_state: GrammarState | None
    adapter: ResidentAdapter | None
    send_from: int
    sends_states: bool
    given_states: GivenStates | None


@dataclass(slots=True)
class Constraints:
    """Constrain the scheduling of a request on behalf of features.

    on_hold: nothing is computed, because its keys and values are on their way here.
    awaits_input: nothing is computed, because the input of its next token is not here.
    prefill_only: no token is drawn.
    chunk_end: a chunk may not reach beyond this token; None: no limit.
    match_end: the prefix cache may not provide this token or later ones; None: no limit.
    drafts_end: drafts may not make the sequence longer than that; None: no limit.
    chunk_most: tokens that are computed in one go; None: no limit.
    scores_prompt: log-probabilities of its prompt are still to be sent.
    """

    on_hold: bool = False
    awaits_input: bool = False
    prefill_only: bool = False
    chunk_end: int | None = None
    match_end: int | None = None
    drafts_end: int | None = None
    chunk_most: int | None = None
    scores_prompt: bool = False


class SeenTokens:
    """Keep the distinct tokens of a list to which tokens are only appended, each read once."""

    __slots__ = ("_count", "_distinct")

    def __init__(self) -> None:
        self._count = 0  # of the tokens that were read
        self._distinct = np.empty(0, np.int64)

    def of(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the distinct tokens, ascending, of the list that earlier calls were given."""
        if (count := len(tokens)) > self._count:
            self._distinct = with_tokens(self._distinct, tokens[self._count : count])
            self._count = count
        return self._distinct


def with_tokens(distinct: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Return distinct ascending tokens and those of `tokens`, as such."""
    others = np.unique(np.array(tokens, np.int64))
    places = np.searchsorted(distinct, others)
    is_new = np.append(distinct, -1)[places] != others
    if not is_new.any():
        return distinct
    return np.insert(distinct, places[is_new], others[is_new])


@dataclass(slots=True)
class Times:
    """Record the times of a request: moments on the clock of `time.monotonic()`, and seconds.

    transfer_seconds: seconds of remote prefill; None if it was never handed over.
    """

    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    first_token_at: float | None = None
    model_seconds: float = 0.0
    transfer_seconds: float | None = None

    def stages(self, now: float) -> dict[str, float]:
        """Return seconds to the first step, to the first token, to `now`, and of the model.

        "transfer" precedes "prefill" and counts the seconds of remote prefill; present only for
        requests that were handed over.
        """
        started = self.started_at or now
        first = self.first_token_at or now
        stages = {
            "queue": started - self.queued_at,
            "prefill": max(0.0, first - started - (self.transfer_seconds or 0.0)),
            "decode": now - first,
            "model": self.model_seconds,
        }
        if self.transfer_seconds is None:
            return stages
        return stages | {"transfer": self.transfer_seconds}


class Request:
    """State of one generation.

    tokens: prompt plus output, with output that was emitted before a move. That output counts as
        output in every respect but is not emitted again.
    names: the tokens as the prefix cache knows them: the same, except for image placeholders.
    num_computed: the first so many tokens have their keys and values in `blocks`.
    num_cached: tokens of the prompt that the prefix cache provided at the first admission; None
        before it.
    emitted: `StepOutput`s with tokens so far, of which `credit` are allowed.
    seen: what `distinct` has read of the tokens.
    rope_key: which rotary frequencies its keys have, where they depend on lengths
        (`attention.sequence_rope`); 0: the original ones.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "blocks",
        "constraints",
        "credit",
        "deadline",
        "emitted",
        "grammar_state",
        "images",
        "key",
        "max_length",
        "names",
        "num_cached",
        "num_computed",
        "num_prompt",
        "preemptions",
        "priority",
        "rope_key",
        "sampling",
        "seen",
        "status",
        "stop_ids",
        "tenant",
        "times",
        "tokens",
    )

    def __init__(
        self,
        key: Key,
        arrival: int,
        prompt: list[int],
        sampling: Sampling,
        *,
        max_length: int,
        stop_ids: frozenset[int] = frozenset(),
        output: Sequence[int] = (),
        credit: int = 1 << 30,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = "",
        images: ImageEmbeddings | None = None,
        grammar_state: GrammarState | None = None,
        adapter: ResidentAdapter | None = None,
    ):
        self.key = key
        self.arrival = arrival
        self.tokens = [*prompt, *output]
        self.names = self.tokens if images is None else [*images.names, *output]
        self.num_prompt = len(prompt)
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.max_length = max_length
        self.credit = credit
        self.deadline = deadline
        self.priority = priority
        self.tenant = tenant
        self.images = images
        self.grammar_state = grammar_state
        self.adapter = adapter
        self.status = Status.WAITING
        self.blocks = RequestBlocks()
        self.constraints = Constraints()
        self.times = Times()
        self.num_computed = 0
        self.num_cached: int | None = None
        self.emitted = 0
        self.preemptions = 0
        self.rope_key = 0
        self.seen = SeenTokens()

    def append(self, token: int) -> None:
        """Append a drawn token."""
        self.tokens.append(token)
        if self.names is not self.tokens:
            self.names.append(token)

    @property
    def tables(self) -> list[array[int]]:
        """Return the block tables, one for each group of layers."""
        return self.blocks.tables

    @property
    def rank(self) -> tuple[int, int]:
        """Return the sort key of requests: those served first and preempted last come first."""
        return -self.priority, self.arrival

    @property
    def root(self) -> int:
        """Return the root of its blocks in the prefix cache.

        Each adapter has its own root: it shares blocks neither with other adapters nor with the
        base model. So have keys that were rotated by other frequencies.
        """
        root = ROOT if self.adapter is None else self.adapter.root
        return root if not self.rope_key else chained(root, [self.rope_key])

    @property
    def distinct(self) -> np.ndarray:
        """Return the distinct tokens, ascending."""
        return self.seen.of(self.tokens)

    @property
    def output(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """Return the number of tokens after the prompt."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Return the tokens to run before the next draw: 1 while decoding, more in prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def num_due(self) -> int:
        """Return the tokens that may be computed in one go."""
        end, most = self.constraints.chunk_end, self.constraints.chunk_most
        due = (len(self.tokens) if end is None else end) - self.num_computed
        return due if most is None else min(due, most)

    @property
    def matchable(self) -> list[int]:
        """Return the tokens that the prefix cache may match, plus one more."""
        end = self.constraints.match_end
        return self.names if end is None else self.names[: end + 1]

    @property
    def out_of_credit(self) -> bool:
        """Return True if a step might emit more outputs than are granted.

        Scores of the prompt and tokens are outputs of their own.
        """
        return self.emitted + self.constraints.scores_prompt >= self.credit

    @property
    def is_idle(self) -> bool:
        """Return True if nothing is to compute: out of credit, on hold, or without input."""
        constraints = self.constraints
        return constraints.on_hold or constraints.awaits_input or self.out_of_credit

    @property
    def is_full(self) -> bool:
        """Return True if the request has its greatest length."""
        return len(self.tokens) >= self.max_length

    @property
    def end(self) -> str | None:
        """Return why no token can follow: "stop" (end of grammar), "length" (full), or None.

        A request whose prompt is still to be scored goes on.
        """
        if self.constraints.scores_prompt:
            return None
        if self.grammar_state is not None and self.grammar_state.ended:
            return "stop"
        return "length" if self.is_full else None
