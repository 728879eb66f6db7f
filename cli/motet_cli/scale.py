"""`motet scale`: more or fewer processes of a running stack, while it serves."""

from __future__ import annotations

import re
from argparse import Namespace

from motet_cli.orders import Scale, give
from motet_shared.errors import ConfigError

_COUNT = re.compile(r"([a-z]+)=([0-9]{1,3})")


def run(args: Namespace) -> int:
    for line in give(args.url, Scale(counts(args.counts), args.drain)):
        print(line, flush=True)
    return 0


def counts(given: list[str]) -> dict[str, int]:
    """Of `role=3 …`. ConfigError names what is none."""
    found = {}
    for word in given:
        if (match := _COUNT.fullmatch(word)) is None:
            raise ConfigError(f"ROLE=N: {word!r} is none; give one such as decode=3")
        found[match[1]] = int(match[2])
    return found
