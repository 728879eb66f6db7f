"""Represent one request inside the engine: its tokens, blocks, rank, credit and times."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypedDict

from motet_llm.models.image_embeddings import ImageEmbeddings
from motet_models.capacity import KvGroup
from motet_shared.messages import Sampling
from motet_shared.text.prefixes import ROOT

if TYPE_CHECKING:
    from motet_llm.adapters.bank import Adapter
    from motet_llm.attention.heavy_hitters import Watch
    from motet_llm.cache.prefix_cache import Node
    from motet_llm.cache.spill import Spilled
    from motet_llm.grammar.grammar import GrammarState

Key = Hashable


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Options(TypedDict, total=False):
    """Optional arguments of `Engine.add`.

    output: tokens emitted before a move. They count for positions, penalties, max_tokens and
        min_tokens and are prefilled with the prompt, but are not emitted again.
    credit: `StepOutput`s with tokens that may be emitted before the first `grant`; unbounded by
        default.
    deadline: on the clock of `time.monotonic()`.
    priority: higher ones go first and may preempt lower ones; 0 by default.
    tenant: the tenant whose share of the engine the request uses.
    sentence: the grammar state of the reply, `output` included; the reply ends with it.
    adapter: LoRA adapter of this request; it stays in its slot until the request has left.
    send_from: the prompt is computed for another engine, which has its tokens up to here; no token
        is drawn.
    """

    output: Sequence[int]
    credit: int
    deadline: float | None
    priority: int
    tenant: str
    grammar_state: GrammarState | None
    adapter: Adapter | None
    send_from: int


class Request:
    """State of one generation.

    tokens: prompt plus output, with output that was emitted before a move. That output counts as
        output in every respect but is not emitted again.
    names: the tokens as the prefix cache knows them: the same, except for image placeholders.
    num_computed: the first so many tokens have their keys and values in `tables`.
    tables: a block table for each group of layers.
    num_published: the first so many blocks are in the prefix cache, below `node`.
    receiving: a prefill worker computes the prompt.
    sent: for a prompt that is computed for another engine, how many of its tokens that engine has
        or is about to get; -1 for a request that is generated here.
    watch: set if the prompt is to be compressed once it is computed.
    left_out: tokens of a compressed prompt that layers with full attention no longer hold.
    spilled: the first blocks of a sequence that the pool does not hold completely.
    """

    __slots__ = (
        "accepted",
        "adapter",
        "arrival",
        "credit",
        "deadline",
        "emitted",
        "first_token_at",
        "grammar_state",
        "images",
        "key",
        "left_out",
        "max_length",
        "model_seconds",
        "names",
        "node",
        "num_cached",
        "num_computed",
        "num_prompt",
        "num_published",
        "num_released",
        "preemptions",
        "priority",
        "queued_at",
        "receiving",
        "rejected",
        "sampling",
        "sent",
        "spilled",
        "started_at",
        "state_slot",
        "status",
        "stop_ids",
        "tables",
        "tenant",
        "tokens",
        "transfer_seconds",
        "was_handed_over",
        "watch",
        "whole_from",
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
        adapter: Adapter | None = None,
        send_from: int = -1,
        watch: Watch | None = None,
    ):
        self.key = key
        self.arrival = arrival
        self.tokens = [*prompt, *output]
        self.images = images
        self.grammar_state = grammar_state
        self.adapter = adapter
        self.names = self.tokens if images is None else [*images.names, *output]
        self.num_prompt = len(prompt)
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.credit = credit
        self.deadline = deadline
        self.max_length = max_length
        self.priority = priority
        self.tenant = tenant
        self.tables: list[array[int]] = []
        self.num_released: list[
            int
        ] = []  # blocks at the start of each table that its window has passed
        self.whole_from: list[int] = []  # by table: first token from which on no block is missing
        self.watch = watch
        self.left_out = 0
        self.state_slot = -1
        self.spilled: Spilled | None = None
        self.node: Node | None = None
        self.num_published = 0
        self.num_computed = 0
        self.num_cached: int | None = None  # cached tokens of the prompt, at its first admission
        self.emitted = 0
        self.accepted = self.rejected = 0  # draft tokens
        self.preemptions = 0
        self.status = Status.WAITING
        self.queued_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.model_seconds = 0.0
        self.sent = send_from
        self.receiving = False
        self.was_handed_over = False  # at most once, whatever the outcome
        self.transfer_seconds = 0.0

    def append(self, token: int) -> None:
        """Append a drawn token."""
        self.tokens.append(token)
        if self.names is not self.tokens:
            self.names.append(token)

    @property
    def rank(self) -> tuple[int, int]:
        """Return the sort key of requests: those served first and preempted last come first."""
        return -self.priority, self.arrival

    @property
    def root(self) -> int:
        """Return the root of its blocks in the prefix cache.

        Each adapter has its own root: it shares blocks neither with other adapters nor with the
        base model.
        """
        return ROOT if self.adapter is None else self.adapter.root

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Return the tokens to run before the next draw: 1 while decoding, more in prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def watching(self) -> Watch | None:
        """Return the watch over a prompt that is not yet compressed, or None."""
        return None if self.left_out else self.watch

    @property
    def num_due(self) -> int:
        """Return the tokens that may be computed in one go.

        Where a prompt is to be compressed, computing stops at its end.
        """
        return self.num_uncomputed if self.watching is None else self.num_prompt - self.num_computed

    @property
    def findable(self) -> list[int]:
        """Return the tokens that the prefix cache may match, plus one more.

        Watched tokens are always computed, because their queries are needed.
        """
        return self.names if self.watch is None else self.names[: self.watch.start + 1]

    def places(self, group: KvGroup, num_tokens: int) -> int:
        """Return how many slots the first `num_tokens` tokens take in a group's block table."""
        return num_tokens - self.left_out if group.window is None else num_tokens

    @property
    def out_of_credit(self) -> bool:
        """Return True if the request is out of credit."""
        return self.emitted >= self.credit

    @property
    def is_idle(self) -> bool:
        """Return True if nothing is to compute: out of credit, or prefilled remotely."""
        return self.receiving or self.out_of_credit

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.max_length

    @property
    def end(self) -> str | None:
        """Return why no token can follow: "stop" (end of grammar), "length" (full), or None."""
        if self.grammar_state is not None and self.grammar_state.ended:
            return "stop"
        return "length" if self.is_full else None

    def timing(self, now: float) -> dict[str, float]:
        """Return seconds to the first step, to the first token, to `now`, and of the model.

        "transfer" precedes "prefill" and counts the seconds of remote prefill; present only for
        requests that were handed over.
        """
        started = self.started_at or now
        first = self.first_token_at or now
        stages = {
            "queue": started - self.queued_at,
            "prefill": max(0.0, first - started - self.transfer_seconds),
            "decode": now - first,
            "model": self.model_seconds,
        }
        return stages | {"transfer": self.transfer_seconds} if self.was_handed_over else stages
