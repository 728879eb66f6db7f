"""Show the instances of a stack and the latency of its replies, live: `motet top`."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from motet_cli.commands.server import Server, read_key
from motet_shared.errors import ConfigError, MotetError

Document = dict[str, Any]

WIDE = 110  # columns that the whole table of instances needs
LONGEST_MODEL = 14  # characters; longer model names are folded in the narrow table
NUMBERS = ("running", "queued", "batch", "KV used", "work")
NARROW_HEADS = {"running": "run", "queued": "queue", "KV used": "KV"}
SHORT_UNITS = {"tokens/s": "tok/s", "× real time": "× real", "pictures/s": "pics/s"}
_STATES = {
    "ready": "green",
    "draining": "yellow",
    "warming": "cyan",
    "prepared": "blue",
    "starting": "cyan",
}


@dataclass(frozen=True)
class View:
    """Hold two measurements of a stack: `now`, and the earlier `before`.

    price: price of all machines per hour; None: unknown.
    """

    now: Document
    before: Document
    price: float | None = None

    def rates(self) -> dict[str, float]:
        """Return each instance's work per second, for instances in both measurements."""
        passed = self.now["time"] - self.before["time"]
        earlier = {
            one["instance"]: one["work"]["done"] for one in self.before["instances"] if one["work"]
        }
        return {
            one["instance"]: max(one["work"]["done"] - earlier[one["instance"]], 0.0) / passed
            for one in self.now["instances"]
            if passed > 0 and one["work"] and one["instance"] in earlier
        }

    def per_million(self) -> float | None:
        """Return the cost of a million reply tokens at the window's rate; None if unknown."""
        rate = self.now["replies"]["tokens_per_second"]
        return self.price / 3600 / rate * 1e6 if self.price is not None and rate else None

    def document(self) -> Document:
        """Return the newer measurement with rates and cost, for JSON."""
        return self.now | {
            "per_second": self.rates(),
            "cost_per_million_tokens": self.per_million(),
        }


def run(args: Namespace) -> int:
    """Show the stack until Ctrl-C; only once with `--once` or without a terminal."""
    if args.every <= 0:
        raise ConfigError(
            f"--every: {args.every:g} is out of range; give seconds above 0, such as 1",
            param="--every",
        )
    if args.json and not args.once:
        raise ConfigError("--json: needs --once; give both", param="--json")
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
    """Yield one measurement after another.

    Once the server has answered, later failures are skipped, except with `--once`.
    """
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


# -------------------------------------------------------------------------------------- rendering
def screen(view: View, url: str) -> RenderableType:
    """Return the screen: latencies of replies, and the table of instances."""
    head = [Text(f"motet top  {url}  (Ctrl-C to end)", style="dim"), Text()] if url else []
    return Group(*head, replies(view), Text(), _Instances(view))


def replies(view: View) -> Table:
    """Return a table of the rates and latencies of the window's replies."""
    figures = view.now["replies"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row(
        "replies",
        f"{figures['active']} now, {figures['replies_per_second']:.2f}/s, {_failed(figures)}",
    )
    table.add_row("tokens", f"{figures['tokens_per_second']:.1f}/s")
    table.add_row("first token", _milliseconds(figures["first_token_seconds"]))
    table.add_row("between tokens", _milliseconds(figures["between_tokens_seconds"]))
    table.add_row("goodput", "-" if figures["good"] is None else f"{figures['good']:.1%}")
    if view.price is not None:
        cost = view.per_million()
        table.add_row(
            "1M tokens cost", "-" if cost is None else f"{cost:.2f} at {view.price:g} per hour"
        )
    return table


def _failed(figures: Document) -> str:
    return f"{figures['failed']} of {figures['replies']} failed in {figures['window_seconds']:g} s"


def _milliseconds(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return "   ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in found.items())


@dataclass(frozen=True)
class _Instances:
    """Render the table of instances, with fewer columns on a narrow console."""

    view: View

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield instances(self.view, narrow=options.max_width < WIDE)


def instances(view: View, narrow: bool = False) -> Table:
    """Return a table with a row for each instance.

    narrow: fit 80 columns by leaving out role and batch.
    """
    rates = view.rates()
    table = Table(box=None if narrow else box.SIMPLE_HEAD, pad_edge=False)
    for name in ("instance", "state") if narrow else ("role", "instance", "state"):
        table.add_column(name, no_wrap=True)
    longest = max(
        (len(model) for one in view.now["instances"] for model in one["models"]), default=0
    )
    table.add_column("model", overflow="fold", min_width=min(longest, LONGEST_MODEL))
    for name in NUMBERS:
        if not (narrow and name == "batch"):
            table.add_column(
                NARROW_HEADS.get(name, name) if narrow else name, justify="right", no_wrap=True
            )
    for one in view.now["instances"]:
        table.add_row(*_cells(one, rates.get(one["instance"]), narrow))
    return table


def _cells(one: Document, rate: float | None, narrow: bool) -> list[str | Text]:
    """Return the cells of an instance's row.

    rate: its work per second; None: unknown.
    """
    load = one["load"]
    state = Text(one["state"], style=_STATES.get(one["state"], "red"))
    running, queued = _count(load.get("running", load.get("active"))), _count(load.get("queued"))
    used = f"{1 - load['kv_free']:.0%}" if "kv_free" in load else ""
    unit = "" if rate is None else one["work"]["unit"]
    done = "" if rate is None else f"{rate:.1f} {SHORT_UNITS.get(unit, unit) if narrow else unit}"
    models = ", ".join(one["models"])
    if narrow:
        return [one["instance"], state, models, running, queued, used, done]
    name = one["instance"].removeprefix(one["role"] + "-")
    return [
        one["role"],
        name,
        state,
        models,
        running,
        queued,
        _count(load.get("batch")),
        used,
        done,
    ]


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
