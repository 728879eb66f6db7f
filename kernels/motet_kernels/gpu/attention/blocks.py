"""Move blocks of many storages in one launch: a program moves a piece of one block in one storage.

The addresses of the storages are in a table on their device. Shapes: as in `motet_kernels.attention.blocks`,
L storages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample
from motet_kernels.spans import upload

_VECTOR = 16  # bytes that a thread moves at once, if all rows are multiples of this


@triton.jit
def _move_blocks(
    storages_ptr, L, blocks_ptr, data_ptr, block_bytes,
    KIND: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) // L
    storage = tl.program_id(0) % L
    address = tl.load(storages_ptr + storage)
    size = tl.load(storages_ptr + L + storage)
    begin = tl.load(storages_ptr + 2 * L + storage)
    block = tl.load(blocks_ptr + number)
    inside = block * size
    outside = number.to(tl.int64) * block_bytes + begin
    units = size // UNIT
    if UNIT > 1:
        # The compiler knows nothing of loaded numbers: it vectorizes where alignment is declared.
        units = tl.multiple_of(units, 4)
        inside = tl.multiple_of(inside // UNIT, 4)
        outside = tl.multiple_of(outside // UNIT, 4)
        rows = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + inside
        data = data_ptr.to(tl.pointer_type(tl.int32)) + outside
    else:
        rows = address.to(tl.pointer_type(tl.uint8)) + inside
        data = data_ptr + outside
    at = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < units
    if KIND == "read":
        tl.store(data + at, tl.load(rows + at, mask=mask), mask=mask)
    elif KIND == "write":
        tl.store(rows + at, tl.load(data + at, mask=mask), mask=mask)
    else:
        tl.static_assert(KIND == "copy")
        target = tl.load(blocks_ptr + tl.num_programs(0) // L + number)
        there = (target - block) * size // UNIT
        if UNIT > 1:
            there = tl.multiple_of(there, 4)
        tl.store(rows + there + at, tl.load(rows + at, mask=mask), mask=mask)


_MOVE = GpuKernel(
    _move_blocks,
    Config(warps=4, constants={"CHUNK": 2048}),
    Config(warps=8, constants={"CHUNK": 4096}),
    Config(warps=4, constants={"CHUNK": 1024}),
)


class Storages:
    """Move blocks of dense rows of bytes `[P, X_l]`; the storages must keep their addresses."""

    def __init__(self, storages: Sequence[Tensor]):
        sizes = [tensor.shape[1] for tensor in storages]
        addresses = [tensor.data_ptr() for tensor in storages]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        self._count, self._widest, self._nbytes = len(sizes), max(sizes), sum(sizes)
        self._device = storages[0].device
        self._table = torch.tensor([addresses, sizes, begins], device=self._device)
        self._unit = 4 if not any(number % _VECTOR for number in (*sizes, *addresses)) else 1
        self._storages = storages

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block `sources[i]` to block `targets[i]`."""
        self._move([*sources, *targets], len(sources), self._storages[0], "copy")

    def read(self, blocks: Sequence[int]) -> Tensor:
        """Return the bytes of `blocks`, uint8 `[B, X]`."""
        out_BX = self._storages[0].new_empty(len(blocks), self._nbytes)
        self._move(blocks, len(blocks), out_BX, "read")
        return out_BX

    def write(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Write rows `[X]` of bytes into `blocks`."""
        if blocks:
            data_BX = torch.stack(list(contents))
            there_BX = data_BX if data_BX.device == self._device else upload(data_BX, self._device)
            self._move(blocks, len(blocks), there_BX, "write")

    def _move(self, blocks: Sequence[int], count: int, data: Tensor, kind: str) -> None:
        there = upload(torch.tensor(blocks, dtype=torch.int64), self._device)
        grid = partial(_programs, count * self._count, self._widest // self._unit)
        _MOVE(grid, self._table, self._count, there, data, self._nbytes, KIND=kind, UNIT=self._unit)


def _programs(rows: int, units: int, constants: Constants) -> tuple[int, int]:
    return rows, triton.cdiv(units, constants["CHUNK"])


def samples() -> Iterator[LaunchSample]:
    """Yield blocks of 16 tokens of 32 layers with 8 heads of 128, and unaligned storages.

    The blocks are bfloat16; rows of 90 bytes cannot be moved in vectors.
    """
    for row, name in ((2 * 8 * 16 * 128 * 2, "65,536 bytes"), (90, "90 bytes")):
        storages = Storages([torch.zeros(2, row, dtype=torch.uint8) for _ in range(2)])
        content_X = torch.zeros(2 * row, dtype=torch.uint8)
        yield LaunchSample(f"copied, {name}", partial(storages.copy, [0], [1]))
        yield LaunchSample(f"read, {name}", partial(storages.read, [0, 1]))
        yield LaunchSample(
            f"written, {name}", partial(storages.write, [0, 1], [content_X, content_X])
        )
