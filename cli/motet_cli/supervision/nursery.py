"""Control the nursery: a fork server that has imported the libraries of all services.

Importing torch and transformers takes seconds of a core, more than the rest of a start. A process
forked from `nursery_process` has them from the start, in memory shared with the others. It is a
child of this process, as if this process had started it.

`prepare` has a process forked in advance, a spare, which the next `fork` of its module takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec

from motet_cli.supervision.child import Child, ChildSpec, describe_exit
from motet_cli.supervision.forked import PidfdTransport
from motet_cli.supervision.nursery_process import (
    FileChanged,
    Fork,
    Forked,
    ForkSpare,
    ImportModule,
    ModuleImported,
    Reply,
    Request,
    RequestRefused,
)
from motet_cli.supervision.parent_death import set_subreaper
from motet_cli.survival.output import lasting_pipe

_IMPORT_TIMEOUT, _FORK_TIMEOUT = 120.0, 10.0  # seconds
_REPORTED_IMPORT = 0.5  # seconds from which an import is logged
_MAX_BYTES = 65536  # read at a time
_replies: msgspec.json.Decoder[ModuleImported | FileChanged | Forked | RequestRefused] = (
    msgspec.json.Decoder(ModuleImported | FileChanged | Forked | RequestRefused)
)
P = TypeVar("P", bound=asyncio.SubprocessProtocol)


class NotForked(Exception):
    """Report why a process was not forked; it can still be started as a new program.

    process_ended: True if the nursery has ended or does not answer.
    """

    def __init__(self, message: str, *, process_ended: bool = False) -> None:
        super().__init__(message)
        self.process_ended = process_ended


class _Spare:
    """Hold a forked process that waits at `peer` for the request to run.

    on_exit: called with the exit status if it ends before `take` or `end`.
    """

    def __init__(self, pid: int, peer: socket.socket, on_exit: Callable[[int], None]) -> None:
        self.pid, self.peer, self._on_exit = pid, peer, on_exit
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._exited)

    def take(self) -> socket.socket:
        """Return the socket, and leave the process to the caller."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        return self.peer

    def end(self) -> int:
        """Kill the process unless it has ended, wait for its end and return its exit status."""
        self.take().close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _exited(self) -> None:
        self._on_exit(self.end())


class Nursery:
    """Run one nursery process; replace it after a file that it imported has changed."""

    def __init__(
        self,
        env: Mapping[str, str],
        report: Callable[[str], None],
        on_line: Callable[[str], None] = lambda line: None,
        *,
        outlived: bool = False,
    ) -> None:
        """Configure the nursery without starting its process.

        env: variables that libraries read when they are loaded.
        report: called with messages for the log.
        on_line: called with each line that the process prints.
        outlived: processes that it forks outlive this one.
        """
        # Importing numpy would start BLAS threads, which do not survive a fork.
        self._env = {**env, "OPENBLAS_NUM_THREADS": "1"}
        self._report, self._on_line, self.outlived = report, on_line, outlived
        self._lock = asyncio.Lock()
        self._process: Child | None = None
        self._peer: socket.socket | None = None
        self._spares: dict[str, _Spare] = {}  # by module

    @property
    def pid(self) -> int | None:
        """Return the id of the running nursery process, else None."""
        return (
            None if self._process is None or self._process.status is not None else self._process.pid
        )

    async def start(self) -> None:
        """Start the nursery process unless it runs. Raises OSError."""
        if self._process is not None:
            return
        self._peer, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            argv = (sys.executable, "-m", "motet_cli.supervision.nursery_process", str(fd))
            spec = ChildSpec(name="nursery", role="nursery", argv=argv, env=self._env, fds=(fd,))
            self._process = await Child.start(spec, self._on_line)

    async def close(self) -> None:
        """End the nursery process; processes forked from it continue."""
        process, self._process = self._process, None
        if self._peer is not None:
            self._peer.close()
        while self._spares:
            _, spare = self._spares.popitem()
            spare.end()
        if process is not None:
            await process.kill()

    async def load(self, module: str) -> None:
        """Import what `python -m module` imports. Raises NotForked if that fails or is refused."""
        async with self._lock:
            await self._load(module)

    async def prepare(self, module: str) -> None:
        """Fork a process in advance for the next `fork` of a module, unless there is one.

        Where processes outlive this one, none is forked: a spare would wait for ever.

        Raises NotForked or OSError.
        """
        if self.outlived:
            return
        async with self._lock:
            await self._load(module)
            if module in self._spares:
                return
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    pid = self._fork(ForkSpare(module), theirs.fileno())
            except BaseException:
                ours.close()
                raise
            self._spares[module] = _Spare(pid, ours, partial(self._spare_ended, module))

    async def fork(
        self, protocol: Callable[[], P], spec: ChildSpec, env: Mapping[str, str]
    ) -> tuple[asyncio.SubprocessTransport, P]:
        """Fork the process of `spec`, with the interface of `asyncio.loop.subprocess_exec`.

        The spec's command must be `python -m …`. Raises NotForked or OSError.
        """
        _, _, module, *argv = spec.argv
        async with self._lock:
            await self._load(module)
            reading, writing = lasting_pipe() if self.outlived else os.pipe()
            request = Fork(module, argv, dict(env), self.outlived)
            try:
                pid = self._take_spare(request, writing) or self._fork(request, writing)
            except BaseException:
                os.close(reading)
                raise
            finally:
                os.close(writing)
        child_protocol = protocol()
        return await PidfdTransport.connect(pid, child_protocol, reading), child_protocol

    # ------------------------------------------------------------------------------------------ requests
    async def _load(self, module: str) -> None:
        await self._check_alive()
        reply = await self._exchange(ImportModule(module))
        if isinstance(reply, FileChanged):
            self._report(f"{reply.file} has changed: importing everything again")
            await self.close()
            await self.start()
            reply = await self._exchange(ImportModule(module))
        if isinstance(reply, RequestRefused):
            raise NotForked(reply.reason)
        if not isinstance(reply, ModuleImported):
            raise NotForked(f"files of {module} changed during its import")
        if reply.seconds >= _REPORTED_IMPORT:
            self._report(f"imported {module} in {reply.seconds:.1f} s, once for all services")

    async def _check_alive(self) -> None:
        """Start a new nursery process if the last one has ended."""
        process = self._process
        if process is not None and process.status is not None:
            self._report(
                f"the nursery has ended ({process.exit_description}): importing everything again"
            )
            await self.close()
        await self.start()

    async def _exchange(self, request: Request) -> Reply:
        """Send a request and return its reply.

        A cancelled request ends the nursery process, whose late reply would be taken for the reply
        to the next request.
        """
        peer, loop = self._connected(), asyncio.get_running_loop()
        peer.setblocking(False)
        try:
            await loop.sock_sendall(peer, msgspec.json.encode(request) + b"\n")
            data = b""
            async with asyncio.timeout(_IMPORT_TIMEOUT):
                while not data.endswith(b"\n"):
                    if not (more := await loop.sock_recv(peer, _MAX_BYTES)):
                        raise ConnectionResetError("it has ended")
                    data += more
        except OSError as error:  # TimeoutError is one
            await self.close()
            raise NotForked(
                f"the nursery does not answer: {error or 'timeout'}", process_ended=True
            ) from None
        except asyncio.CancelledError:
            await self.close()
            raise
        return _replies.decode(data)

    def _take_spare(self, request: Fork, output: int) -> int | None:
        """Have the spare of a module run it; return its process id, or None if there is none."""
        if (spare := self._spares.get(request.module)) is None:
            return None
        try:
            _send(spare.peer, request, output)
        except OSError:
            self._spare_ended(request.module, spare.end())
            return None
        del self._spares[request.module]
        spare.take().close()
        return spare.pid

    def _spare_ended(self, module: str, status: int) -> None:
        del self._spares[module]
        how = describe_exit(status)
        self._report(f"the process that was forked in advance for {module} has ended ({how})")

    def _fork(self, request: Fork | ForkSpare, fd: int) -> int:
        """Fork without awaiting, which takes about ten milliseconds; return the process id.

        fd: a file descriptor that is sent along.

        This process must start no other child meanwhile, because it adopts all orphans.
        """
        peer = self._connected()
        set_subreaper(True)
        try:
            _send(peer, request, fd)
            data = peer.recv(_MAX_BYTES)
        except OSError as error:
            peer.close()  # ends the nursery process
            raise NotForked(f"the nursery does not answer: {error}", process_ended=True) from None
        finally:
            set_subreaper(False)
        if not data:
            raise NotForked("the nursery has ended", process_ended=True)
        reply = _replies.decode(data)
        if not isinstance(reply, Forked):
            raise NotForked(
                reply.reason if isinstance(reply, RequestRefused) else f"unexpected reply: {reply}"
            )
        return reply.pid

    def _connected(self) -> socket.socket:
        if self._peer is None:
            raise NotForked("the nursery was not started", process_ended=True)
        return self._peer


def _send(peer: socket.socket, request: Request, fd: int) -> None:
    """Send a request and a file descriptor. Raises OSError."""
    peer.settimeout(_FORK_TIMEOUT)
    line = msgspec.json.encode(request) + b"\n"
    sent = socket.send_fds(peer, [line], [fd])
    # Sending nothing would fail, too, once a spare has read its request and closed its end.
    if sent < len(line):
        peer.sendall(line[sent:])
