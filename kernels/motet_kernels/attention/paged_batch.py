"""Describe the rows of a step over a paged KV cache: where queries are packed and keys are stored.

Shapes: B rows, M table entries per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels.runtime.arguments import check_device, check_integers
from motet_kernels.runtime.errors import KernelError
from motet_kernels.spans import Spans, upload

_ALIGNED = 4  # int32 elements in 16 bytes, the alignment that Triton specializes on


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """Hold packed queries and key locations of a step, all int32, validated on construction.

    tables_BM: block table of each row, in the order of positions; only entries whose blocks hold
        keys that a query attends to are read.
    starts: B + 1 cumulative counts; row b has the packed tokens `starts[b] : starts[b + 1]`.
    lengths_B: number of keys of each row, including those of this step.

    For a GPU, construct it from CPU tensors and then move it, `PagedBatch(…).to(device)`:
    validating GPU tensors would synchronize with the device. Tables and lengths may be written in
    place between calls. Starts may be for the CPU's native kernel alone, with the same last one:
    other kernels read `spans`.

    Raises `KernelError` on tensors that do not fit each other.
    """

    tables_BM: Tensor
    starts: Tensor
    lengths_B: Tensor
    spans: Spans = field(init=False)

    def __post_init__(self) -> None:
        check_integers("tables_BM", self.tables_BM, 2, torch.int32)
        check_integers("starts", self.starts, 1, torch.int32)
        check_integers("lengths_B", self.lengths_B, 1, torch.int32)
        rows = len(self.lengths_B)
        if len(self.starts) != rows + 1 or len(self.tables_BM) != rows:
            raise KernelError(
                f"starts, tables_BM: {len(self.starts)} starts and {len(self.tables_BM)} tables"
                f" must be {rows + 1} and {rows}, for {rows} lengths"
            )
        check_device("starts", self.starts, "tables_BM", self.tables_BM)
        check_device("lengths_B", self.lengths_B, "tables_BM", self.tables_BM)
        spans = Spans(tuple(self.starts.tolist()), self.tables_BM.device)
        for row, ((start, stop), length) in enumerate(
            zip(spans.pairs, self.lengths_B.tolist(), strict=True)
        ):
            if length < stop - start:
                raise KernelError(
                    f"lengths_B[{row}]: {length} keys must be at least the row's {stop - start} queries"
                )
        object.__setattr__(self, "spans", spans)

    @property
    def num_tokens(self) -> int:
        """Return the number of packed tokens of all rows."""
        return self.spans.num_tokens

    def to(self, device: torch.device) -> PagedBatch:
        """Return the same batch on `device`, in one copy that does not wait for GPU work."""
        parts = (self.lengths_B, self.starts, self.tables_BM)
        sizes = [part.numel() for part in parts]
        padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        packed = torch.cat(
            [
                F.pad(part.flatten(), (0, wide - size))
                for part, size, wide in zip(parts, sizes, padded, strict=True)
            ]
        )
        moved_parts = upload(packed, device).split(padded)
        lengths_B, starts, tables = (
            part[:size] for part, size in zip(moved_parts, sizes, strict=True)
        )
        moved = object.__new__(PagedBatch)
        tables_BM = tables.view(self.tables_BM.shape)
        fields = {"tables_BM": tables_BM, "starts": starts, "lengths_B": lengths_B}
        for name, value in (fields | {"spans": Spans(self.spans.bounds, tables.device)}).items():
            object.__setattr__(moved, name, value)
        return moved
