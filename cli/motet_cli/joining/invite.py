"""Print the command with which another machine joins a running stack: `motet invite`."""

from __future__ import annotations

from argparse import Namespace

from motet_cli.joining.choice import parse_services
from motet_cli.supervision.orders import Invite, send_order
from motet_shared.errors import ConfigError
from motet_shared.process.config import parse_duration

_LONGEST = 30 * 86400.0  # seconds


def run(args: Namespace) -> int:
    order = Invite(list(parse_services(args.services)), _seconds(args.expires), _uses(args.uses))
    for line in send_order(args.url, order):
        print(line, flush=True)
    return 0


def _seconds(given: str) -> float:
    try:
        seconds = parse_duration(given)
    except ValueError as error:
        raise ConfigError(
            f"--expires: {given!r} is wrong; give {error}", param="--expires"
        ) from None
    if not 0 < seconds <= _LONGEST:
        raise ConfigError(
            f"--expires: {given!r} is out of range; give a time of up to 30 days, such as 1h",
            param="--expires",
        )
    return seconds


def _uses(given: int) -> int:
    if not 1 <= given <= 1000:
        raise ConfigError(f"--uses: {given} is out of range; give 1 to 1000", param="--uses")
    return given
