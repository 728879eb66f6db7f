"""Run one supervised process: bind its life to its parent, split its output, stop or kill it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from motet_cli.supervision.forked import EXIT_UNKNOWN, PidfdTransport
from motet_cli.supervision.parent_death import die_with_parent

_TAIL_LINES = 20
_LONGEST_LINE = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """Describe a process to run.

    stage: place in the order of stopping, lowest first, equal ones together.
    env: additions to the environment; may hold passwords, so it is never printed.
    grace: seconds from the last SIGTERM to SIGKILL.
    drain: seconds from a first SIGTERM to a second, which ends running work; None: only one.
    fds: open file descriptors that the process inherits.
    forks: True if a nursery may fork it; `argv` then has the form `python -m module …`.
    returns: True if clients wait for its next start: a nursery forks that, at once and always.
    gpus: UUIDs of the GPUs that it computes on.
    """

    name: str  # unique; shown in the log
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    stage: int = 0
    grace: float = 5.0
    drain: float | None = None
    fds: tuple[int, ...] = ()
    model: str | None = None
    forks: bool = False
    returns: bool = False
    gpus: tuple[str, ...] = ()


def describe_exit(status: int) -> str:
    """Describe an exit status, such as `exit code 3` or `killed by SIGKILL`."""
    if status == EXIT_UNKNOWN:
        return "exit code unknown: it was the child of an earlier supervisor"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class Child(asyncio.SubprocessProtocol):
    """Represent a running process.

    Each start has an instance id of its own, so that stream numbers of an ended one are not reused.
    """

    def __init__(self, spec: ChildSpec, on_line: Callable[[str], None]) -> None:
        self.spec = spec
        self.instance = f"{spec.role}-{secrets.token_hex(4)}"
        self.pid = 0
        self.status: int | None = None  # as in subprocess: negative is a signal
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.started_at = time.monotonic()
        self.has_output = True
        self._on_line = on_line
        self._partial = b""
        self._gone = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None

    @classmethod
    async def start(
        cls, spec: ChildSpec, on_line: Callable[[str], None], spawn: Spawn | None = None
    ) -> Child:
        """Start the process in a group of its own, which a terminal's Ctrl-C does not reach.

        spawn: function that creates the process; None: execute a new program.
        """
        child = cls(spec, on_line)
        env = {**os.environ, **spec.env, "MOTET_INSTANCE": child.instance}
        transport, _ = await (spawn or _execute)(lambda: child, spec, env)
        child._transport = transport
        child.pid = transport.get_pid()
        return child

    @classmethod
    async def adopt(
        cls,
        spec: ChildSpec,
        on_line: Callable[[str], None],
        *,
        pid: int,
        instance: str,
        pidfd: int,
        output: int | None,
    ) -> Child:
        """Take over a process that an earlier supervisor has started.

        pidfd, output: descriptors of the process and of the reading end of its output, owned from
        now on; output is None if it cannot be read.
        """
        child = cls(spec, on_line)
        child.pid, child.instance, child.has_output = pid, instance, output is not None
        child._transport = await PidfdTransport.connect(pid, child, output, pidfd)
        return child

    @property
    def exit_description(self) -> str:
        return "running" if self.status is None else describe_exit(self.status)

    async def wait(self) -> int:
        """Wait for the end of the process and its output; return the exit status."""
        await self._gone.wait()
        if self.status is None:
            raise RuntimeError(f"{self.spec.name}: gone without an exit status")
        return self.status

    async def stop(self, drain: float | None = None) -> bool:
        """Send SIGTERM, again after `drain` seconds (None: the spec's), then SIGKILL after `grace`.

        Returns True if SIGKILL was not needed.
        """
        drain = self.spec.drain if drain is None else drain
        for seconds in (self.spec.grace,) if drain is None else (drain, self.spec.grace):
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.wait()
                return True
        await self.kill()
        return False

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        if self.status is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                if isinstance(self._transport, PidfdTransport):
                    self._transport.send_signal(number)
                else:
                    os.kill(self.pid, number)

    # ------------------------------------------------------------------------------------- asyncio.SubprocessProtocol
    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST_LINE:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self._emit(line)

    def process_exited(self) -> None:
        if self._transport is not None:
            self.status = self._transport.get_returncode()
        self._end_group()
        # Output still in the pipe follows. A grandchild may hold the pipe open: wait 1 s at most.
        asyncio.get_running_loop().call_later(1.0, self._finish)

    def _end_group(self) -> None:
        """Kill what the process has started and left: an engine's own processes hold its memory."""
        if self.pid and not self.spec.forks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._gone.is_set():
            return
        if self.status is None and self._transport is not None:
            self.status = self._transport.get_returncode()
        if self._partial:
            self._emit(self._partial)
            self._partial = b""
        if self._transport is not None:
            self._transport.close()
        self._gone.set()

    def _emit(self, line: bytes) -> None:
        # Of a progress line that redraws itself, only the last state is kept.
        text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
        if text:
            self.tail.append(text)
            self._on_line(text)


# Creates a process from a protocol factory, the spec and the complete environment.
Spawn = Callable[
    [Callable[[], Child], ChildSpec, Mapping[str, str]],
    Awaitable[tuple[asyncio.SubprocessTransport, Child]],
]


async def _execute(
    protocol: Callable[[], Child], spec: ChildSpec, env: Mapping[str, str]
) -> tuple[asyncio.SubprocessTransport, Child]:
    return await asyncio.get_running_loop().subprocess_exec(
        protocol,
        *spec.argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        process_group=0,
        preexec_fn=partial(die_with_parent, os.getpid()),
        pass_fds=spec.fds,
    )
