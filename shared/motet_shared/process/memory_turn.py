"""Wait until this process may take the memory for its model.

A process that is prepared in advance waits at a gate: a FIFO of its supervisor, which writes one
line when the model is wanted. The line names the processes whose memory the model takes over, and
these are waited for next, as are those of the setting `wait_for_exit`.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, RLock

from .exits import wait_for_exits
from .starts import START

_MOST_TEXT = select.PIPE_BUF  # bytes of a line, which is written and read at once


class TurnAbandoned(Exception):
    """Report that the process ends, so that its turn never comes."""


class Gate:
    """Hold the gate of one process, closed at first. Raises OSError if it cannot be made.

    path: a FIFO, which is made here and removed by `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o600)
        # Open for both: a process that opens it to read does not find it without a writer.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def open(self, exits: Sequence[str]) -> None:
        """Let the process take its memory once the processes `exits` have ended."""
        os.write(self._descriptor, ",".join(exits).encode() + b"\n")

    def close(self) -> None:
        """Remove the gate; a process that still waits at it ends its wait with `TurnAbandoned`."""
        self.path.unlink(missing_ok=True)  # first: who opened it now would wait without an end
        os.close(self._descriptor)


class MemoryTurn:
    """Represent the turn of this process to take memory.

    gate: path of a `Gate`, None: the turn only waits for the ends of `exits`, values of
    `identity_of`. `wait` may be called by several threads.
    """

    def __init__(self, gate: Path | None = None, exits: Sequence[str] = ()) -> None:
        self._gate, self._exits = gate, tuple(exits)
        self._lock = Lock()
        self._has_come = False

    def wait(self) -> None:
        """Return when the turn has come.

        Raises TurnAbandoned if the process or its supervisor ends before.
        """
        with self._lock:
            if self._has_come:
                return
            exits = self._exits
            if self._gate is not None:
                exits += _passed(self._gate)
                START.begin_again()  # the wait is no part of the start
            wait_for_exits(exits)
            self._has_come = True


def abandon_turns() -> None:
    """End the waits at gates in this process, now and later, with `TurnAbandoned`."""
    _ending.end()


class _Ending:
    """Wake those who wait at gates when the process ends."""

    def __init__(self) -> None:
        self._lock = RLock()  # a signal may come while it is held
        self._has_begun = False
        self._waiting: set[int] = set()  # descriptors of their events

    def end(self) -> None:
        with self._lock:
            self._has_begun = True
            for descriptor in self._waiting:
                os.eventfd_write(descriptor, 1)

    @contextmanager
    def waited_for(self) -> Iterator[int]:
        """Give a descriptor that can be read once the process ends."""
        descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        with self._lock:
            self._waiting.add(descriptor)
            if self._has_begun:
                os.eventfd_write(descriptor, 1)
        try:
            yield descriptor
        finally:
            with self._lock:
                self._waiting.remove(descriptor)
            os.close(descriptor)


_ending = _Ending()


def _passed(gate: Path) -> tuple[str, ...]:
    """Wait at a gate and return the processes that its line names. Raises TurnAbandoned."""
    with _ending.waited_for() as ending:
        try:
            descriptor = os.open(gate, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:  # it was opened and removed: the process has started again
            return ()
        try:
            waiting = select.poll()
            for number in (ending, descriptor):
                waiting.register(number, select.POLLIN)
            while True:
                ready = dict(waiting.poll())
                if ending in ready:
                    raise TurnAbandoned(f"{gate}: this process ends")
                if ready[descriptor] & select.POLLIN:
                    line = os.read(descriptor, _MOST_TEXT).decode()
                    return tuple(filter(None, line.strip().split(",")))
                raise TurnAbandoned(f"{gate}: the supervisor that held it has ended")
        finally:
            os.close(descriptor)
