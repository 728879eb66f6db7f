"""Measure the Triton kernels on this GPU against the limits of its memory and matrix units.

python benchmarks/run.py gpu_kernels [--only MODULE …] [--seconds 0.2]       (make extended PART=gpu)

A kernel's floor is the longer of its bytes at the measured rate of a copy and its operations at the
measured rate of a matrix product. Times are medians; the second-level cache is flushed between two
runs. Without a GPU, `--quick` runs tiny tensors in Triton's interpreter, as a check that measures
nothing. Needs only torch and Triton.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.kernels.gpu_cases import CASES_BY_MODULE, QUICK, Case, Sizes
from benchmarks.support.document import conditions, write
from benchmarks.support.measures import table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_kernels import gpu

RESULTS = RESULTS_FOLDER
COPY_BYTES = 1 << 30
MATRIX = 8192


@dataclass(frozen=True)
class Machine:
    """Hold the measured limits of the GPU.

    bandwidth: bytes/s of a copy. rate: operations/s of a bfloat16 matrix product.
    """

    name: str
    bandwidth: float
    rate: float


@dataclass
class Findings:
    """Hold milliseconds by case (ours, then those of each peer), and the floor of each case."""

    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)


def median(run: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a run."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    from triton.testing import do_bench

    milliseconds: float = do_bench(run, rep=int(seconds * 1e3), return_mode="median")
    return milliseconds / 1e3


def measure_machine(device: torch.device, seconds: float, *, quick: bool) -> Machine:
    """Measure the bandwidth and the rate of matrix products of the device."""
    size, width = (1 << 12, 16) if quick else (COPY_BYTES, MATRIX)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, square = torch.empty_like(source), torch.randn(width, width, device=device).bfloat16()
    copied = median(lambda: target.copy_(source), seconds)
    multiplied = median(lambda: square @ square, seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return Machine(name, 2 * size / copied, 2 * width**3 / multiplied)


def floor(case: Case, machine: Machine) -> float:
    """Return the least seconds that a case can take on the machine."""
    return max(case.nbytes / machine.bandwidth, case.operations / machine.rate)


def measure(
    module: str, case: Case, machine: Machine, seconds: float, findings: Findings
) -> list[str]:
    """Measure a case; return a row of the table.

    Columns: ours in µs, its share of the floor, and each peer's time over ours.
    """
    ours, least = median(case.ours, seconds), floor(case, machine)
    peers = {name: median(run, seconds) for name, run in case.peers.items()}
    name = f"{module}: {case.name}"
    findings.milliseconds[name] = {
        "ours": ours * 1e3,
        **{peer: spent * 1e3 for peer, spent in peers.items()},
    }
    findings.floors[name] = least * 1e3
    beside = ", ".join(f"{peer} {spent / ours:.2f}" for peer, spent in peers.items())
    return [module, case.name, f"{ours * 1e6:.1f}", f"{least / ours:.0%}", beside]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(CASES_BY_MODULE),
        default=list(CASES_BY_MODULE),
        help="modules to measure (default: all)",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="seconds per measurement (default: 0.2)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny tensors; a smoke test")
    parser.add_argument(
        "--output", type=Path, help="JSON file for the numbers (results/gpu_kernels-<GPU>.json)"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() and not args.quick:
        parser.error("no GPU here; --quick shows that the script works")
    gpu.select("on" if torch.cuda.is_available() else "interpret")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before, findings = conditions(), Findings()
    machine = measure_machine(device, args.seconds, quick=args.quick)
    sizes = QUICK if args.quick else Sizes()
    rows = [
        measure(module, case, machine, args.seconds, findings)
        for module in args.only
        for case in CASES_BY_MODULE[module](sizes, device)
    ]
    print(
        f"{machine.name}: copies {machine.bandwidth / 1e9:,.0f} GB/s, multiplies {machine.rate / 1e12:,.0f} TFLOP/s\n"
    )
    print(table(["kernel", "case", "µs", "of the floor", "peers, times longer"], rows))
    output = args.output or RESULTS / f"gpu_kernels-{machine.name.replace(' ', '-')}.json"
    write(output, before, {"machine": machine, "sizes": sizes}, findings)


if __name__ == "__main__":
    main()
