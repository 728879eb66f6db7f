"""Report which resources of a stack are short, with numbers and remedies: `motet doctor`."""

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

HEALTHY, SHORT, UNREACHABLE = 0, 1, 2  # exit codes
LONGEST = 60.0  # seconds of history that a gateway keeps
_COLOURS = {"critical": "red", "warning": "yellow"}


def run(args: Namespace) -> int:
    """Print the findings. Exit code: 0 healthy, 1 a resource is short, 2 no answer."""
    if not 0 < args.window <= LONGEST:
        raise ConfigError(
            f"--window: {args.window:g} is out of range; give seconds, up to {LONGEST:g}",
            param="--window",
        )
    try:
        with Server(args.url, read_key(args.api_key_file)) as server:
            diagnosis = server.metrics("doctor", window=args.window)
    except MotetError as error:
        print(f"motet doctor: {error.message}", file=sys.stderr)
        return UNREACHABLE
    if args.json:
        json.dump(diagnosis, sys.stdout, indent=1)
        print()
    else:
        Console().print(report(diagnosis))
    return SHORT if diagnosis["findings"] else HEALTHY


def report(diagnosis: dict[str, Any]) -> RenderableType:
    """Return the findings for the terminal, the one with the highest cost first."""
    window = f"in the last {diagnosis['window_seconds']:g} s"
    findings = diagnosis["findings"]
    if not findings:
        return Text(f"healthy: nothing was short {window}", style="green")
    count = "one resource is" if len(findings) == 1 else f"{len(findings)} resources are"
    head = Text(f"{count} short {window}, the most costly first")
    return Group(
        head, *(_finding(number, finding) for number, finding in enumerate(findings, start=1))
    )


def _finding(number: int, finding: dict[str, Any]) -> RenderableType:
    title = Text.assemble(
        f"\n{number}. ",
        (finding["severity"], _COLOURS.get(finding["severity"], "")),
        f"  {finding['layer']} {finding['layer_name']}: {finding['resource']}  ({finding['name']})",
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("problem", finding["what"])
    table.add_row("instances", ", ".join(finding["where"]))
    table.add_row(
        "numbers", ", ".join(f"{name} {value:.4g}" for name, value in finding["numbers"].items())
    )
    table.add_row("cost", f"{finding['cost']:.2f} requests delayed on average")
    table.add_row("remedy", finding["knob"])
    return Group(title, Padding(table, (0, 0, 0, 3)))
