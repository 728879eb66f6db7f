"""Run a descriptor store: `python -m motet_fdstore --path SOCKET (--listen-fd N | --port N)`."""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import socket
import sys
from pathlib import Path

from .store import MAX_DEATHS, MOST, ORPHAN_SECONDS, Store

_EXIT_CONFIG = 78  # EX_CONFIG: a supervisor should not retry
_BACKLOG = 2048
_OTHERS = 64  # descriptors besides those of connections


def main(argv: list[str] | None = None) -> int:
    """Keep descriptors until SIGTERM or SIGINT; return the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        listener = _listener(args)
        store = Store(
            [listener],
            args.path,
            most=_room_for(args.max_connections),
            orphan_seconds=args.orphan_seconds,
            max_deaths=args.max_deaths,
        )
    except OSError as error:
        print(f"cannot listen: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.append(number))
    logging.info("keeping the connections of port %d", listener.getsockname()[1])
    try:
        store.run(lambda: bool(stopping))
    finally:
        store.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="motet_fdstore", description=__doc__)
    parser.add_argument("--path", type=Path, required=True, help="Unix socket of the store")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen-fd", type=int, help="inherited listening socket")
    where.add_argument("--port", type=int, help="port to listen on")
    parser.add_argument("--host", default="127.0.0.1", help="address of --port")
    parser.add_argument(
        "--max-connections", type=int, default=MOST, help="most connections at a time"
    )
    parser.add_argument(
        "--orphan-seconds",
        type=float,
        default=ORPHAN_SECONDS,
        help="longest time that a connection waits for a gateway",
    )
    parser.add_argument(
        "--max-deaths",
        type=int,
        default=MAX_DEATHS,
        help="deaths of gateways within a minute after which a connection is closed",
    )
    return parser


def _listener(args: argparse.Namespace) -> socket.socket:
    if args.listen_fd is not None:
        listener = socket.socket(fileno=args.listen_fd)
        listener.listen(_BACKLOG)  # it may be bound only
        return listener
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    return socket.create_server((args.host, args.port), family=family, backlog=_BACKLOG)


def _room_for(connections: int) -> int:
    """Raise the limit of open files; return how many connections fit, two descriptors each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + _OTHERS
    reached = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    return max((reached - _OTHERS) // 2, 1)


if __name__ == "__main__":
    sys.exit(main())
