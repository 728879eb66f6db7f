"""Write a benchmark's results as JSON, with the state of the machine before and after."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.support.measures import Target


def conditions() -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
    }


def load_line(before: dict[str, Any]) -> str:
    """Return a line about the machine's load, given the `conditions` of the start."""
    load = f"{before['load'][0]}, {conditions()['load'][0]}"
    return f"Load average before and after: {load} on {before['cores']} cores"


def write(
    output: Path,
    before: dict[str, Any],
    plan: object,
    findings: object,
    targets: Sequence[Target] | None = None,
) -> None:
    """Write the JSON file, creating its folder if needed.

    targets: goals, each written with whether it is met.
    """
    document = {"conditions": before, "plan": plan, "findings": findings}
    if targets is not None:
        document["targets"] = [{**asdict(target), "met": target.met} for target in targets]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(
        f"{type(value).__name__} has no place in a benchmark's JSON; give dataclasses, dicts and lists"
    )
