"""Sum and join tensors of the ranks of one host, through memory that their processes share.

The memory is a file without a name (`create`), which the ranks hand to each other as a descriptor;
it is gone with its last mapping. All ranks make the same calls in the same order. A rank that is
late, has died or was stopped makes the others raise `RanksApart`, within a deadline; after that the
memory is of no use. Native only: `can_share` says whether there is a library.

Numbers are summed in float32, neighbouring ranks first, then pairs of pairs (`sum_in_pairs`, the
twin): a sum has the same bits on every rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from .runtime.arguments import FLOATS
from .runtime.errors import KernelError
from .runtime.native import Kernel

_SUM = Kernel("motet_rank_sum", "ppii")
_JOIN = Kernel("motet_rank_join", "pppip")
_BREAK_OFF = Kernel("motet_rank_break_off", "p")
MAX_RANKS = 64
_SLOT = (
    512 << 10
)  # bytes of a part that are exchanged at a time; two of them per rank stay in caches
_LINE = 128  # as in csrc/rank_memory.cpp
# Nanoseconds that a rank spins until it sleeps: about what sleeping and waking cost. Where
# there are fewer cores than ranks, the one that is waited for may need this core.
_SPIN, _SPIN_CROWDED = 50_000, 2_000
_REASONS = {1: "another rank is late", 2: "another rank has failed"}


class RanksApart(RuntimeError):
    """Report that not all ranks have come to an exchange: one is late, or has failed."""


class _Place(ctypes.Structure):
    """Declare `Place` of csrc/rank_memory.cpp."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "memory",
            "rank",
            "size",
            "slot_bytes",
            "spin_ns",
            "timeout_ns",
            "pieces",
            "failure",
        )
    ]


def can_share() -> bool:
    """Return True if ranks of this host can exchange tensors in shared memory."""
    return _SUM.native() is not None and hasattr(os, "memfd_create")


def create(ranks: int, groups: int = 1) -> int:
    """Return a descriptor of memory for groups of `ranks` each. Raises OSError."""
    descriptor = os.memfd_create("motet-ranks")
    try:
        os.ftruncate(descriptor, _nbytes(ranks) * groups)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _nbytes(ranks: int) -> int:
    """Return the bytes of a group's memory, in whole pages."""
    size = _LINE * (1 + ranks) + 2 * ranks * _SLOT
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class RankMemory:
    """Hold the place of one rank in the memory of its group.

    descriptor: of `create`; it may be closed afterwards. group: number of the group in it. seconds:
    how long a rank waits for another one, until `limit`.
    """

    def __init__(self, descriptor: int, rank: int, size: int, seconds: float, group: int = 0):
        if not 1 <= size <= MAX_RANKS or not 0 <= rank < size:
            raise KernelError(f"rank: {rank} of {size} must be one of at most {MAX_RANKS}")
        nbytes = _nbytes(size)
        self.rank, self.size = rank, size
        self._pages = mmap.mmap(descriptor, nbytes, offset=nbytes * group)
        cores = len(os.sched_getaffinity(0))
        self._place = _Place(
            memory=ctypes.addressof(ctypes.c_char.from_buffer(self._pages)),
            rank=rank,
            size=size,
            slot_bytes=_SLOT,
            spin_ns=_SPIN if cores >= size else _SPIN_CROWDED,
        )
        self._address = ctypes.addressof(self._place)
        self.limit(seconds)

    def limit(self, seconds: float) -> None:
        """Set how long this rank waits for another one."""
        self._place.timeout_ns = int(seconds * 1e9)

    @property
    def failed(self) -> bool:
        """Return True if an exchange has failed: every later one does, too."""
        return bool(self._place.failure)

    def sum(self, x: Tensor) -> Tensor:
        """Return `x` as the sum over all ranks, in place: dense, of float32 or bfloat16.

        Can be replayed (`runtime/replay.py`). Raises `RanksApart`, and `KernelError` on others.
        """
        if x.dtype not in FLOATS or not x.is_cpu or not x.is_contiguous():
            raise KernelError(
                f"x: {x.dtype} on {x.device} must be dense float32 or bfloat16 on a CPU"
            )
        native = _SUM.native()
        assert native is not None
        self._check(native(self._address, x.data_ptr(), int(x.dtype == torch.bfloat16), x.numel()))
        return x

    def join(self, part: Tensor, widths: Sequence[int], *, takes: bool = True) -> Tensor:
        """Return the last axes of all ranks' dense tensors, `widths` wide, side by side.

        takes: False returns the part alone, for a rank that the whole is not for. Raises
        `RanksApart`, and `KernelError` on a part of another width.
        """
        if part.shape[-1] != widths[self.rank] or not part.is_contiguous() or not part.is_cpu:
            raise KernelError(
                f"part: shape {list(part.shape)} must be dense and end with {widths[self.rank]}"
            )
        rows = part.numel() // part.shape[-1] if part.shape[-1] else part.shape[:-1].numel()
        found = part.new_empty(*part.shape[:-1], sum(widths)) if takes else None
        nbytes = array("q", [width * part.element_size() for width in widths])
        native = _JOIN.native()
        assert native is not None
        self._check(
            native(
                self._address,
                part.data_ptr(),
                None if found is None else found.data_ptr(),
                rows,
                nbytes.buffer_info()[0],
            )
        )
        return part if found is None else found

    def meet(self) -> None:
        """Wait until all ranks are here. Raises `RanksApart`."""
        self.join(torch.empty(0), [0] * self.size)

    def break_off(self) -> None:
        """Have all ranks that wait, or will, raise `RanksApart`; from any thread."""
        native = _BREAK_OFF.native()
        assert native is not None
        native(self._address)

    def _check(self, failure: int) -> None:
        if failure:
            raise RanksApart(_REASONS[failure])


def sum_in_pairs(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in the order of `RankMemory.sum`: its twin.

    Neighbours are added first, then their sums, in float32; an odd one is added later.
    """
    wide = [part.float() for part in parts]
    while len(wide) > 1:
        pairs = [one + other for one, other in zip(wide[::2], wide[1::2], strict=False)]
        wide = pairs + wide[2 * len(pairs) :]
    return wide[0].to(parts[0].dtype)
