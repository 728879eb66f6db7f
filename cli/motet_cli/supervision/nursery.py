"""Start services by forking them from one process that has imported everything already.

Importing torch and transformers takes seconds of a core, more than the rest of a start. What
`nursery_process` has imported once is there from the start in each process that it forks, in shared
memory. Such a process is a child of this one like any other, and `Child` treats it so.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.forked import ForkedTransport
from motet_cli.supervision.leash import adopt
from motet_cli.supervision.nursery_process import (
    Answer,
    Changed,
    Fork,
    Forked,
    Load,
    Loaded,
    Order,
    Refused,
)

_LOAD_WITHIN, _FORK_WITHIN = 120.0, 10.0  # seconds
_WORTH_TELLING = 0.5  # seconds of imports
_MOST = 65536
_answers: msgspec.json.Decoder[Loaded | Changed | Forked | Refused] = msgspec.json.Decoder(
    Loaded | Changed | Forked | Refused
)
P = TypeVar("P", bound=asyncio.SubprocessProtocol)


class NotForked(Exception):
    """Report why there is no new process. It may still be started as a program of its own."""


class Nursery:
    """Run one process to fork from; replace it when an imported file has changed on disk."""

    def __init__(
        self,
        env: Mapping[str, str],
        tell: Callable[[str], None],
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Set up, without starting a process.

        env: variables that libraries read when they are loaded.
        tell: called with messages for the log.
        on_line: called with each line that imports print.
        """
        # Importing numpy would start BLAS threads, which a fork does not take along.
        self._env = {**env, "OPENBLAS_NUM_THREADS": "1"}
        self._tell, self._on_line = tell, on_line
        self._lock = asyncio.Lock()
        self._process: Child | None = None
        self._peer: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the process while it runs, else None."""
        return (
            None if self._process is None or self._process.status is not None else self._process.pid
        )

    async def start(self) -> None:
        """Start the process if there is none. Raises OSError if that fails."""
        if self._process is not None:
            return
        self._peer, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            argv = (sys.executable, "-m", "motet_cli.supervision.nursery_process", str(fd))
            spec = ChildSpec(name="nursery", role="nursery", argv=argv, env=self._env, fds=(fd,))
            self._process = await Child.start(spec, self._on_line)

    async def close(self) -> None:
        """End the process; those that were forked from it go on."""
        process, self._process = self._process, None
        if self._peer is not None:
            self._peer.close()
        if process is not None:
            await process.kill()

    async def load(self, module: str) -> None:
        """Import what `python -m module` does. Raises NotForked where that is refused or fails."""
        async with self._lock:
            await self._load(module)

    async def fork(
        self, protocol: Callable[[], P], spec: ChildSpec, env: Mapping[str, str]
    ) -> tuple[asyncio.SubprocessTransport, P]:
        """Fork `spec`, as `asyncio.loop.subprocess_exec` would start it.

        The spec's command must be `python -m …`. Raises NotForked, or OSError.
        """
        _, _, module, *argv = spec.argv
        async with self._lock:
            await self._load(module)
            reading, writing = os.pipe()
            try:
                pid = self._fork(Fork(module, argv, dict(env)), writing)
            except BaseException:
                os.close(reading)
                raise
            finally:
                os.close(writing)
        made = protocol()
        transport = ForkedTransport(pid, made)
        try:
            await transport.listen(reading)
        except BaseException:  # no caller would own the process
            transport.close()
            raise
        return transport, made

    # ---------------------------------------------------------------------------------------------------------- orders
    async def _load(self, module: str) -> None:
        await self._check_alive()
        answer = await self._ask(Load(module))
        if isinstance(answer, Changed):
            self._tell(f"{answer.file} has changed: all is imported anew")
            await self.close()
            await self.start()
            answer = await self._ask(Load(module))
        if isinstance(answer, Refused):
            raise NotForked(answer.why)
        if not isinstance(answer, Loaded):
            raise NotForked(f"{module} changes while it is imported")
        if answer.seconds >= _WORTH_TELLING:
            self._tell(f"{module} was imported in {answer.seconds:.1f} s, and need not be again")

    async def _check_alive(self) -> None:
        """Start a new process if the last one has ended."""
        process = self._process
        if process is not None and process.status is not None:
            self._tell(
                f"the process to fork from has ended ({process.exit_words}): all is imported anew"
            )
            await self.close()
        await self.start()

    async def _ask(self, order: Order) -> Answer:
        """Send an order and return the answer.

        A cancel ends the process, because its answer would be taken for that to the next order.
        """
        peer, loop = self._connected(), asyncio.get_running_loop()
        peer.setblocking(False)
        try:
            await loop.sock_sendall(peer, msgspec.json.encode(order) + b"\n")
            data = b""
            async with asyncio.timeout(_LOAD_WITHIN):
                while not data.endswith(b"\n"):
                    if not (more := await loop.sock_recv(peer, _MOST)):
                        raise ConnectionResetError("it has ended")
                    data += more
        except OSError as error:  # TimeoutError is one
            await self.close()
            raise NotForked(
                f"the process to fork from does not answer: {error or 'it takes too long'}"
            ) from None
        except asyncio.CancelledError:
            await self.close()
            raise
        return _answers.decode(data)

    def _fork(self, order: Fork, output: int) -> int:
        """Fork without awaiting, in about ten milliseconds.

        While this process is a subreaper it must do nothing else.
        """
        peer = self._connected()
        peer.settimeout(_FORK_WITHIN)
        adopt(True)
        try:
            line = msgspec.json.encode(order) + b"\n"
            sent = socket.send_fds(peer, [line], [output])
            peer.sendall(line[sent:])
            data = peer.recv(_MOST)
        except OSError as error:
            peer.close()  # which ends the nursery process
            raise NotForked(f"the process to fork from does not answer: {error}") from None
        finally:
            adopt(False)
        if not data:
            raise NotForked("the process to fork from has ended")
        answer = _answers.decode(data)
        if not isinstance(answer, Forked):
            raise NotForked(
                answer.why
                if isinstance(answer, Refused)
                else f"an answer to another order: {answer}"
            )
        return answer.pid

    def _connected(self) -> socket.socket:
        if self._peer is None:
            raise NotForked("the process to fork from was not started")
        return self._peer
