"""Change the number of processes of a running stack while it serves: `motet scale`."""

from __future__ import annotations

import re
from argparse import Namespace

from motet_cli.supervision.orders import Scale, send_order
from motet_shared.errors import ConfigError

_COUNT = re.compile(r"([a-z][a-z0-9]*)=([0-9]{1,3})")


def run(args: Namespace) -> int:
    for line in send_order(args.url, Scale(counts(args.counts), args.drain)):
        print(line, flush=True)
    return 0


def counts(given: list[str]) -> dict[str, int]:
    """Parse `role=3 …` into counts by role. Raises ConfigError that names a wrong word."""
    found = {}
    for word in given:
        if (match := _COUNT.fullmatch(word)) is None:
            raise ConfigError(
                f"ROLE=N: {word!r} is not a role and a number; give one such as decode=3",
                param="ROLE=N",
            )
        found[match[1]] = int(match[2])
    return found
