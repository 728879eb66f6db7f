"""Make this machine a part of a stack that runs on another one: `motet join`."""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from motet_cli.joining import joined_folder
from motet_cli.joining.admission import Admitted, ask
from motet_cli.joining.choice import Choice, Machine, choose, parse_services, wanted_services
from motet_cli.joining.joined_host import JoinedHost
from motet_cli.joining.listen import host_port, parse_host_port
from motet_cli.joining.messages import StackOffer
from motet_cli.joining.services import joined_services, joined_stack
from motet_cli.joining.token import parse_token
from motet_cli.supervision.connection import NatsAccess, PeerNetwork
from motet_cli.supervision.logs import Log
from motet_cli.supervision.up import kernels_note
from motet_shared.errors import ConfigError
from motet_shared.wire import sites

_SHARE = 0.85  # of the free memory


def run(args: Namespace) -> int:
    """Join, then run services until `motet leave` or Ctrl-C; exit code as of `JoinedHost.run`."""
    host, port = parse_host_port(args.stack, "HOST:PORT")
    token = None if args.token is None else parse_token(args.token)
    counts = parse_services(args.services)
    if args.site is not None and not sites.is_name(args.site):
        raise ConfigError(
            f"--site: {args.site!r} is no name of a site; use a-z, 0-9 and hyphens, at most 32",
            param="--site",
        )
    if (where := host_port(host, port)) in joined_folder.running():
        raise ConfigError(
            f"HOST:PORT: `motet join` of this user runs for {where} already; end it with `motet leave`",
            param="HOST:PORT",
        )
    folder = joined_folder.folder_of(host, port)
    admitted = asyncio.run(ask(host, port, token, folder))
    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR")
    log = Log(sys.stdout, fmt=args.log_format, colour=colour, live=terminal)
    try:
        return _run(args, counts, admitted, folder, log)
    finally:
        log.close()


def _run(
    args: Namespace, counts: dict[str, int], admitted: Admitted, folder: Path, log: Log
) -> int:
    host, port = parse_host_port(args.stack, "HOST:PORT")
    offer = admitted.reply.offer
    machine = Machine.measure(_SHARE)
    if machine.gpus and not args.device:
        args.device = ["auto"]
    log.note(f"joined {host_port(host, port)} as {admitted.address}: {machine.describe()}")
    chosen = wanted_services(offer, counts) if counts else choose(offer, machine)
    _report(offer, chosen, log)
    stack = joined_stack(offer, chosen, counts, args)
    network = PeerNetwork(admitted.address, folder)
    specs = joined_services(stack, chosen, network, admitted.reply.nats_url)
    if note := kernels_note():
        log.note(note)
    access = NatsAccess(
        admitted.reply.nats_url, nats_credentials=str(folder), peer_folder=str(folder)
    )
    state_file = Path(args.state_file) if args.state_file else None
    joined = JoinedHost(
        specs,
        access,
        log,
        socket=joined_folder.socket_of(host, port),
        state_file=state_file,
        nursery=args.nursery,
    )
    code = asyncio.run(joined.run())
    if joined.has_left:
        joined_folder.forget(host, port)
    return code


def _report(offer: StackOffer, chosen: Sequence[Choice], log: Log) -> None:
    for choice in chosen:
        verb = "runs" if choice.taken else "does not run"
        log.note(f"{offer.label(choice.service)}: {verb} here ({choice.reason})")
