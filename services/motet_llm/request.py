"""One request inside the engine: its tokens, its blocks, its rank, its credit and its clocks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypedDict

from motet_shared.capacity import KvGroup
from motet_shared.messages import Sampling
from motet_shared.prefixes import ROOT

from .sights import Sights

if TYPE_CHECKING:
    from .adapter_bank import Adapter
    from .grammar import Sentence
    from .heavy_hitters import Watch
    from .prefix_cache import Node
    from .spill import Spilled

Key = Hashable


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Options(TypedDict, total=False):
    """What else `Engine.add` takes.

    output: tokens emitted before a move. They count for positions, penalties, max_tokens and min_tokens and are
        prefilled with the prompt, but are not emitted again.
    credit: `StepOutput`s with tokens that may be emitted before the first `grant`; without bounds by default.
    deadline: on the clock of `time.monotonic()`.
    priority: higher ones go first, and may take the place of lower ones; 0 by default.
    tenant: whose share of the engine the request uses.
    sentence: the reply in its grammar, `output` included; it ends with it.
    adapter: what changes the model for this request; it stays in its slot until the request has left.
    send_from: the prompt is computed for another engine, which has its tokens up to here; nothing is drawn.
    """

    output: Sequence[int]
    credit: int
    deadline: float | None
    priority: int
    tenant: str
    sentence: Sentence | None
    adapter: Adapter | None
    send_from: int


class Request:
    """State of one generation.

    `tokens` is prompt plus output; the first `num_computed` of them have their keys and values in `tables`, a block
    table for each group of layers, and the first `num_published` blocks of them are in the prefix cache, below `node`.
    Output that was emitted before a move counts as output in every respect but is not emitted again. `names` are what
    the tokens are called in the prefix cache: themselves, but for those that stand for a picture.
    `receiving`: somebody else computes its prompt. `sent`: it is computed for somebody else, who has or is about to get
    so many of its tokens; -1: for us. `watch`: its prompt is to be cut down when it is computed. `left_out`: tokens of
    the prompt that layers which see everything then no longer have. `spilled`: its first blocks, where the pool does
    not hold all of them.
    """

    __slots__ = (
        "accepted",
        "adapter",
        "arrival",
        "credit",
        "deadline",
        "emitted",
        "first_token_at",
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
        "sentence",
        "sights",
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
        sights: Sights | None = None,
        sentence: Sentence | None = None,
        adapter: Adapter | None = None,
        send_from: int = -1,
        watch: Watch | None = None,
    ):
        self.key = key
        self.arrival = arrival
        self.tokens = [*prompt, *output]
        self.sights = sights
        self.sentence = sentence
        self.adapter = adapter
        self.names = self.tokens if sights is None else [*sights.names, *output]
        self.num_prompt = len(prompt)
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.credit = credit
        self.deadline = deadline
        self.max_length = max_length
        self.priority = priority
        self.tenant = tenant
        self.tables: list[array[int]] = []
        self.num_released: list[int] = []  # blocks at the start of each table that its window has passed
        self.whole_from: list[int] = []  # by table: first token from which nothing is missing
        self.watch = watch
        self.left_out = 0
        self.state_slot = -1
        self.spilled: Spilled | None = None
        self.node: Node | None = None
        self.num_published = 0
        self.num_computed = 0
        self.num_cached: int | None = None  # of the prompt, when it was first admitted
        self.emitted = 0
        self.accepted = self.rejected = 0  # tokens of drafts
        self.preemptions = 0
        self.status = Status.WAITING
        self.queued_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.model_seconds = 0.0
        self.sent = send_from
        self.receiving = False
        self.was_handed_over = False  # once at most, however it went
        self.transfer_seconds = 0.0

    def append(self, token: int) -> None:
        """A token that was drawn."""
        self.tokens.append(token)
        if self.names is not self.tokens:
            self.names.append(token)

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts those first that are served first and give way last."""
        return -self.priority, self.arrival

    @property
    def root(self) -> int:
        """Where its blocks begin in the prefix cache: adapters share nothing, neither with each other nor with none."""
        return ROOT if self.adapter is None else self.adapter.root

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run before the next one can be drawn: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.num_computed

    @property
    def watching(self) -> Watch | None:
        """The watch over a prompt that is still whole, and will be cut down."""
        return None if self.left_out else self.watch

    @property
    def num_due(self) -> int:
        """Tokens that may be computed next without a break: where a prompt is cut down, there is one."""
        return self.num_uncomputed if self.watching is None else self.num_prompt - self.num_computed

    @property
    def findable(self) -> list[int]:
        """What may be looked for in the prefix cache, and one token more: what is watched is always computed."""
        return self.names if self.watch is None else self.names[: self.watch.start + 1]

    def places(self, group: KvGroup, num_tokens: int) -> int:
        """How many places its first computed tokens take in the block table of a group of layers."""
        return num_tokens - self.left_out if group.window is None else num_tokens

    @property
    def paused(self) -> bool:
        """The caller has not yet asked for another item."""
        return self.emitted >= self.credit

    @property
    def is_idle(self) -> bool:
        """There is nothing to compute for it now: it waits for its caller, or for somebody else's keys and values."""
        return self.receiving or self.paused

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.max_length

    @property
    def end(self) -> str | None:
        """Why nothing can follow its output, if nothing can: "stop" where its grammar ends, else "length"."""
        if self.sentence is not None and self.sentence.ended:
            return "stop"
        return "length" if self.is_full else None

    def timing(self, now: float) -> dict[str, float]:
        """Seconds from `add` to the first step, to the first token, to `now`; and this request's share of the model.

        "transfer": before "prefill", those in which somebody else computed the prompt; only where it was handed over.
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
