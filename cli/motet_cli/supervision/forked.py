"""Adapt a process that asyncio has not started to its interface of subprocesses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

# Exit status of a process whose parent was another one: the kernel tells it to the parent only.
EXIT_UNKNOWN = 256


class PidfdTransport(asyncio.SubprocessTransport):
    """Report output and exit of a process to its protocol.

    A child of this process must be one that no other code waits for.
    """

    def __init__(self, pid: int, protocol: asyncio.SubprocessProtocol, pidfd: int) -> None:
        super().__init__()
        self._pid, self._protocol, self._pidfd = pid, protocol, pidfd
        self._status: int | None = None
        self._output: asyncio.BaseTransport | None = None
        self._open = True  # the pipe of the process's output
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._exited)

    @classmethod
    async def connect(
        cls,
        pid: int,
        protocol: asyncio.SubprocessProtocol,
        output: int | None,
        pidfd: int | None = None,
    ) -> PidfdTransport:
        """Return the transport of a process, with the reading end of its output; None: it has none.

        pidfd: descriptor of the process; None: a child of this process, which opens it here. The
        process is killed if its output cannot be read: it would have no owner.
        """
        transport = cls(pid, protocol, os.pidfd_open(pid) if pidfd is None else pidfd)
        if output is None:
            transport._open = False
            return transport
        try:
            pipe = os.fdopen(output, "rb", 0)
            transport._output, _ = await transport._loop.connect_read_pipe(
                lambda: _Output(transport), pipe
            )
        except BaseException:
            transport.close()
            raise
        return transport

    def get_pid(self) -> int:
        return self._pid

    def get_returncode(self) -> int | None:
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, and to no other that has its pid later."""
        if self._status is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Kill the process if it still runs, as asyncio's transports do."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
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
        try:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except ChildProcessError:
            self._status = EXIT_UNKNOWN
        self._protocol.process_exited()
        self._report_end()

    def _report_end(self) -> None:
        if self._status is not None and not self._open:
            self._protocol.connection_lost(None)


class _Output(asyncio.Protocol):
    def __init__(self, transport: PidfdTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.output_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport.output_ended()
