"""`motet top`: every instance of a stack and how fast its replies are, live."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from motet_cli.server import Server, read_key
from motet_shared.errors import ConfigError, MotetError

Document = dict[str, Any]

_STATES = {"ready": "green", "draining": "yellow", "warming": "cyan", "starting": "cyan"}


@dataclass(frozen=True)
class View:
    """Two looks at a stack. `before` is the earlier one; `price`: of all machines, per hour."""

    now: Document
    before: Document
    price: float | None = None

    def rates(self) -> dict[str, float]:
        """What each instance that was there both times has done per second, by its name."""
        passed = self.now["time"] - self.before["time"]
        earlier = {one["instance"]: one["work"]["done"] for one in self.before["instances"] if one["work"]}
        return {
            one["instance"]: max(one["work"]["done"] - earlier[one["instance"]], 0.0) / passed
            for one in self.now["instances"]
            if passed > 0 and one["work"] and one["instance"] in earlier
        }

    def per_million(self) -> float | None:
        """What a million tokens of replies cost at the rate of the window."""
        rate = self.now["replies"]["tokens_per_second"]
        return self.price / 3600 / rate * 1e6 if self.price is not None and rate else None

    def document(self) -> Document:
        return self.now | {"per_second": self.rates(), "cost_per_million_tokens": self.per_million()}


def run(args: Namespace) -> int:
    """Until Ctrl-C; with `--once`, or where nobody watches, one look."""
    if args.every <= 0:
        raise ConfigError(f"--every: {args.every:g} is not a time; give seconds, such as 1")
    if args.json and not args.once:
        raise ConfigError("--json: needs --once")
    with Server(args.url, read_key(args.api_key_file)) as server:
        console = Console()
        views = _views(server, args)
        if args.once or not console.is_terminal:
            _print(next(views), console, args.json)
            return 0
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for view in views:
                live.update(screen(view, args.url), refresh=True)
    return 0


def _views(server: Server, args: Namespace) -> Iterator[View]:
    """One look after another. A server that is away for a moment is waited for once it has been seen."""
    limits = {"window": args.window, "first": args.first, "between": args.between}
    before = server.metrics("stack", **limits)
    while True:
        time.sleep(args.every)
        try:
            now = server.metrics("stack", **limits)
        except MotetError:
            if args.once:
                raise
            continue
        yield View(now, before, args.price)
        before = now


def _print(view: View, console: Console, as_json: bool) -> None:
    if as_json:
        json.dump(view.document(), sys.stdout, indent=1)
        print()
    else:
        console.print(screen(view, ""))


# -------------------------------------------------------------------------------------------------------------- drawing
def screen(view: View, url: str) -> RenderableType:
    """All that is shown."""
    head = [Text(f"motet top  {url}  Ctrl-C ends", style="dim"), Text()] if url else []
    return Group(*head, replies(view), Text(), instances(view))


def replies(view: View) -> Table:
    """How the replies of the window were."""
    told = view.now["replies"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("replies", f"{told['active']} now, {told['replies_per_second']:.2f}/s, {_failed(told)}")
    table.add_row("tokens", f"{told['tokens_per_second']:.1f}/s")
    table.add_row("first token", _milliseconds(told["first_token_seconds"]))
    table.add_row("between tokens", _milliseconds(told["between_tokens_seconds"]))
    table.add_row("good", "-" if told["good"] is None else f"{told['good']:.1%}")
    if view.price is not None:
        cost = view.per_million()
        table.add_row("a million tokens", "-" if cost is None else f"{cost:.2f} at {view.price:g} per hour")
    return table


def _failed(told: Document) -> str:
    return f"{told['failed']} of {told['replies']} failed in {told['window_seconds']:g} s"


def _milliseconds(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return "   ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in found.items())


def instances(view: View) -> Table:
    """A line for each instance."""
    rates = view.rates()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("role", "instance", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("model", overflow="fold")
    for name in ("running", "queued", "batch", "KV used", "work"):
        table.add_column(name, justify="right")
    for one in view.now["instances"]:
        load, rate = one["load"], rates.get(one["instance"])
        work = "" if rate is None else f"{rate:.1f} {one['work']['unit']}"
        table.add_row(
            one["role"],
            one["instance"].removeprefix(one["role"] + "-"),
            Text(one["state"], style=_STATES.get(one["state"], "red")),
            ", ".join(one["models"]),
            _count(load.get("running", load.get("active"))),
            _count(load.get("queued")),
            _count(load.get("batch")),
            f"{1 - load['kv_free']:.0%}" if "kv_free" in load else "",
            work,
        )
    return table


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
