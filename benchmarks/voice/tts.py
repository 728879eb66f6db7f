"""Measure our speech engine: real-time factor and time to first audio, for several streams at once.

Beside it sherpa-onnx says the first sentence with the same VITS, which is exported for it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.figures import ratio
from benchmarks.support.measures import Target, table
from benchmarks.support.paths import MODELS
from benchmarks.support.workers import Worker, has_modules
from benchmarks.voice.checkpoint import pocket_checkpoint, vits_checkpoint
from benchmarks.voice.sentences import SENTENCES
from motet_shared.quantiles import quantile

POCKET = "pocket-tts"
SHERPA = "sherpa-onnx"
SHERPA_PYTHON = "MOTET_SHERPA_PYTHON"


@dataclass(frozen=True, kw_only=True)
class TtsPlan:
    """Define the loads.

    frames: frames of a sentence of random weights, which have no end (25 a second). vits: a size of
    `VITS_SIZES`. vits_repeats: repeats of VITS, whose sentences take seconds; 0: left out.
    """

    streams: tuple[int, ...] = (1, 4, 8)
    frames: int = 100
    repeats: int = 5
    rounds: int = 3
    vits: str = "MMS's size"
    vits_repeats: int = 3

    @property
    def vits_name(self) -> str:
        """Return the name of our VITS in the tables."""
        return f"VITS of {self.vits}, random weights"


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
    """Hold the streams by model and number of streams at a time.

    missing: by name of a peer, why it was not measured.
    """

    spoken: dict[str, dict[int, list[Stream]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def run_tts(plan: TtsPlan, cache: Path, threads: int) -> TtsFindings:
    trained = MODELS / POCKET
    real = (trained / "model.safetensors").is_file()
    pocket = POCKET if real else f"{POCKET}, random weights"
    models = {pocket: (trained if real else pocket_checkpoint(cache), not real, plan.repeats)}
    vits = vits_checkpoint(cache, plan.vits)
    if plan.vits_repeats:
        models[plan.vits_name] = (vits, False, plan.vits_repeats)
    findings = TtsFindings()
    python = os.environ.get(SHERPA_PYTHON) or sys.executable
    if plan.vits_repeats and not has_modules(python, "sherpa_onnx"):
        reason = f"sherpa-onnx is not installed for {SHERPA_PYTHON} (see benchmarks/README.md)"
        findings.missing[SHERPA] = reason
    for _ in range(plan.rounds):
        for name, (folder, endless, repeats) in models.items():
            print(f"  {name} ...", flush=True)
            task = {
                "folder": str(folder), "streams": plan.streams, "repeats": repeats,
                "frames": plan.frames if endless else 0,
            }  # fmt: skip
            worker = Worker(name=name, module="voice.tts_worker")
            _take(findings, name, worker.run([json.dumps(task)], threads=threads))
        if plan.vits_repeats and SHERPA not in findings.missing:
            print(f"  {SHERPA} ...", flush=True)
            try:
                _take(findings, SHERPA, _sherpa(python, vits, plan.vits_repeats, threads))
                _check_lengths(findings, plan)
            except RuntimeError as error:
                findings.missing[SHERPA] = str(error)
                findings.spoken.pop(SHERPA, None)
    return findings


def _sherpa(python: str, vits: Path, repeats: int, threads: int) -> dict[str, Any]:
    """Return what sherpa-onnx takes for the first sentence with an exported checkpoint."""
    from benchmarks.voice.vits_onnx import MODEL, TOKENS, vits_onnx

    folder = vits_onnx(vits, SENTENCES[0])
    task = {
        "folder": str(folder), "model": MODEL, "tokens": TOKENS, "text": SENTENCES[0],
        "repeats": repeats, "threads": threads,
    }  # fmt: skip
    worker = Worker(name=SHERPA, module="voice.sherpa_worker", python=python)
    return worker.run([json.dumps(task)], threads=threads)


def _take(findings: TtsFindings, name: str, result: dict[str, Any]) -> None:
    found = findings.spoken.setdefault(name, {})
    for row in result["streams"]:
        stream = Stream(row["first"], row["last"], row["speech"])
        found.setdefault(row["streams"], []).append(stream)


def _check_lengths(findings: TtsFindings, plan: TtsPlan) -> None:
    """Raise RuntimeError if the peer's speech is not exactly as long as ours."""
    ours, theirs = (
        findings.spoken[name][1][-1].speech if 1 in findings.spoken[name] else None
        for name in (plan.vits_name, SHERPA)
    )
    if ours is not None and theirs is not None and abs(ours - theirs) > 1e-6:
        raise RuntimeError(f"it says {theirs:g} s, and our engine {ours:g} s: not the same model")


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
    parts = ["Each stream says one sentence, all begin at once:", table(header, rows)]
    if (against := _ratio(findings)) is not None:
        name, value = against
        parts.append(f"{name} is {value:.2f} times as fast as {SHERPA}, one stream each.")
    parts += [f"* {name} is absent: {reason}" for name, reason in findings.missing.items()]
    return "\n\n".join(parts)


def _ratio(findings: TtsFindings) -> tuple[str, float] | None:
    """Return our VITS and its speed as a multiple of sherpa-onnx's, one stream each."""
    for name, found in findings.spoken.items():
        if name.startswith("VITS") and 1 in found and SHERPA in findings.spoken:
            ours, theirs = (
                [1 / stream.factor for stream in streams]
                for streams in (found[1], findings.spoken[SHERPA][1])
            )
            return name, ratio(ours, theirs)
    return None


def tts_targets(findings: TtsFindings) -> list[Target]:
    """Return the targets of pocket-tts and VITS."""
    judged = []
    if (against := _ratio(findings)) is not None:
        judged.append(Target(f"motet / {SHERPA}, 1 stream", against[1], 1.25, "times", most=False))
    for name, found in findings.spoken.items():
        if name.startswith("VITS") and 1 in found:
            factor = statistics.median(stream.factor for stream in found[1])
            what = f"{name}: real-time factor, 1 stream"
            judged.append(Target(what, factor, 0.25, "of real time"))
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
