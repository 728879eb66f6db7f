"""Start and control one decoding child from the service's side."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from motet_shared.errors import InternalError

from . import wire

_STARTS_WITHIN = 60.0  # seconds
# Names a script that runs modules of Motet, where the interpreter itself cannot import them.
ENTRY = "MOTET_CHILD_ENTRY"
# excludes the service's keys and passwords
_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "MOTET_ENGINE_PACKAGES")
_ENV = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limit one job.

    `cpu` and `wall` in seconds (only while the child works), `memory` in bytes beyond its start.
    """

    cpu: float
    wall: float
    memory: int


class ChildDied(Exception):
    """Report that a child ended, or was ended, during a job.

    The message completes "it could not be decoded: ".
    """


class Worker:
    """Talk to one child, from one thread at a time; only `kill` may be called from any thread."""

    def __init__(self, module: str):
        self._peer, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        file = os.memfd_create("motet-media", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, wire.WINDOW)
            self._window = mmap.mmap(file, wire.WINDOW)
            fds = (child_end.fileno(), file)
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    os.environ.get(ENTRY, "-m"),
                    "motet_media.child",
                    *map(str, (*fds, os.getpid())),
                    module,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                env=_ENV | {name: os.environ[name] for name in _KEPT if name in os.environ},
                # Ctrl-C in a terminal reaches only the service, which drains first
                start_new_session=True,
            )
        except BaseException:
            self._peer.close()
            raise
        finally:
            child_end.close()
            os.close(file)
        self.confinement: dict[str, bool] = {}
        self.jobs = 0

    @property
    def alive(self) -> bool:
        """Return True if the child is running."""
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Wait until the child is confined and has loaded its libraries.

        Raises InternalError if it cannot be started.
        """
        if self.confinement:
            return
        try:
            hello = self._receive(time.monotonic() + _STARTS_WITHIN)
        except (ChildDied, TimeoutError) as error:
            self.close()
            raise InternalError(
                f"media: no process for decoding could be started: {error}"
            ) from None
        if isinstance(hello, wire.Hello):
            self.confinement = hello.confinement

    def run(
        self, task: str, data: Data, limits: JobLimits, args: Mapping[str, wire.Value]
    ) -> Iterator[Result]:
        """Yield (meta, payload) as the child produces them, at most one ahead of the consumer.

        Raises ChildDied if the child ends, TimeoutError after more than `limits.wall` of work,
        JobRefused for the child's own error.
        """
        self.jobs += 1
        view, left = memoryview(data).cast("B"), limits.wall
        self._window[: min(len(view), wire.WINDOW)] = view[: wire.WINDOW]
        self._send(wire.DecodeJob(task, len(view), limits.cpu, limits.memory, dict(args)))
        place, held = wire.WINDOW, []
        while True:
            began = time.monotonic()
            answer = self._receive(began + left)
            left -= time.monotonic() - began
            if isinstance(answer, wire.Continue):
                part = view[place : place + wire.WINDOW]
                self._window[: len(part)] = part
                place += len(part)
            elif isinstance(answer, wire.ResultPart):
                held.append(self._window[: max(0, min(answer.nbytes, wire.WINDOW))])
                if not answer.more:
                    complete, held = b"".join(held), []
                    yield answer.meta, complete
            elif isinstance(answer, wire.Refusal):
                raise JobRefused(answer)
            else:
                return
            self._send(wire.Continue())

    def kill(self) -> None:
        """Kill the child at once; the thread that waits for it notices."""
        self.process.kill()

    def close(self) -> None:
        """Kill the child and free its resources."""
        self.kill()
        self.process.wait()
        self._peer.close()
        self._window.close()

    def _send(self, frame: wire.DecodeJob | wire.Continue) -> None:
        try:
            self._peer.send(wire.encode(frame))
        except OSError:
            raise self._died() from None

    def _receive(self, deadline: float) -> wire.Answer:
        self._peer.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            data = self._peer.recv(wire.MAX_FRAME)
        except TimeoutError:
            raise
        except OSError:
            data = b""
        if not data:
            raise self._died()
        try:
            return wire.answers.decode(data)
        except ValueError:
            raise ChildDied("its decoder sent an invalid frame") from None

    def _died(self) -> ChildDied:
        self.kill()
        status = self.process.wait()
        if status == -signal.SIGXCPU:
            return ChildDied("cpu")
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return ChildDied(f"its decoder crashed ({name})")


Result = tuple[dict[str, wire.Value], bytes]


class JobRefused(Exception):
    """Carry the child's own error."""

    def __init__(self, refusal: wire.Refusal):
        super().__init__(refusal.message)
        self.refusal = refusal
