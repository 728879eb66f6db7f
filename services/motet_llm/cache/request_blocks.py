"""Describe what one running request holds of the KV cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spill import Spilled


@dataclass(slots=True)
class RequestBlocks:
    """Block tables and state slot of a request; `BlockTables` manages them.

    tables: a block table for each group of layers; empty while the request waits.
    num_released: by table, the blocks at its start that its window has passed.
    whole_from: by table, the first token from which on no block is missing.
    num_dropped: tokens of a compressed prompt that layers with full attention no longer hold.
    state_slot: slot of its recurrent state; -1: none.
    spilled: its first blocks, if the pool does not hold the whole sequence.
    """

    tables: list[array[int]] = field(default_factory=list)
    num_released: list[int] = field(default_factory=list)
    whole_from: list[int] = field(default_factory=list)
    num_dropped: int = 0
    state_slot: int = -1
    spilled: Spilled | None = None

    @classmethod
    def empty(cls, num_groups: int) -> RequestBlocks:
        """Return empty tables for `num_groups` groups of layers."""
        return cls([array("i") for _ in range(num_groups)], [0] * num_groups, [0] * num_groups)
