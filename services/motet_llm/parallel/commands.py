"""Define the messages between the leader of a group and its ranks.

The leader schedules; a command makes a rank do to its part of the model and of the caches what the
leader does to its own. Ranks run commands in the order in which they were sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from motet_llm.adapters.bank import ResidentAdapter
from motet_llm.cache.request_blocks import RequestBlocks
from motet_llm.scheduling.work import Work

from .step_images import PackedImages, StepImages

INT = "i"


class Row(Struct, array_like=True, frozen=True):
    """Describe what one request computes in a step, as far as the model needs to know.

    tokens: to compute, the drafted ones included. start: position of the first. tables: block
        tables, 32-bit numbers. dropped, state_slot: as in `RequestBlocks`. adapter: its slot, -1:
        none. rope_key, num_prompt: as in `Request`.
    """

    tokens: list[int]
    start: int
    num_drafted: int
    draws: bool
    tables: list[bytes]
    dropped: int
    state_slot: int
    adapter: int
    rope_key: int
    num_prompt: int
    images: PackedImages | None

    @classmethod
    def of(cls, work: Work) -> Row:
        request = work.request
        return cls(
            tokens=work.tokens,
            start=work.span[0],
            num_drafted=len(work.draft),
            draws=work.draws,
            tables=[table.tobytes() for table in request.tables],
            dropped=request.blocks.num_dropped,
            state_slot=request.blocks.state_slot,
            adapter=-1 if request.adapter is None else request.adapter.slot,
            rope_key=request.rope_key,
            num_prompt=request.num_prompt,
            images=PackedImages.of(request.images, *work.span),
        )


class Join(Struct, tag=True, frozen=True):
    """Make a process a rank of a group. settings: an `EngineConfig` as JSON, of the whole group.

    store: file in which the ranks find each other. load_timeout: seconds that loading may take.
    shares: a descriptor of shared memory follows on the link.
    """

    rank: int
    settings: bytes
    store: str
    load_timeout: float
    shares: bool


class Forward(Struct, tag=True, frozen=True):
    """Compute a step.

    replays: whether it may be replayed. The leader decides for all: a replayed step is padded, and
    sums have the same rows in all ranks.
    """

    rows: list[Row]
    replays: bool


class LogitsOf(Struct, tag=True, frozen=True):
    """Compute logits of tokens of the last step."""

    rows: list[int]


class CopyBlocks(Struct, tag=True, frozen=True):
    """Copy blocks of the KV cache."""

    sources: list[int]
    targets: list[int]


class ScrubBlocks(Struct, tag=True, frozen=True):
    """Zero blocks of the KV cache."""

    blocks: list[int]


class TakePage(Struct, tag=True, frozen=True):
    """Take a page of memory more of the first `blocks` of the KV cache."""

    blocks: int


class PickRows(Struct, tag=True, frozen=True):
    """Report rows of a layer's keys and values at these slots; none if the layer is elsewhere."""

    layer: int
    slots: list[int]


class PutRows(Struct, tag=True, frozen=True):
    """Store rows of keys and values that another engine has computed.

    rank: whose heads they are of. dtype: of the rows. exact: they are in the cache's type, with
        their scales.
    """

    rank: int
    layer: int
    rows: list[bytes]
    dtype: str
    slots: list[int]
    exact: bool


class CopyStates(Struct, tag=True, frozen=True):
    """Copy recurrent states from slot to slot."""

    sources: list[int]
    targets: list[int]


class ScrubState(Struct, tag=True, frozen=True):
    """Zero a recurrent state."""

    slot: int


class Resize(Struct, tag=True, frozen=True):
    """Replace the KV cache by an empty one."""

    blocks_per_group: int


class UseOtherCaches(Struct, tag=True, frozen=True):
    """Use empty caches for `num_sequences` sequences of `length` tokens for now."""

    num_sequences: int
    length: int


class UseOwnCaches(Struct, tag=True, frozen=True):
    """Use the rank's own caches again."""


class LoadAdapter(Struct, tag=True, frozen=True):
    """Load an adapter into a slot, and report `Done`."""

    name: str
    slot: int


class AddAdapter(Struct, tag=True, frozen=True):
    """Add an adapter of a folder to the bank."""

    name: str
    path: str


class RemoveAdapter(Struct, tag=True, frozen=True):
    """Forget an adapter."""

    name: str


Command = (
    Join
    | Forward
    | LogitsOf
    | CopyBlocks
    | ScrubBlocks
    | TakePage
    | PickRows
    | PutRows
    | CopyStates
    | ScrubState
    | Resize
    | UseOtherCaches
    | UseOwnCaches
    | LoadAdapter
    | AddAdapter
    | RemoveAdapter
)


class Started(Struct, tag=True, frozen=True):
    """Report that a process is ready to join."""


class Done(Struct, tag=True, frozen=True):
    """Report the end of a command that the leader waits for.

    error: why it failed. rows: keys and values, where the command asks for some.
    """

    error: str = ""
    rows: list[bytes] = []


class Failed(Struct, tag=True, frozen=True):
    """Report why a rank ends.

    follows: because another one failed before it. refused: it cannot compute its part of the model,
        or not as the settings ask.
    """

    error: str
    follows: bool = False
    refused: bool = False


Report = Started | Done | Failed


@dataclass(slots=True)
class RankRequest:
    """Stand for a request on a rank that does not schedule: what the model reads of it."""

    blocks: RequestBlocks
    adapter: ResidentAdapter | None
    rope_key: int
    num_prompt: int
    images: StepImages | None

    @property
    def tables(self) -> list[array[int]]:
        return self.blocks.tables


@dataclass(slots=True)
class RankWork:
    """Stand for a `Work` on a rank that does not schedule."""

    request: RankRequest
    tokens: list[int]
    span: tuple[int, int]
    draft: Sequence[int]
    draws: bool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, row: Row) -> Any:
        """Return the work of a row; the model runner takes it for a `Work`."""
        tables = [array(INT, table) for table in row.tables]
        blocks = RequestBlocks(tables, num_dropped=row.dropped, state_slot=row.state_slot)
        adapter = None if row.adapter < 0 else ResidentAdapter("", row.adapter, 0)
        images = None if row.images is None else StepImages(row.images)
        request = RankRequest(blocks, adapter, row.rope_key, row.num_prompt, images)
        stop = row.start + len(row.tokens)
        draft = row.tokens[len(row.tokens) - row.num_drafted :]
        return cls(request, row.tokens, (row.start, stop), draft, row.draws)
