"""Compare our recognizer with transformers' pipeline and faster-whisper.

Weights, clips, threads and numbers of generated tokens are the same.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.figures import ratio
from benchmarks.support.cache import made
from benchmarks.support.measures import Target, table
from benchmarks.support.workers import Worker, has_modules
from benchmarks.voice.checkpoint import whisper_checkpoint

WHISPER_PYTHON = "MOTET_WHISPER_PYTHON"


@dataclass(frozen=True, kw_only=True)
class AsrPlan:
    """Define the loads.

    clips: seconds of each clip, and tokens to generate for it. engines: prefixes of engine names;
    empty: all.
    """

    shape: str = "whisper-tiny"
    clips: tuple[tuple[float, int], ...] = ((5.0, 16), (30.0, 64))
    batches: tuple[int, ...] = (1, 8)
    repeats: int = 3
    rounds: int = 3
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Peer(Worker):
    """Define one engine in one format."""

    module: str = "voice.asr_worker"
    format: str


def peers(transformers_dtype: str) -> list[Peer]:
    """Return all engines, ours first."""
    python = os.environ.get(WHISPER_PYTHON) or sys.executable
    return [
        *(
            Peer(name=f"motet {form}", format=form, task={"driver": "motet"})
            for form in ("float32", "int8")
        ),
        Peer(
            name=f"transformers pipeline, {transformers_dtype}",
            format=transformers_dtype,
            task={"driver": "transformers"},
        ),
        *(
            Peer(
                name=f"faster-whisper {form}",
                format=form,
                module="voice.whisper_worker",
                python=python,
            )
            for form in ("float32", "int8")
        ),
    ]


def absent(peer: Peer) -> str:
    """Return why a peer cannot run; empty if it can."""
    if peer.module != "voice.whisper_worker" or has_modules(peer.python, "faster_whisper"):
        return ""
    return f"faster-whisper is not installed for {WHISPER_PYTHON} (see benchmarks/README.md)"


@dataclass
class Runs:
    """Hold the seconds of one load by round: `batch` clips of `seconds` at a time.

    said: tokens of the last run.
    """

    seconds: float
    batch: int
    whole: list[float] = field(default_factory=list)
    features: list[float] = field(default_factory=list)
    encoder: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def speed(self) -> list[float]:
        """Return seconds of audio per second, by round."""
        return [self.seconds * self.batch / taken for taken in self.whole]


@dataclass
class EngineRuns:
    """Hold the runs of one engine, by load (see `load_name`)."""

    name: str
    runs: dict[str, Runs] = field(default_factory=dict)
    note: str = ""

    def take(self, result: dict[str, Any]) -> None:
        """Add a round, with the medians of its runs."""
        for run in result["runs"]:
            seconds, batch = run["seconds"], run["batch"]
            runs = self.runs.setdefault(load_name(seconds, batch), Runs(seconds, batch))
            runs.whole.append(statistics.median(run["whole"]))
            runs.features.append(statistics.median(run["parts"]["features"]))
            runs.encoder.append(statistics.median(run["parts"]["encoder"]))
            runs.tokens = run["said"]
        self.note = result["note"]

    def agreement(self, other: EngineRuns) -> float:
        """Return the share of equal tokens, a check that both compute the same model."""
        pairs = [
            (a, b)
            for load, runs in self.runs.items()
            for one, another in zip(runs.tokens, other.runs[load].tokens, strict=True)
            for a, b in zip(one, another, strict=True)
        ]
        return sum(a == b for a, b in pairs) / len(pairs)


def load_name(seconds: float, batch: int) -> str:
    return f"{batch} × {seconds:g} s"


@dataclass
class AsrFindings:
    engines: dict[str, EngineRuns] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # by engine: why


def run_asr(plan: AsrPlan, cache: Path, threads: int, transformers_dtype: str) -> AsrFindings:
    """Run every engine once per round, one after the other, each in a process of its own."""
    findings = AsrFindings()
    chosen = [
        peer for peer in peers(transformers_dtype) if peer.name.startswith(plan.engines or ("",))
    ]
    findings.missing = {peer.name: reason for peer in chosen if (reason := absent(peer))}
    for _ in range(plan.rounds):
        for peer in chosen:
            if peer.name in findings.missing:
                continue
            print(f"  {peer.name} ...", flush=True)
            try:
                result = _measure(peer, plan, cache, threads)
            except RuntimeError as error:
                findings.missing[peer.name] = str(error)
                findings.engines.pop(peer.name, None)
                continue
            findings.engines.setdefault(peer.name, EngineRuns(peer.name)).take(result)
    return findings


def _measure(peer: Peer, plan: AsrPlan, cache: Path, threads: int) -> dict[str, Any]:
    """Run all loads of one engine.

    Clips of each length have a checkpoint of their own, which generates their number of tokens.
    """
    converted, checkpoints = peer.module == "voice.whisper_worker", []
    for seconds, tokens in plan.clips:
        folder = whisper_checkpoint(plan.shape, tokens, cache)
        checkpoint = {"seconds": seconds, "tokens": tokens, "folder": str(folder)}
        checkpoints.append(
            checkpoint | ({"file": str(_converted(peer, folder))} if converted else {})
        )
    task = {
        "checkpoints": checkpoints, "batches": plan.batches, "repeats": plan.repeats, "threads": threads,
        "format": peer.format, **peer.task,
    }  # fmt: skip
    args = [*(["measure"] if converted else []), json.dumps(task)]
    return peer.run(args, threads=threads)


def _converted(peer: Peer, folder: Path) -> Path:
    """Return the checkpoint converted for CTranslate2, on the first call only."""

    def convert(target: Path) -> None:
        peer.run(["convert", str(folder), str(target), peer.format], threads=1, output=False)

    return made(folder.with_name(f"{folder.name}.ct2-{peer.format}"), convert, mark="model.bin")


# ------------------------------------------------------------------------------------------------------------- telling
def asr_report(findings: AsrFindings, plan: AsrPlan) -> str:
    engines = list(findings.engines.values())
    loads = [load_name(seconds, batch) for seconds, _ in plan.clips for batch in plan.batches]
    missing = [f"* {name} is absent: {reason}" for name, reason in findings.missing.items()]
    lengths = ", ".join(f"{tokens} tokens of {seconds:g} s" for seconds, tokens in plan.clips)
    notes = [f"* {one.name}: {one.note}" for one in engines if one.note]
    if not engines:
        return "\n".join(missing)
    parts = [
        f"{plan.shape}, {lengths}. Seconds of audio per second, all of it: features, encoder, decoder.",
        _speed_table(engines, loads),
        "Milliseconds of features / encoder / the rest:",
        _split_table(engines, loads),
        "Ours as a multiple of each peer:",
        _ratio_table(engines, loads),
        "\n".join([*notes, *missing]),
    ]
    return "\n\n".join(parts)


def _speed_table(engines: Sequence[EngineRuns], loads: Sequence[str]) -> str:
    rows = [
        [
            one.name,
            f"{one.agreement(engines[0]):.0%}",
            *(f"{statistics.median(one.runs[load].speed):,.1f}" for load in loads),
        ]
        for one in engines
    ]
    return table(["engine", "tokens as ours", *loads], rows)


def _split_table(engines: Sequence[EngineRuns], loads: Sequence[str]) -> str:
    def cell(runs: Runs) -> str:
        whole, features, encoder = (
            statistics.median(x) for x in (runs.whole, runs.features, runs.encoder)
        )
        return " / ".join(
            f"{value * 1e3:,.0f}" for value in (features, encoder, whole - features - encoder)
        )

    return table(
        ["engine", "", *loads],
        [[one.name, "", *(cell(one.runs[load]) for load in loads)] for one in engines],
    )


def _ratio_table(engines: Sequence[EngineRuns], loads: Sequence[str]) -> str:
    rows = [
        [
            mine.name,
            peer.name,
            *(f"{ratio(mine.runs[load].speed, peer.runs[load].speed):.2f}" for load in loads),
        ]
        for mine in engines
        if mine.name.startswith("motet")
        for peer in engines
        if not peer.name.startswith("motet")
    ]
    return table(["ours", "peer", *loads], rows)


# (a peer by its beginning, clips at a time, at least)
_TARGETS = [
    ("faster-whisper int8", 1, 1.5),
    ("faster-whisper int8", 8, 1.6),
    ("transformers", 1, 2.5),
    ("transformers", 8, 2.5),
]


def asr_targets(findings: AsrFindings, plan: AsrPlan, ours: str = "motet int8") -> list[Target]:
    """Return the targets for the longest clips that this run can judge."""
    judged, seconds = [], plan.clips[-1][0]
    for beginning, batch, least in _TARGETS:
        load = load_name(seconds, batch)
        rivals = [one for name, one in findings.engines.items() if name.startswith(beginning)]
        mine = findings.engines.get(ours)
        if mine is not None and rivals and load in mine.runs and load in rivals[0].runs:
            value = ratio(mine.runs[load].speed, rivals[0].runs[load].speed)
            judged.append(
                Target(f"{ours} / {rivals[0].name}, {load}", value, least, "times", most=False)
            )
    return judged
