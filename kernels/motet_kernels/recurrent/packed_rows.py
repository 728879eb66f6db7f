"""Describe the rows of a step that advance recurrent states: their tokens and state slots.

Shapes: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from motet_kernels.runtime.errors import KernelError


@dataclass(slots=True)
class PackedRows:
    """Locate a step's rows: row b's tokens `starts[b] : starts[b + 1]` advance state `slots_B[b]`.

    `slots_B` is int64, its slots distinct; `starts` are B + 1 ascending numbers from 0. Raises
    `KernelError` on slots of another type or number.
    """

    slots_B: Tensor
    starts: list[int]
    starts_B1: Tensor = field(init=False)
    _slots: list[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.slots_B.dtype != torch.int64 or self.slots_B.shape != (len(self.starts) - 1,):
            raise KernelError(
                f"slots_B: {self.slots_B.dtype} of shape {list(self.slots_B.shape)} must be int64, "
                f"one for each of {len(self.starts) - 1} rows"
            )
        self.slots_B = self.slots_B.contiguous()
        self.starts_B1 = torch.tensor(self.starts)

    def slots(self) -> list[int]:
        """Return `slots_B` as a list. From a GPU it is fetched once, not once per layer."""
        if self._slots is None:
            self._slots = self.slots_B.tolist()
        return self._slots
