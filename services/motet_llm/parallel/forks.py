"""Fork the ranks of a group from a process that has imported everything and computes nothing.

Importing torch and transformers takes seconds of a core, more than the rest of a small group's
start. The leader forks this process before it has threads, and it forks ranks when the leader asks
for them. They share its memory, and are children of the leader.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FORK_TIMEOUT = 10.0  # seconds in which a process is forked
_ADOPTION_STEP = 0.0005  # seconds between looks at who the parent is
_PID = 4  # bytes of a process id

Run = Callable[[int, int], int]


class ForkedProcess:
    """Hold a child process that another one has forked, as `subprocess.Popen` holds one."""

    def __init__(self, pid: int):
        self.pid = pid
        self._status: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._waiting = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        with self._waiting:
            if self._status is None:
                ended = select.poll()
                ended.register(self._descriptor, select.POLLIN)
                if not ended.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired("rank", timeout or 0.0)
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(self._descriptor)
            return self._status

    def kill(self) -> None:
        """Send SIGKILL, if the process still runs."""
        with self._waiting:
            if self._status is None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class RankForks:
    """Ask a forked process for ranks.

    run: what a rank runs, given the descriptor of its link and the leader's process id; its result
        is the exit status.
    """

    def __init__(self, run: Run):
        """Fork the process. Raises OSError, also if this process has threads: they would be lost."""
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise OSError(f"{threads} threads are running, which a forked process would not have")
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        leader = os.getpid()
        self._peer, theirs = socket.socketpair()
        self._peer.settimeout(_FORK_TIMEOUT)
        self.pid = os.fork()
        if self.pid == 0:
            self._peer.close()
            _run(theirs, leader, run)
        theirs.close()

    def fork(self, number: int, descriptor: int) -> ForkedProcess:
        """Fork a rank with this descriptor of its link. Raises OSError."""
        socket.send_fds(self._peer, [bytes([number % 256])], [descriptor])
        answer = self._peer.recv(_PID)
        if len(answer) < _PID:
            raise OSError("the process that forks ranks has ended")
        if not (pid := int.from_bytes(answer, "little")):
            raise OSError(f"rank {number} cannot be forked")
        return ForkedProcess(pid)


def _run(peer: socket.socket, leader: int, run: Run) -> None:
    """Fork ranks until the leader ends; never return, neither here nor in a rank."""
    status = os.EX_SOFTWARE
    try:
        belong_to(leader)
        _name("motet-ranks")
        status = _serve(peer, leader, run)
    finally:
        os._exit(status)


def _serve(peer: socket.socket, leader: int, run: Run) -> int:
    while True:
        content, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
        if not content:
            return os.EX_OK
        (descriptor,) = descriptors
        pid = _fork_for(leader)
        if pid == 0:
            peer.close()
            _name(f"motet-rank-{content[0]}")
            return run(descriptor, leader)
        os.close(descriptor)
        peer.sendall(max(pid, 0).to_bytes(_PID, "little"))


def _fork_for(leader: int) -> int:
    """Fork a child of the leader; return 0 there, and here its process id, or -1 if that fails.

    An intermediate process ends at once, so that the leader adopts its child.
    """
    reading, writing = os.pipe()
    try:
        intermediate = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return -1
    if intermediate == 0:
        os.close(reading)
        return _fork_orphan(writing)
    os.close(writing)
    os.waitpid(intermediate, 0)
    with os.fdopen(reading, "rb") as pipe:
        return int.from_bytes(pipe.read(), "little") or -1


def _fork_orphan(writing: int) -> int:
    """Fork a process whose parent ends; return there, once another one has adopted it."""
    intermediate = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os._exit(os.EX_OSERR)
    if pid:
        os.write(writing, pid.to_bytes(_PID, "little"))
        os._exit(os.EX_OK)
    os.close(writing)
    while os.getppid() == intermediate:
        time.sleep(_ADOPTION_STEP)
    return 0


def belong_to(leader: int) -> None:
    """Have the kernel kill this process when the leader ends, even if it is stopped.

    The signals on which the leader drains are ignored: it needs its ranks until it is done.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:
        os._exit(os.EX_OK)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _name(name: str) -> None:
    """Name this process in lists of processes: its command line is the leader's."""
    Path("/proc/self/comm").write_text(name)
