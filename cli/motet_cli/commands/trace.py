"""Show the stages of one reply as a waterfall across services: `motet trace`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from motet_cli.commands.server import Server, read_key
from motet_shared.errors import BadRequest

_MAX_REPLIES = 200  # that are searched
_WIDTH = 48


def run(args: Namespace) -> int:
    """Print the stages of a reply. Raises BadRequest if the gateway does not know it."""
    with Server(args.url, read_key(args.api_key_file)) as server:
        query = {"request": args.request} if args.request else {}
        found = server.metrics("replies", count=_MAX_REPLIES, **query)["replies"]
    if not found:
        message = (
            f"REQUEST: {args.request!r} is not among the last replies of this gateway"
            if args.request
            else "REQUEST: this gateway has sent no reply yet"
        )
        raise BadRequest(message, param="REQUEST")
    reply = max(found, key=lambda one: one["total"]) if args.slowest else found[0]
    Console().print(heading(reply), waterfall(reply), sep="\n")
    return 0


def heading(reply: dict[str, Any]) -> str:
    failovers = f", {reply['moves']} failovers" if reply["moves"] else ""
    sizes = f"{reply['prompt_tokens']} tokens in ({reply['cached_tokens']} cached), {reply['tokens']} out"
    return f"{reply['request'] or 'a realtime reply'}  {reply['model']}  {reply['status']}  {sizes}{failovers}"


def waterfall(reply: dict[str, Any]) -> Table:
    """Return a table with a row per stage: duration, and a bar at its place in the reply."""
    total = max(reply["total"], 1e-9)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column(f"of {total * 1000:.1f} ms")
    for span in reply["spans"]:
        before = _place(span["start"], total)
        length = max(min(round(span["seconds"] / total * _WIDTH), _WIDTH - before), 1)
        name = f"  {span['name']}" if "." in span["name"] else span["name"]
        table.add_row(name, f"{span['seconds'] * 1000:.1f}", " " * before + "█" * length)
    if reply["first"] is not None:
        table.add_row(
            "first token", f"{reply['first'] * 1000:.1f}", " " * _place(reply["first"], total) + "▏"
        )
    return table


def _place(seconds: float, total: float) -> int:
    return min(round(seconds / total * _WIDTH), _WIDTH - 1)
