"""Exchange tensors between the ranks of a group, each time within a deadline.

Every collective ends in time: with its result, or with `GroupFailed` when a rank has died (its
connections close), hangs, or is late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from motet_shared.errors import InternalError

LOOPBACK = "127.0.0.1"


class GroupFailed(InternalError):
    """Report that a group of ranks has ended: a rank died, hangs, or failed a step."""


class RankLost(GroupFailed):
    """Report that the process of a rank is gone, or could not be started."""


class Collectives:
    """Connect one rank to the others of its group over gloo.

    store: where the ranks find each other. seconds: deadline of a collective, until `limit` sets
    another one. name: distinguishes groups in one store.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float, name: str = "all"):
        self.rank, self.size = rank, size
        self._seconds = seconds
        self._group: Any = None
        if size > 1:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            options._timeout = self._timeout
            with self._deadline("meeting the other ranks"):
                shared = dist.PrefixStore(name, store)
                self._group = dist.ProcessGroupGloo(shared, rank, size, options)

    def limit(self, seconds: float) -> None:
        """Set the deadline of the collectives that follow."""
        self._seconds = seconds
        if self._group is not None:
            self._group._set_default_timeout(self._timeout)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, in place of a dense `x`."""
        if self.size == 1:
            return x
        whole = x.contiguous()
        self._wait("a sum", lambda: self._group.allreduce([whole]))
        return whole

    def smallest(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        if self.size == 1:
            return number
        found, options = torch.tensor([number]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._wait("an agreement", lambda: self._group.allreduce([found], options))
        return int(found)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' tensors of one shape, by rank."""
        if self.size == 1:
            return [x]
        whole = x.contiguous()
        found = [torch.empty_like(whole) for _ in range(self.size)]
        self._wait("a gather", lambda: self._group.allgather([found], [whole]))
        return found

    def join(self, part: Tensor, widths: list[int]) -> Tensor:
        """Return the last axes of all ranks' tensors, `widths` wide, one after the other."""
        if self.size == 1:
            return part
        found = self.gather(torch.nn.functional.pad(part, (0, max(widths) - part.shape[-1])))
        return torch.cat(
            [one[..., :width] for one, width in zip(found, widths, strict=True)], dim=-1
        )

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

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        with self._deadline(what):
            start().wait()

    @contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's: a closed connection, or no answer in time
            raise GroupFailed(
                f"rank {self.rank} of {self.size} failed at {what} (collective_timeout="
                f"{self._seconds:g}): {str(error).splitlines()[0][:200]}"
            ) from error
