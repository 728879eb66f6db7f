"""Our vision towers beside transformers' own: the same weights, pictures and threads."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from images_checkpoint import tower_checkpoint
from llm_figures import ratio
from measures import Target, median_interval, table
from workers import Worker

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
    """sizes: width and height of the pictures that are there at a time. forms: of packed weights, beside the exact."""

    shapes: tuple[str, ...] = ("siglip-base", "qwen2.5-vl")
    sizes: tuple[tuple[int, int], ...] = _SIZES
    forms: tuple[str, ...] = ("int8",)
    rounds: int = 6


@dataclass
class Seen:
    """One tower. By encoder: seconds for all pictures by round, and the largest relative distance to transformers."""

    shape: str
    seconds: dict[str, list[float]]
    apart: dict[str, float]
    patches: list[int]
    prepare: float

    def rates(self, name: str) -> list[float]:
        """Pictures per second."""
        return [len(self.patches) / taken for taken in self.seconds[name]]

    @property
    def theirs(self) -> list[str]:
        return [name for name in self.seconds if not name.startswith("motet")]

    @property
    def ours(self) -> list[str]:
        return [name for name in self.seconds if name.startswith("motet")]


@dataclass
class EncoderFindings:
    towers: list[Seen] = field(default_factory=list)


def run_encoder(plan: EncoderPlan, cache: Path, threads: int, dtype: str) -> EncoderFindings:
    findings = EncoderFindings()
    for shape in plan.shapes:
        print(f"  {shape} ...", flush=True)
        task = {
            "folder": str(tower_checkpoint(shape, cache)), "sizes": plan.sizes, "rounds": plan.rounds,
            "dtype": dtype, "forms": plan.forms,
        }  # fmt: skip
        found = Worker(name=shape, script="images_encoder_worker.py").run(
            [json.dumps(task)], threads=threads
        )
        findings.towers.append(
            Seen(shape, found["seconds"], found["apart"], found["patches"], found["prepare"])
        )
    return findings


def encoder_report(findings: EncoderFindings) -> str:
    rows = [_row(tower, name) for tower in findings.towers for name in tower.seconds]
    header = [
        "tower",
        "encoder",
        "pictures/s",
        "of transformers one by one",
        "interval",
        "relative distance",
    ]
    notes = [
        f"{tower.shape}: {len(tower.patches)} pictures of {min(tower.patches)} to {max(tower.patches)} patches; "
        f"preparing them all took {tower.prepare * 1e3:.0f} ms on one thread."
        for tower in findings.towers
    ]
    return "\n\n".join([table(header, rows), "\n".join(notes)])


def _row(tower: Seen, name: str) -> list[str]:
    rates, base = tower.rates(name), tower.rates(tower.theirs[0])
    low, high = median_interval([a / b for a, b in zip(rates, base, strict=True)])
    cells = [
        f"{statistics.median(rates):.2f}",
        f"{ratio(rates, base):.2f}",
        f"{low:.2f}–{high:.2f}",
    ]
    return [tower.shape, name, *cells, f"{tower.apart[name]:.1e}"]


def encoder_targets(findings: EncoderFindings) -> list[Target]:
    """Each of ours against transformers one by one: whoever serves alone takes pictures as they come."""
    return [
        Target(
            f"{tower.shape}: {ours} / {tower.theirs[0]}",
            _gain(tower, ours),
            LEAST,
            "times",
            most=False,
        )
        for tower in findings.towers
        for ours in tower.ours
    ]


def _gain(tower: Seen, ours: str) -> float:
    theirs: Sequence[float] = tower.rates(tower.theirs[0])
    return ratio(tower.rates(ours), theirs)
