"""`motet restart`: a new process for each one of a running stack, one after the other, while it serves."""

from __future__ import annotations

from argparse import Namespace

from motet_cli.orders import Restart, give


def run(args: Namespace) -> int:
    for line in give(args.url, Restart(args.roles, args.drain)):
        print(line, flush=True)
    return 0
