"""Exchange tensors between the ranks of a group, each time within a deadline.

Every collective ends in time: with its result, or with `GroupFailed` when a rank has died, hangs,
or is late. `GlooCollectives` connects ranks over sockets; `SharedCollectives`, for the ranks of a
stage on one host, exchanges sums in memory that they share. `membership.py` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from motet_kernels.rank_memory import RankMemory, RanksApart
from motet_kernels.runtime.errors import KernelError
from motet_shared.errors import InternalError

LOOPBACK = "127.0.0.1"


class GroupFailed(InternalError):
    """Report that a group of ranks has ended: a rank died, hangs, or failed a step."""


class RankLost(GroupFailed):
    """Report that the process of a rank is gone, or could not be started."""


class Collectives(Protocol):
    """Define what the ranks that compute the same layers do together.

    All ranks make the same calls in the same order.
    """

    rank: int
    size: int

    def limit(self, seconds: float) -> None:
        """Set the deadline of the collectives that follow."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, in place of a dense `x`."""

    def sum_in_pairs(self, x: Tensor) -> Tensor:
        """Return the same, with pairs of neighbouring ranks added first, rounded to their type.

        The number of ranks is a power of two.
        """

    def smallest(self, number: int) -> int:
        """Return the smallest number of all ranks."""

    def join(self, part: Tensor, widths: list[int]) -> Tensor:
        """Return the last axes of all ranks' tensors, `widths` wide, one after the other."""

    def join_at_first(self, part: Tensor, widths: list[int]) -> Tensor:
        """Return the same on the first rank; others may get their part only."""

    def replays(self) -> bool:
        """Return True if sums are native calls, which can be part of a recorded step."""

    def break_off(self) -> None:
        """Have ranks that wait for others give up, as far as that can be; from any thread."""

    def explained(self) -> AbstractContextManager[None]:
        """Raise GroupFailed if a replayed step within fails for want of another rank."""


class Alone:
    """Be the only rank."""

    rank, size = 0, 1

    def limit(self, seconds: float) -> None: ...

    def sum(self, x: Tensor) -> Tensor:
        return x

    def sum_in_pairs(self, x: Tensor) -> Tensor:
        return x

    def smallest(self, number: int) -> int:
        return number

    def join(self, part: Tensor, widths: list[int]) -> Tensor:
        return part

    def join_at_first(self, part: Tensor, widths: list[int]) -> Tensor:
        return part

    def replays(self) -> bool:
        return True

    def break_off(self) -> None: ...

    def explained(self) -> AbstractContextManager[None]:
        return nullcontext()


class SharedCollectives:
    """Exchange tensors with ranks of the same host in shared memory.

    memory: this rank's place in it. seconds: deadline of a collective, until `limit`.
    """

    def __init__(self, memory: RankMemory, seconds: float):
        """Wait for the other ranks. Raises GroupFailed."""
        self.rank, self.size = memory.rank, memory.size
        self._memory = memory
        self.limit(seconds)
        with self._deadline("meeting the other ranks"):
            memory.meet()

    def limit(self, seconds: float) -> None:
        self._seconds = seconds
        self._memory.limit(seconds)

    def sum(self, x: Tensor) -> Tensor:
        with self._deadline("a sum"):
            return self._memory.sum(x.contiguous())

    def sum_in_pairs(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self.sum(x)
        return add_in_pairs(self._gather(x))  # each sum is rounded, as one rank's are

    def smallest(self, number: int) -> int:
        return int(min(self._gather(torch.tensor([number]))))

    def join(self, part: Tensor, widths: list[int]) -> Tensor:
        return self._join(part, widths, takes=True)

    def join_at_first(self, part: Tensor, widths: list[int]) -> Tensor:
        return self._join(part, widths, takes=self.rank == 0)

    def replays(self) -> bool:
        return True

    def break_off(self) -> None:
        self._memory.break_off()

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except KernelError as error:
            if not self._memory.failed:
                raise
            raise self._failure("a replayed step", error) from error

    def _gather(self, x: Tensor) -> Sequence[Tensor]:
        flat = x.reshape(1, -1).contiguous()
        found = self._join(flat, [flat.shape[1]] * self.size, takes=True)
        return found.view(self.size, *x.shape).unbind()

    def _join(self, part: Tensor, widths: list[int], *, takes: bool) -> Tensor:
        with self._deadline("a gather"):
            return self._memory.join(part.contiguous(), widths, takes=takes)

    @contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        try:
            yield
        except RanksApart as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: Exception) -> GroupFailed:
        return _failure(self, self._seconds, what, error)


class GlooCollectives:
    """Connect one rank to the others of its group over gloo.

    store: where the ranks find each other. seconds: deadline of a collective, until `limit` sets
    another one. name: distinguishes groups in one store.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float, name: str = "all"):
        self.rank, self.size = rank, size
        self._seconds = seconds
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = self._timeout
        with self._deadline("meeting the other ranks"):
            shared = dist.PrefixStore(name, store)
            self._group: Any = dist.ProcessGroupGloo(shared, rank, size, options)

    def limit(self, seconds: float) -> None:
        self._seconds = seconds
        self._group._set_default_timeout(self._timeout)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def sum(self, x: Tensor) -> Tensor:
        whole = x.contiguous()
        self._wait("a sum", lambda: self._group.allreduce([whole]))
        return whole

    def sum_in_pairs(self, x: Tensor) -> Tensor:
        return add_in_pairs(self._gather(x))

    def smallest(self, number: int) -> int:
        found, options = torch.tensor([number]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._wait("an agreement", lambda: self._group.allreduce([found], options))
        return int(found)

    def join(self, part: Tensor, widths: list[int]) -> Tensor:
        found = self._gather(torch.nn.functional.pad(part, (0, max(widths) - part.shape[-1])))
        return torch.cat(
            [one[..., :width] for one, width in zip(found, widths, strict=True)], dim=-1
        )

    def join_at_first(self, part: Tensor, widths: list[int]) -> Tensor:
        return self.join(part, widths)

    def replays(self) -> bool:
        return False

    def break_off(self) -> None:
        """Do nothing: connections close with the process of a rank."""

    def explained(self) -> AbstractContextManager[None]:
        return nullcontext()

    def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor to a rank, which calls `receive` with its shape and type."""
        # A point-to-point wait has the deadline of the connection's start, unless it is given one.
        with self._deadline(f"sending to rank {rank}"):
            self._group.send([x.contiguous()], rank, 0).wait(self._timeout)

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Return the tensor that a rank sends, of the shape and type of `like`."""
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        with self._deadline(f"waiting for rank {rank}"):
            self._group.recv([found], rank, 0).wait(self._timeout)
        return found

    def _gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' tensors of one shape, by rank."""
        whole = x.contiguous()
        found = [torch.empty_like(whole) for _ in range(self.size)]
        self._wait("a gather", lambda: self._group.allgather([found], [whole]))
        return found

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        with self._deadline(what):
            start().wait()

    @contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's: a closed connection, or no answer in time
            raise _failure(self, self._seconds, what, error) from error


def _failure(ranks: Collectives, seconds: float, what: str, error: Exception) -> GroupFailed:
    return GroupFailed(
        f"rank {ranks.rank} of {ranks.size} failed at {what} (collective_timeout={seconds:g}):"
        f" {str(error).splitlines()[0][:200]}"
    )


def add_in_pairs(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of a power of two of tensors: neighbours first, then their sums."""
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
