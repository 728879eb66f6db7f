"""Report which resources of a stack are short, by which numbers, and the remedy: `motet doctor`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from motet_cli.commands.server import Server, read_key
from motet_shared.errors import ConfigError, MotetError

HEALTHY, ILL, BLIND = 0, 1, 2  # exit codes
LONGEST = 60.0  # seconds of history that a gateway keeps
_COLOURS = {"critical": "red", "warning": "yellow"}


def run(args: Namespace) -> int:
    """Exit code: 0 healthy, 1 a resource is short, 2 the server could not be asked."""
    if not 0 < args.window <= LONGEST:
        raise ConfigError(
            f"--window: {args.window:g} is out of range; give seconds, up to {LONGEST:g}"
        )
    try:
        with Server(args.url, read_key(args.api_key_file)) as server:
            told = server.metrics("doctor", window=args.window)
    except MotetError as error:
        print(f"motet doctor: {error.message}", file=sys.stderr)
        return BLIND
    if args.json:
        json.dump(told, sys.stdout, indent=1)
        print()
    else:
        Console().print(report(told))
    return ILL if told["findings"] else HEALTHY


def report(told: dict[str, Any]) -> RenderableType:
    """Return the findings, those with the highest cost first."""
    looked = f"in the last {told['window_seconds']:g} s"
    findings = told["findings"]
    if not findings:
        return Text(f"healthy: nothing was short {looked}", style="green")
    count = "one thing is" if len(findings) == 1 else f"{len(findings)} things are"
    head = Text(f"{count} short {looked}, what costs most first")
    return Group(head, *(_finding(number, one) for number, one in enumerate(findings, start=1)))


def _finding(number: int, one: dict[str, Any]) -> RenderableType:
    title = Text.assemble(
        f"\n{number}. ",
        (one["severity"], _COLOURS.get(one["severity"], "")),
        f"  {one['layer']} {one['layer_name']}: {one['resource']}  ({one['name']})",
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("what", one["what"])
    table.add_row("where", ", ".join(one["where"]))
    table.add_row(
        "numbers", ", ".join(f"{name} {value:.4g}" for name, value in one["numbers"].items())
    )
    table.add_row("cost", f"{one['cost']:.2f} requests held up at any moment")
    table.add_row("turn", one["knob"])
    return Group(title, Padding(table, (0, 0, 0, 3)))
