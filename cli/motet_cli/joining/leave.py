"""Take this machine out of a stack that it has joined, without a broken reply: `motet leave`."""

from __future__ import annotations

from argparse import Namespace

from motet_cli.joining import joined_folder
from motet_cli.joining.listen import parse_host_port
from motet_cli.supervision.orders import Leave, send_to
from motet_shared.errors import ConfigError

_LONGEST = 3600.0  # seconds


def run(args: Namespace) -> int:
    """Drain and end the services, then delete the stack's certificates and passwords here."""
    if not 0 <= args.drain <= _LONGEST:
        raise ConfigError(
            f"--drain: {args.drain:g} is out of range; give 0 to {_LONGEST:g} seconds",
            param="--drain",
        )
    host, port = _stack(args.stack)
    missing = ConfigError(
        f"HOST:PORT: no `motet join` of this user runs for {args.stack or 'any stack'}; name one"
        " that does",
        param="HOST:PORT",
    )
    for line in send_to(joined_folder.socket_of(host, port), Leave(args.drain), missing):
        print(line, flush=True)
    return 0


def _stack(given: str | None) -> tuple[str, int]:
    """Return the stack to leave: the given one, else the only one. Raises ConfigError."""
    if given is not None:
        return parse_host_port(given, "HOST:PORT")
    found = joined_folder.running()
    if len(found) != 1:
        known = f"one of {', '.join(found)}" if found else "one that `motet join` runs for"
        raise ConfigError(f"HOST:PORT: is not given; name {known}", param="HOST:PORT")
    return parse_host_port(found[0], "HOST:PORT")
