"""Keep what a machine has of the stacks that it has joined, and find those that run.

Per stack there is a folder with its certificates and passwords, which outlives `motet join`, so that
the same machine joins again without a token; and, while `motet join` runs, a socket for orders.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from motet_cli.joining.listen import host_port
from motet_cli.supervision import connection, nats

_PREFIX = "joined-"


def folder_of(host: str, port: int) -> Path:
    """Return the folder of a stack, which only this user can read. Raises ConfigError."""
    return connection.private(nats.default_store(0).with_name(_name(host, port)))


def forget(host: str, port: int) -> None:
    """Delete the certificates and passwords of a stack."""
    shutil.rmtree(nats.default_store(0).with_name(_name(host, port)), ignore_errors=True)


def socket_of(host: str, port: int) -> Path:
    """Return the path of the socket for orders."""
    return connection.private(connection.folder()) / f"{_name(host, port)}.sock"


def running() -> list[str]:
    """Return HOST:PORT of the stacks whose services run on this machine."""
    found = []
    for path in sorted(connection.folder().glob(f"{_PREFIX}*.sock")):
        if not _listens(path):  # a `motet join` that was killed has left it
            continue
        host, _, port = path.stem.removeprefix(_PREFIX).rpartition("_")
        found.append(host_port(host, int(port)))
    return found


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(str(path))
        except OSError:
            return False
        return True


def _name(host: str, port: int) -> str:
    return f"{_PREFIX}{host}_{port}"
