"""Run a decoding child: `python -m motet_media.child SOCKET WINDOW PARENT MODULE`.

MODULE has `TASKS`, functions (data, **args) -> iterator of (meta, payload) by name, and `warm()`,
which makes its libraries load everything while files may still be opened.
"""

from __future__ import annotations

import importlib
import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator

from motet_shared.errors import BadRequest

from . import confine, wire

Payload = tuple[dict[str, wire.Value], bytes]
Task = Callable[..., Iterator[Payload]]
_SOCKET = 3  # descriptor after standard input, output and error


class Child:
    """Serve jobs until the service closes its end."""

    def __init__(self, peer: socket.socket, window: mmap.mmap, tasks: dict[str, Task], base: int):
        self._peer, self._window, self._tasks, self._base = peer, window, tasks, base
        self._window_lent = (
            False  # the window holds a part that the service may not have copied yet
        )

    def serve(self) -> None:
        """Receive and run jobs, and answer each with JobDone or Refusal."""
        while True:
            self._wait_for_window()
            job = self._receive()
            if not isinstance(job, wire.DecodeJob):
                return
            try:
                confine.limit_job(job.cpu, job.memory, self._base)
                self._run(job)
                answer: wire.Answer = wire.JobDone()
            except BadRequest as error:
                answer = wire.Refusal(error.code, error.message, error.param)
            except MemoryError:
                answer = wire.Refusal("memory", "")
            except Exception as error:  # decoders of untrusted bytes may raise anything
                answer = wire.Refusal("crash", type(error).__name__)
            self._send(answer)

    def _run(self, job: wire.DecodeJob) -> None:
        for meta, payload in self._tasks[job.task](self._input(job.nbytes), **job.args):
            self._put(meta, payload)

    def _input(self, nbytes: int) -> bytes:
        """Return the input of a job, received window by window."""
        parts = [self._window[: min(nbytes, wire.WINDOW)]]
        missing = nbytes - len(parts[0])
        while missing:
            self._send(wire.Continue())
            self._receive()
            parts.append(self._window[: min(missing, wire.WINDOW)])
            missing -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _put(self, meta: dict[str, wire.Value], payload: bytes) -> None:
        """Send one result, window by window."""
        view = memoryview(payload)
        for start in range(0, len(view) or 1, wire.WINDOW):
            part = view[start : start + wire.WINDOW]
            self._wait_for_window()
            self._window[: len(part)] = part
            self._send(wire.ResultPart(len(part), start + len(part) < len(view), meta))
            self._window_lent = True

    def _wait_for_window(self) -> None:
        """Wait until the service has copied the last part.

        Decoding continues meanwhile, at most one part ahead.
        """
        if self._window_lent:
            self._window_lent = False
            self._receive()

    def _send(self, answer: wire.Answer) -> None:
        self._peer.send(wire.encode(answer))

    def _receive(self) -> wire.DecodeJob | wire.Continue | None:
        data = self._peer.recv(wire.MAX_FRAME)
        if not data:  # the service has ended, or has abandoned this job
            os._exit(0)
        return wire.jobs.decode(data)


def main(argv: list[str]) -> None:
    """Confine this process, load MODULE, and serve jobs."""
    peer, window, parent, module = int(argv[0]), int(argv[1]), int(argv[2]), argv[3]
    granted = confine.die_with_parent_process(parent)
    shared = mmap.mmap(window, wire.WINDOW)  # keeps its own descriptor, closed below
    decoders = importlib.import_module(module)
    decoders.warm()
    os.dup2(peer, _SOCKET)
    base = confine.address_space()
    os.closerange(_SOCKET + 1, 4096)
    granted |= confine.lock(_SOCKET + 1)
    with socket.socket(fileno=_SOCKET) as connected:
        connected.send(wire.encode(wire.Hello(granted)))
        Child(connected, shared, decoders.TASKS, base).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
