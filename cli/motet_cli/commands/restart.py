"""Replace the processes of a running stack one by one while it serves: `motet restart`."""

from __future__ import annotations

from argparse import Namespace

from motet_cli.supervision.orders import Restart, send_order


def run(args: Namespace) -> int:
    for line in send_order(args.url, Restart(args.roles, args.drain)):
        print(line, flush=True)
    return 0
