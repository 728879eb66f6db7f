"""End a running stack of this machine: `motet down`."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import struct
import sys
from argparse import Namespace
from pathlib import Path

from motet_cli.supervision import address
from motet_cli.supervision.logs import Log
from motet_cli.supervision.orders import path_of
from motet_cli.survival.leftovers import end_stack
from motet_cli.survival.record import StackFolder
from motet_shared.errors import ConfigError

_PEERCRED = struct.Struct("3i")  # pid, uid, gid


def run(args: Namespace) -> int:
    """End the stack and wait until it has ended. Exit code: 0, or 1 if processes were killed."""
    host, port = address.of_url(args.url)
    if address.is_loopback(host):
        if (pidfd := _supervisor(path_of(port))) is not None:
            _end(pidfd)
            return 0
        folder = StackFolder(port)
        with folder.claimed() as alone:
            record = folder.read()
            if alone and record is not None:
                log = Log(sys.stdout)
                try:
                    return 0 if asyncio.run(end_stack(folder, record, log)) else 1
                finally:
                    log.close()
    raise ConfigError(
        f"--url: no `motet up` of this user serves {args.url}; give the URL that it printed",
        param="--url",
    )


def _supervisor(path: Path) -> int | None:
    """Return a pidfd of the process that takes orders at a Unix socket; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(str(path))
            told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
            return os.pidfd_open(_PEERCRED.unpack(told)[0])
        except OSError:
            return None


def _end(pidfd: int) -> None:
    """Tell a supervisor to end everything, and wait for its end."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        select.select([pidfd], [], [])
    finally:
        os.close(pidfd)
