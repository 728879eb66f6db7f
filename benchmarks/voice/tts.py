"""Measure our speech engine: real-time factor and time to first audio, for several streams at once."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.support.measures import Target, table
from benchmarks.support.paths import MODELS
from benchmarks.support.workers import Worker
from benchmarks.voice.checkpoint import pocket_checkpoint, vits_checkpoint
from motet_shared.quantiles import quantile

POCKET = "pocket-tts"


@dataclass(frozen=True, kw_only=True)
class TtsPlan:
    """Define the loads.

    frames: frames of a sentence of random weights, which have no end (25 a second). vits_repeats:
    repeats of VITS, whose sentences take seconds; 0: left out.
    """

    streams: tuple[int, ...] = (1, 4, 8)
    frames: int = 100
    repeats: int = 5
    rounds: int = 3
    vits_repeats: int = 1  # a sentence of this model takes seconds


@dataclass(frozen=True)
class Stream:
    """Hold one sentence: seconds to its first and last sample, and of its speech."""

    first: float
    last: float
    speech: float

    @property
    def factor(self) -> float:
        """Return the real-time factor."""
        return self.last / self.speech


@dataclass
class TtsFindings:
    """Hold the streams by model and number of streams at a time."""

    spoken: dict[str, dict[int, list[Stream]]] = field(default_factory=dict)


def run_tts(plan: TtsPlan, cache: Path, threads: int) -> TtsFindings:
    trained = MODELS / POCKET
    real = (trained / "model.safetensors").is_file()
    pocket = POCKET if real else f"{POCKET}, random weights"
    models = {pocket: (trained if real else pocket_checkpoint(cache), not real, plan.repeats)}
    if plan.vits_repeats:
        models["VITS of MMS's size, random weights"] = (
            vits_checkpoint(cache),
            False,
            plan.vits_repeats,
        )
    findings = TtsFindings()
    for _ in range(plan.rounds):
        for name, (folder, endless, repeats) in models.items():
            print(f"  {name} ...", flush=True)
            task = {
                "folder": str(folder), "streams": plan.streams, "repeats": repeats,
                "frames": plan.frames if endless else 0,
            }  # fmt: skip
            result = Worker(name=name, module="voice.tts_worker").run(
                [json.dumps(task)], threads=threads
            )
            found = findings.spoken.setdefault(name, {})
            for row in result["streams"]:
                stream = Stream(row["first"], row["last"], row["speech"])
                found.setdefault(row["streams"], []).append(stream)
    return findings


def tts_report(findings: TtsFindings) -> str:
    header = [
        "model",
        "",
        "streams",
        "real-time factor",
        "worst",
        "first audio p50 ms",
        "p95 ms",
        "speech s/s",
    ]
    rows = []
    for name, found in findings.spoken.items():
        for count, streams in found.items():
            factors, firsts = [s.factor for s in streams], [s.first * 1e3 for s in streams]
            rate = count * statistics.median(s.speech / s.last for s in streams)
            cells = [f"{statistics.median(factors):.3f}", f"{max(factors):.3f}"]
            cells += [
                f"{quantile(firsts, 0.5):.0f}",
                f"{quantile(firsts, 0.95):.0f}",
                f"{rate:.1f}",
            ]
            rows.append([name, "", str(count), *cells])
    return "Each stream says one sentence, all begin at once:\n\n" + table(header, rows)


def tts_targets(findings: TtsFindings) -> list[Target]:
    """Return the targets of pocket-tts."""
    judged = []
    for name, found in findings.spoken.items():
        if not name.startswith(POCKET):
            continue
        for count, limit in ((1, 0.25), (4, 0.8)):
            if count in found:
                factor = statistics.median(stream.factor for stream in found[count])
                judged.append(
                    Target(
                        f"{name}: real-time factor, {count} streams", factor, limit, "of real time"
                    )
                )
        if 1 in found:
            first = quantile((stream.first * 1e3 for stream in found[1]), 0.5)
            judged.append(Target(f"{name}: first audio p50, alone", first, 150, "ms"))
    return judged
