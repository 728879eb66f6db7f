"""`motet trace`: one reply's time as a waterfall across services."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from motet_cli.server import Server, read_key
from motet_shared.errors import BadRequest

_MOST = 200  # replies that are looked through
_WIDTH = 48
# Services as a request meets them, each inside the one before, and their stages in the order in which they run.
_STAGES = {
    "gateway": (),
    "tokenizer": ("encode", "see", "wait"),
    "decode": ("queue", "transfer", "prefill", "decode"),
}


class Span(NamedTuple):
    """A stage; `start` and `seconds` from the moment at which the request came in."""

    name: str
    start: float
    seconds: float


def run(args: Namespace) -> int:
    """Print the reply that was asked for. BadRequest if the server knows of none."""
    with Server(args.url, read_key(args.api_key_file)) as server:
        query = {"request": args.request} if args.request else {}
        found = server.metrics("replies", count=_MOST, **query)["replies"]
    if not found:
        what = f"request {args.request!r} is not among the last replies" if args.request else "there is no reply yet"
        raise BadRequest(f"{what} of this gateway")
    reply = max(found, key=lambda one: one["total"]) if args.slowest else found[0]
    Console().print(heading(reply), waterfall(reply), sep="\n")
    return 0


def heading(reply: dict[str, Any]) -> str:
    moved = f", moved {reply['moves']}×" if reply["moves"] else ""
    sizes = f"{reply['prompt_tokens']} tokens in ({reply['cached_tokens']} cached), {reply['tokens']} out"
    return f"{reply['request'] or 'a realtime reply'}  {reply['model']}  {reply['status']}  {sizes}{moved}"


def waterfall(reply: dict[str, Any]) -> Table:
    """A line for each stage, with its place in the whole."""
    total = max(reply["total"], 1e-9)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column(f"of {total * 1000:.1f} ms")
    for span in spans(reply["timing"]):
        before = min(round(span.start / total * _WIDTH), _WIDTH - 1)
        length = max(min(round(span.seconds / total * _WIDTH), _WIDTH - before), 1)
        table.add_row(span.name, f"{span.seconds * 1000:.1f}", " " * before + "█" * length)
    if reply["first"] is not None:
        table.add_row("first token", f"{reply['first'] * 1000:.1f}", " " * _place(reply["first"], total) + "▏")
    return table


def _place(seconds: float, total: float) -> int:
    return min(round(seconds / total * _WIDTH), _WIDTH - 1)


def spans(timing: dict[str, float]) -> list[Span]:
    """The stages, each service inside the one before it.

    Services tell how long a stage took, not when it began: stages are laid one after another, and a service begins
    where those of the one before it have ended. What is left at the end is wire and waiting for the client.
    """
    found: list[Span] = []
    start = 0.0
    for role, stages in _STAGES.items():
        if (total := timing.get(f"{role}.total")) is not None:
            found.append(Span(role, start, total))
        for stage in stages:
            if seconds := timing.get(f"{role}.{stage}"):
                found.append(Span(f"  {role}.{stage}", start, seconds))
                start += seconds
    return found
