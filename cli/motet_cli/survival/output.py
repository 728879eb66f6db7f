"""Give processes an output that outlives its reader, and read on what another reader has left.

The standard output of a process is a pipe that the process itself can read, too. So nothing
breaks when the supervisor dies, and the next one opens the same pipe again as `/proc/PID/fd/1`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import signal
import termios
from collections.abc import Callable, Mapping
from typing import TypeVar

from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.forked import PidfdTransport

P = TypeVar("P", bound=asyncio.SubprocessProtocol)
_PIPE_BYTES = 1 << 20  # what is kept of the output of a process without a reader


def lasting_pipe() -> tuple[int, int]:
    """Return the ends (reading, lasting) of a pipe: a process with `lasting` needs no reader to write."""
    reading, writing = os.pipe()
    try:
        lasting = os.open(f"/proc/self/fd/{writing}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    with contextlib.suppress(OSError):  # the user's pipes have too many pages in all
        fcntl.fcntl(lasting, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reading, lasting


def open_output(pid: int) -> int:
    """Return the reading end of the output of a process that has a lasting pipe. Raises OSError."""
    return os.open(f"/proc/{pid}/fd/1", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def drop_backlog(reading: int) -> None:
    """Read and forget output that fills more than half of its pipe, as a full one blocks the process."""
    waiting = array.array("i", [0])
    fcntl.ioctl(reading, termios.FIONREAD, waiting)
    if waiting[0] > fcntl.fcntl(reading, fcntl.F_GETPIPE_SZ) // 2:
        os.read(reading, waiting[0])


async def spawn(
    protocol: Callable[[], P], spec: ChildSpec, env: Mapping[str, str]
) -> tuple[asyncio.SubprocessTransport, P]:
    """Execute a program that outlives this process, with a lasting output. Raises OSError.

    It has a process group of its own, which a terminal's Ctrl-C does not reach.
    """
    reading, lasting = lasting_pipe()
    try:
        pid = _start(spec, env, lasting)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(lasting)
    made = protocol()
    return await PidfdTransport.connect(pid, made, reading), made


def _start(spec: ChildSpec, env: Mapping[str, str], output: int) -> int:
    """Start a process that writes to `output`; return its pid. Raises OSError."""
    return os.posix_spawnp(
        spec.argv[0],
        spec.argv,
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
            *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in spec.fds),  # inherited from now on
        ],
        setpgroup=0,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
    )
