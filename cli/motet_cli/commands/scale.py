"""Change the number of processes of a running stack while it serves: `motet scale`."""

from __future__ import annotations

import re
from argparse import Namespace

from motet_cli.supervision.orders import Scale, give
from motet_shared.errors import ConfigError

_COUNT = re.compile(r"([a-z]+)=([0-9]{1,3})")


def run(args: Namespace) -> int:
    for line in give(args.url, Scale(counts(args.counts), args.drain)):
        print(line, flush=True)
    return 0


def counts(given: list[str]) -> dict[str, int]:
    """Parse `role=3 …`. ConfigError names a word of another form."""
    found = {}
    for word in given:
        if (match := _COUNT.fullmatch(word)) is None:
            raise ConfigError(f"ROLE=N: {word!r} is none; give one such as decode=3")
        found[match[1]] = int(match[2])
    return found
