"""The Triton kernels on this GPU: how far from what its memory and its matrix units allow, and beside what torch has.

    python benchmarks/gpu_kernels.py [--only NOUN …] [--seconds 0.2]       (make extended PART=gpu)

A kernel's floor is the longer of its bytes at the measured rate of a copy and its operations at the measured rate of a
matrix product. Times are medians; between two runs the second-level cache is flushed. Where there is no GPU, `--quick`
runs the same on tiny tensors in Triton's interpreter, to see that it works; it measures nothing.

Needs torch and Triton only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from document import conditions, write
from gpu_cases import NOUNS, QUICK, Case, Sizes
from measures import table
from motet_kernels import gpu

RESULTS = Path(__file__).resolve().parent / "results"
COPY_BYTES = 1 << 30
MATRIX = 8192


@dataclass(frozen=True)
class Machine:
    """The GPU at its best, as measured. bandwidth: bytes/s of a copy; rate: operations/s of a bfloat16 product."""

    name: str
    bandwidth: float
    rate: float


@dataclass
class Findings:
    """milliseconds by case, ours first, then those of each peer; and the floor of each."""

    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)


def median(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the median run."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    from triton.testing import do_bench

    milliseconds: float = do_bench(run, rep=int(seconds * 1e3), return_mode="median")
    return milliseconds / 1e3


def measure_machine(device: torch.device, seconds: float, *, quick: bool) -> Machine:
    """The rates against which everything is held."""
    size, width = (1 << 12, 16) if quick else (COPY_BYTES, MATRIX)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, square = torch.empty_like(source), torch.randn(width, width, device=device).bfloat16()
    copied = median(lambda: target.copy_(source), seconds)
    multiplied = median(lambda: square @ square, seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return Machine(name, 2 * size / copied, 2 * width**3 / multiplied)


def floor(case: Case, machine: Machine) -> float:
    """Seconds that the case takes at the machine's best."""
    return max(case.nbytes / machine.bandwidth, case.operations / machine.rate)


def measure(
    noun: str, case: Case, machine: Machine, seconds: float, findings: Findings
) -> list[str]:
    """A row of the table: ours in µs, its share of the floor, and how many times longer each peer takes."""
    ours, least = median(case.ours, seconds), floor(case, machine)
    peers = {name: median(run, seconds) for name, run in case.peers.items()}
    name = f"{noun}: {case.name}"
    findings.milliseconds[name] = {
        "ours": ours * 1e3,
        **{peer: spent * 1e3 for peer, spent in peers.items()},
    }
    findings.floors[name] = least * 1e3
    beside = ", ".join(f"{peer} {spent / ours:.2f}" for peer, spent in peers.items())
    return [noun, case.name, f"{ours * 1e6:.1f}", f"{least / ours:.0%}", beside]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(NOUNS), default=list(NOUNS), help="which kernels (all)"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="that each is measured (0.2)")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, to see that it works")
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
        measure(noun, case, machine, args.seconds, findings)
        for noun in args.only
        for case in NOUNS[noun](sizes, device)
    ]
    print(
        f"{machine.name}: copies {machine.bandwidth / 1e9:,.0f} GB/s, multiplies {machine.rate / 1e12:,.0f} TFLOP/s\n"
    )
    print(table(["kernel", "case", "µs", "of the floor", "peers, times longer"], rows))
    output = args.output or RESULTS / f"gpu_kernels-{machine.name.replace(' ', '-')}.json"
    write(output, before, {"machine": machine, "sizes": sizes}, findings)


if __name__ == "__main__":
    main()
