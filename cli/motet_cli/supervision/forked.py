"""Adapt a child that another process forked to asyncio's interface of subprocesses."""

from __future__ import annotations

import asyncio
import os
import signal


class ForkedTransport(asyncio.SubprocessTransport):
    """Report output and exit of a process to its protocol.

    The process must be a child of this one that no other code waits for.
    """

    def __init__(self, pid: int, protocol: asyncio.SubprocessProtocol) -> None:
        super().__init__()
        self._pid, self._protocol = pid, protocol
        self._status: int | None = None
        self._output: asyncio.BaseTransport | None = None
        self._open = True  # the pipe of the process's output
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._exited)

    async def listen(self, output: int) -> None:
        """Pass data from this pipe to the protocol, and close the pipe at its end."""
        pipe = os.fdopen(output, "rb", 0)
        self._output, _ = await self._loop.connect_read_pipe(lambda: _Output(self), pipe)

    def get_pid(self) -> int:
        return self._pid

    def get_returncode(self) -> int | None:
        return self._status

    def close(self) -> None:
        """Kill the process if it still runs, as asyncio's transports do."""
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
        if self._output is not None:
            self._output.close()

    def output_received(self, data: bytes) -> None:
        """Pass output to the protocol."""
        self._protocol.pipe_data_received(1, data)

    def output_ended(self) -> None:
        """Record the end of the output pipe."""
        self._open = False
        self._report_end()

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._protocol.process_exited()
        self._report_end()

    def _report_end(self) -> None:
        if self._status is not None and not self._open:
            self._protocol.connection_lost(None)


class _Output(asyncio.Protocol):
    def __init__(self, transport: ForkedTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.output_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport.output_ended()
