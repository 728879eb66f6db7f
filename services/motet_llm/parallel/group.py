"""Lead a group of ranks: send commands to all, watch them, and report why the group ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from motet_shared.errors import ConfigError

from .collectives import GroupFailed, RankLost
from .commands import Command, Done, Failed, PutRows, Report, Started
from .link import Link

log = logging.getLogger(__name__)

_GRACE = 2.0  # seconds in which a rank that failed says why
_STEP = 0.1  # seconds between looks at whether the group has failed

Reported = TypeVar("Reported")
Met = TypeVar("Met")


class Rank(Protocol):
    """Define what the leader knows of another rank: its number, its link, and how it ended."""

    number: int
    link: Link[Report]

    def ended(self) -> str:
        """Return how the rank ended; empty: it runs."""

    def close(self, *, at_once: bool = False) -> None:
        """End the rank, and wait for its end; at_once: whatever it is doing."""


class Group:
    """Send commands to the other ranks of a group, and watch them.

    A thread for each rank receives its reports. The first rank that fails or ends makes the group
    fail: `on_failure` is called once, from any thread, and every later command raises GroupFailed.

    timeout: seconds for what the leader waits for. break_off: called when the group fails, so that
    no rank goes on waiting for another one.
    """

    def __init__(self, ranks: Sequence[Rank], timeout: float):
        self.ranks = ranks
        self.on_failure: Callable[[GroupFailed], object] | None = None
        self.break_off: Callable[[], object] = lambda: None
        self._timeout = timeout
        self._failed = threading.Event()
        self._failure: GroupFailed | None = None
        self.refusal: ConfigError | None = None  # of a rank, if that is why the group failed
        self._closing = False
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._done: dict[int, SimpleQueue[Done]] = {rank.number: SimpleQueue() for rank in ranks}
        self._started: SimpleQueue[int] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._receive, args=(rank,), name=f"motet-rank-{rank.number}", daemon=True
            )
            for rank in ranks
        ]
        self.limit(timeout)
        for thread in self._threads:
            thread.start()

    def limit(self, seconds: float) -> None:
        """Set the deadline of what the leader waits for from now on."""
        self._timeout = seconds
        for rank in self.ranks:
            rank.link.limit(seconds)

    @property
    def failure(self) -> GroupFailed | None:
        """Return why the group failed; None while it works."""
        return self._failure

    def send(self, command: Command) -> None:
        """Send a command to all ranks, in one order for all. Raises GroupFailed."""
        with self._sending:
            for rank in self.ranks:
                if not isinstance(command, PutRows) or command.rank == rank.number:
                    self.send_to(rank, command)

    def send_to(self, rank: Rank, command: Command, descriptor: int | None = None) -> None:
        """Send a command to one rank, and a descriptor after it. Raises GroupFailed."""
        if self._failure is not None:
            raise self._failure
        try:
            rank.link.send(command)
            if descriptor is not None:
                rank.link.send_descriptor(descriptor)
        except OSError as error:
            raise self.explain(error) from error

    def ask(self, command: Command) -> list[Done]:
        """Have all ranks run a command; return their reports, by rank. Raises GroupFailed."""
        with self._asking:
            self.send(command)
            return [self._next(self._done[rank.number]) for rank in self.ranks]

    def check(self) -> None:
        """Raise GroupFailed if the group has failed."""
        if self._failure is not None:
            raise self._failure

    def watched(self, meet: Callable[[], Met]) -> Met:
        """Return what `meet` returns, which waits for all ranks; it runs on a thread.

        Raises what it raises, and GroupFailed as soon as a rank has failed: the thread then waits
        for its own deadline, which concerns no other group.
        """
        future: Future[Met] = Future()

        def run() -> None:
            try:
                future.set_result(meet())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="motet-ranks-meet", daemon=True).start()
        while True:
            wait([future], timeout=_STEP / 10)
            if future.done():
                return future.result()
            self.check()

    def wait_started(self) -> None:
        """Wait until all ranks are ready to join. Raises GroupFailed."""
        for _ in self.ranks:
            self._next(self._started)

    def _next(self, queue: SimpleQueue[Reported]) -> Reported:
        waited = 0.0
        while waited < self._timeout:
            if self._failure is not None:
                raise self._failure
            try:
                return queue.get(timeout=_STEP)
            except Empty:
                waited += _STEP
        raise self._fail(GroupFailed(f"no answer of a rank within {self._timeout:g} s"))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Compute with all ranks: an error within ends the group, since the ranks differ after it.

        Raises GroupFailed, with the reason of the rank that failed first if one did.
        """
        try:
            yield
        except Exception as error:
            raise self.explain(error) from error

    def explain(self, error: Exception) -> GroupFailed:
        """Return why the group failed, given an error of the leader."""
        if isinstance(error, GroupFailed | OSError):
            self._failed.wait(_GRACE)  # the rank that failed first says why
        if self._failure is not None:
            return self._failure
        reason = str(error) if isinstance(error, GroupFailed) else f"rank 0: {error!r}"
        return self._fail(GroupFailed(reason))

    def close(self) -> None:
        """End all ranks, and wait for them."""
        self._closing = True
        for rank in self.ranks:
            rank.close(at_once=self._failure is not None)
        for thread in self._threads:
            thread.join()

    # --------------------------------------------------------------------------- a thread per rank
    def _receive(self, rank: Rank) -> None:
        try:
            while True:
                report = rank.link.receive()
                if isinstance(report, Started):
                    self._started.put(rank.number)
                elif isinstance(report, Done):
                    self._done[rank.number].put(report)
                elif isinstance(report, Failed):
                    if report.follows:
                        self._failed.wait(_GRACE / 2)
                    elif report.refused and self._failure is None:
                        self.refusal = ConfigError(report.error)
                    self._fail(GroupFailed(f"rank {rank.number}: {report.error}"))
        except EOFError:
            self._fail(RankLost(f"rank {rank.number} {rank.ended() or 'closed its link'}"))

    def _fail(self, failure: GroupFailed) -> GroupFailed:
        if self._failure is None and not self._closing:
            self._failure = failure
            self.break_off()
            log.error("the group of ranks ends", extra={"reason": failure.message})
            if self.on_failure is not None:
                self.on_failure(failure)
        self._failed.set()
        return self._failure or failure
