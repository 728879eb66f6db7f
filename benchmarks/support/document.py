"""Write a benchmark's results as JSON, with the state of the machine before and after."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.support.measures import Target
from benchmarks.support.paths import ROOT

_CPUINFO = Path("/proc/cpuinfo")
_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
)  # of x86, by which kernels differ


def conditions() -> dict[str, Any]:
    """Return when, where and on what a benchmark runs: time, commit, command, processor and load."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": _command(sys.argv),
        "processor": processor(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": _load(),
    }


def _command(words: Sequence[str]) -> str:
    """Return a command without the folder of the script, and without where it writes its result."""
    kept = list(words[1:])
    if "--output" in kept:
        place = kept.index("--output")
        del kept[place : place + 2]
    return shlex.join([Path(words[0]).name, *kept])


def _load() -> list[float]:
    return [round(value, 1) for value in os.getloadavg()]


def commit() -> str:
    """Return the short hash of the checkout, with `+` behind it if tracked files differ, or empty."""
    try:
        known = _git("rev-parse", "--short=8", "HEAD")
        return known + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=10
    ).stdout.strip()


def processor(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of the processor, and which of the instructions that kernels use it has."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags", "").split()
    found = [feature for feature in _FEATURES if feature in flags]
    return " ".join(filter(None, [fields.get("model name", platform.machine()), ", ".join(found)]))


def load_line(before: dict[str, Any]) -> str:
    """Return a line about the machine's load, given the `conditions` of the start."""
    load = f"{before['load'][0]}, {_load()[0]}"
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
