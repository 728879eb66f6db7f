"""Compare our vision encoders with transformers': the same weights, pictures and threads."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine.figures import ratio
from benchmarks.images.checkpoint import vision_checkpoint
from benchmarks.support.measures import Target, median_interval, table
from benchmarks.support.workers import Worker

LEAST = 1.5  # times transformers alone
_SIZES = (
    (448, 336),
    (336, 448),
    (392, 392),
    (448, 448),
    (280, 504),
    (504, 280),
    (364, 308),
    (420, 336),
)


@dataclass(frozen=True, kw_only=True)
class EncoderPlan:
    """Define the pictures and formats.

    sizes: width and height of the pictures of a batch. forms: formats of packed weights, in
    addition to the exact one.
    """

    shapes: tuple[str, ...] = ("siglip-base", "qwen2.5-vl")
    sizes: tuple[tuple[int, int], ...] = _SIZES
    forms: tuple[str, ...] = ("int8",)
    rounds: int = 6


@dataclass
class EncoderResult:
    """Hold the results of one vision encoder.

    seconds: for all pictures, by implementation and round. apart: largest relative distance to
    transformers, by implementation.
    """

    shape: str
    seconds: dict[str, list[float]]
    apart: dict[str, float]
    patches: list[int]
    prepare: float

    def rates(self, name: str) -> list[float]:
        """Return pictures per second by round."""
        return [len(self.patches) / taken for taken in self.seconds[name]]

    @property
    def theirs(self) -> list[str]:
        return [name for name in self.seconds if not name.startswith("motet")]

    @property
    def ours(self) -> list[str]:
        return [name for name in self.seconds if name.startswith("motet")]


@dataclass
class EncoderFindings:
    encoders: list[EncoderResult] = field(default_factory=list)


def run_encoder(plan: EncoderPlan, cache: Path, threads: int, dtype: str) -> EncoderFindings:
    findings = EncoderFindings()
    for shape in plan.shapes:
        print(f"  {shape} ...", flush=True)
        task = {
            "folder": str(vision_checkpoint(shape, cache)), "sizes": plan.sizes, "rounds": plan.rounds,
            "dtype": dtype, "forms": plan.forms,
        }  # fmt: skip
        found = Worker(name=shape, module="images.encoder_worker").run(
            [json.dumps(task)], threads=threads
        )
        findings.encoders.append(
            EncoderResult(
                shape, found["seconds"], found["apart"], found["patches"], found["prepare"]
            )
        )
    return findings


def encoder_report(findings: EncoderFindings) -> str:
    rows = [_row(encoder, name) for encoder in findings.encoders for name in encoder.seconds]
    header = [
        "tower",
        "encoder",
        "pictures/s",
        "of transformers one by one",
        "interval",
        "relative distance",
    ]
    notes = [
        f"{encoder.shape}: {len(encoder.patches)} pictures of {min(encoder.patches)} to {max(encoder.patches)}"
        f" patches; preparing them all took {encoder.prepare * 1e3:.0f} ms on one thread."
        for encoder in findings.encoders
    ]
    return "\n\n".join([table(header, rows), "\n".join(notes)])


def _row(encoder: EncoderResult, name: str) -> list[str]:
    rates, base = encoder.rates(name), encoder.rates(encoder.theirs[0])
    low, high = median_interval([a / b for a, b in zip(rates, base, strict=True)])
    cells = [
        f"{statistics.median(rates):.2f}",
        f"{ratio(rates, base):.2f}",
        f"{low:.2f}–{high:.2f}",
    ]
    return [encoder.shape, name, *cells, f"{encoder.apart[name]:.1e}"]


def encoder_targets(findings: EncoderFindings) -> list[Target]:
    """Return the targets: each of ours against transformers one by one."""
    return [
        Target(
            f"{encoder.shape}: {ours} / {encoder.theirs[0]}",
            _gain(encoder, ours),
            LEAST,
            "times",
            most=False,
        )
        for encoder in findings.encoders
        for ours in encoder.ours
    ]


def _gain(encoder: EncoderResult, ours: str) -> float:
    theirs: Sequence[float] = encoder.rates(encoder.theirs[0])
    return ratio(encoder.rates(ours), theirs)
