"""Measure throughput, latency and previews of step batches beside diffusers, serial and batched."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.images.checkpoint import PIPELINES, describe, diffusion_checkpoint
from benchmarks.support.measures import Target, median_interval, table
from benchmarks.support.workers import Worker

OURS, SERIAL, FULL = "motet", "one after the other", "full batches"
# (cells of a latent's side, in flight): times one after the other, at least.
GAINS = {(32, 4): 1.1, (16, 8): 1.6}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Define a size.

    side: cells of a latent's side. inflight: pictures at a time. pairs: single pictures, ours and
    diffusers'.
    """

    side: int
    inflight: tuple[int, ...]
    pairs: int = 24


@dataclass(frozen=True, kw_only=True)
class DiffusionPlan:
    """Define the loads.

    steps: denoising steps of a picture. share: share of the measured capacity at which random
    arrivals (`seed`) are generated. Each load has `rounds` times as many pictures as are in flight,
    at least `least`.
    """

    shape: str = "unet-54m"
    sizes: tuple[Sizes, ...] = (
        Sizes(side=16, inflight=(1, 4, 8)),
        Sizes(side=32, inflight=(4,), pairs=20),
    )
    steps: int = 10
    share: float = 0.8
    rounds: int = 4
    least: int = 10
    seed: int = 0


@dataclass
class Served:
    """Hold the results of a server; times in seconds.

    throughput: pictures/s over all the time. busy_throughput: pictures/s while there was one to
    draw.
    """

    throughput: float
    busy_throughput: float
    latency: float
    worst: float
    preview: float


@dataclass
class Load:
    side: int
    inflight: int
    capacity: float
    arrivals: list[float]
    served: dict[str, Served]

    @property
    def gain(self) -> float:
        """Return our busy throughput over that of serial drawing."""
        return self.served[OURS].busy_throughput / self.served[SERIAL].busy_throughput


@dataclass
class Pairs:
    """Hold seconds of single pictures in turn, and the share of ours before the first preview."""

    side: int
    ours: list[float]
    theirs: list[float]
    preview: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


@dataclass
class DiffusionFindings:
    model: str = ""
    pairs: list[Pairs] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


def run_diffusion(plan: DiffusionPlan, cache: Path, threads: int) -> DiffusionFindings:
    folder = diffusion_checkpoint(plan.shape, cache)
    findings = DiffusionFindings(describe(folder))
    scale = 2 ** (len(PIPELINES[plan.shape]["vae"]) - 1)
    for sizes in plan.sizes:
        print(f"  {sizes.side}² latents ...", flush=True)
        task = {
            "folder": str(folder), "side": sizes.side, "scale": scale, "inflight": sizes.inflight, "threads": threads,
            "pairs": sizes.pairs, "steps": plan.steps, "share": plan.share, "rounds": plan.rounds, "least": plan.least,
            "seed": plan.seed,
        }  # fmt: skip
        worker = Worker(name=f"{plan.shape}, {sizes.side}²", module="images.diffusion_worker")
        found = worker.run([json.dumps(task)], threads=threads)
        if sizes.pairs:
            findings.pairs.append(Pairs(sizes.side, **found["pairs"]))
        for load in found["loads"]:
            served = {name: Served(**figures) for name, figures in load["served"].items()}
            findings.loads.append(
                Load(sizes.side, load["inflight"], load["capacity"], load["arrivals"], served)
            )
    return findings


# ------------------------------------------------------------------------------------------------------------- telling
def diffusion_report(findings: DiffusionFindings, plan: DiffusionPlan) -> str:
    return "\n\n".join(
        [
            f"{findings.model}; {plan.steps} steps, no guidance: a picture is one row.",
            f"Pictures at random, at {plan.share:.0%} of what ours can do with so many in flight:",
            _loads_table(findings),
            "One picture at a time, ours and diffusers' own loop in turn:",
            _pairs_table(findings),
        ]
    )


def _loads_table(findings: DiffusionFindings) -> str:
    header = [
        "latent", "server", "in flight", "pictures/min", "while there is work", "median latency s", "worst s",
        "first preview",
    ]  # fmt: skip
    rows = []
    for load in findings.loads:
        whole = f"{load.side}², ours can do {load.capacity * 60:,.1f}/min"
        for name, one in load.served.items():
            rates = [f"{one.throughput * 60:,.1f}", f"{one.busy_throughput * 60:,.1f}"]
            previewed = f"{one.preview:.0%}" if name == OURS else ""
            rows.append(
                [
                    whole,
                    name,
                    str(load.inflight),
                    *rates,
                    f"{one.latency:.2f}",
                    f"{one.worst:.2f}",
                    previewed,
                ]
            )
    return table(header, rows)


def _pairs_table(findings: DiffusionFindings) -> str:
    rows = []
    for pairs in findings.pairs:
        low, high = median_interval(pairs.ratios)
        seconds = [f"{statistics.median(times):.3f}" for times in (pairs.ours, pairs.theirs)]
        times = [*seconds, f"{statistics.median(pairs.ratios):.3f}", f"{low:.3f}–{high:.3f}"]
        rows.append(
            [
                f"{pairs.side}²",
                f"{len(pairs.ratios)} pairs",
                *times,
                f"{statistics.median(pairs.preview):.0%}",
            ]
        )
    return table(
        ["latent", "", "ours s", "diffusers s", "ours / diffusers", "interval", "first preview"],
        rows,
    )


def diffusion_targets(findings: DiffusionFindings) -> list[Target]:
    """Return the targets; a limit near 1 is missed only if the whole interval lies beyond it."""
    judged = []
    for pairs in findings.pairs:
        low, _ = median_interval(pairs.ratios)
        judged.append(
            Target(
                f"one picture, {pairs.side}²: ours / diffusers, low end of interval",
                low,
                1.03,
                "times",
            )
        )
        previewed = statistics.median(pairs.preview)
        judged.append(
            Target(f"one picture, {pairs.side}²: first preview", previewed, 0.25, "of the whole")
        )
    for load in findings.loads:
        what = f"{load.inflight} in flight, {load.side}²"
        if (least := GAINS.get((load.side, load.inflight))) is not None:
            judged.append(
                Target(
                    f"{what}: motet / one after the other", load.gain, least, "times", most=False
                )
            )
        if FULL in load.served:
            latency = load.served[OURS].latency / load.served[FULL].latency
            judged.append(
                Target(f"{what}: median latency, motet / full batches", latency, 0.7, "times")
            )
    return judged
