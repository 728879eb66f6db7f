"""Compile the kernels for GPUs that are not present, and report the resources that they take.

    python -m motet_kernels.gpu.compile [--only MODULE …] [--targets sm_90 …] [--all | --first]
                                        [--table kernels/RESULTS.md]

The launchers are called with the `samples` of their modules, so that the compiled code is what
would run there, down to Triton's specialization on the arguments. Compiled code is cached by its
source's hash in `triton` under `MOTET_CACHE`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from motet_kernels.gpu.resources import Resources, read_resources
from motet_kernels.runtime.build import cache_root

os.environ.setdefault("TRITON_CACHE_DIR", str(cache_root() / "triton"))

import triton
from triton.backends.compiler import GPUTarget

from motet_kernels.gpu.launch import Launch, LaunchSample, compiling

BEGIN, END = "<!-- resources: written by motet_kernels.gpu.compile -->", "<!-- end of resources -->"


@dataclass(frozen=True)
class Target:
    """Describe a kind of GPU to compile for.

    shared: the maximum shared memory of a program, in bytes.
    spills: whether kernels may spill registers.
    """

    gpu: GPUTarget
    shared: int
    spills: bool = False


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 << 10),
    "gfx942": Target(
        GPUTarget("hip", "gfx942", 64), 64 << 10, spills=True
    ),  # configurations are chosen for the NVIDIA targets
}


@dataclass(frozen=True)
class Compiled:
    """Hold one kernel, as a sample calls it, in one configuration, for one target.

    lacks_mma: the sample requires matrix units of at least one kernel that it launches, and none of
        them uses any.
    """

    kernel: str
    sample: LaunchSample
    config: str
    target: str
    resources: Resources
    lacks_mma: bool = False

    def faults(self) -> list[str]:
        """Return the reasons not to ship it."""
        found, target = self.resources, TARGETS[self.target]
        possible = (
            (found.spills and not target.spills, f"spills {found.spills} registers"),
            (found.stack and not target.spills, f"has a stack of {found.stack} bytes"),
            (
                found.shared > target.shared,
                f"takes {found.shared} bytes of shared memory of {target.shared}",
            ),
            (self.lacks_mma, "uses no matrix unit, nor do the kernels launched with it"),
        )
        return [fault for holds, fault in possible if holds]

    def __str__(self) -> str:
        return f"{self.kernel}, {self.sample.label}, {self.config}, {self.target}"


class AbsentGpuDriver:
    """Replace Triton's driver for a GPU that is not present."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        """Return the key under which Triton keeps compiled kernels."""
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, _device: str) -> int:
        return 0


def kernel_modules() -> dict[str, str]:
    """Return the dotted names of this package's modules that have samples, by their last part."""
    package = Path(__file__).parent
    return {
        path.stem: ".".join([str(__package__), *path.relative_to(package).with_suffix("").parts])
        for path in sorted(package.rglob("*.py"), key=lambda path: path.stem)
        if "\ndef samples(" in path.read_text()
    }


def compiled(
    module: str, target: str, *, every: bool = False, first: bool = False
) -> Iterator[Compiled]:
    """Compile the samples of a dotted module.

    every: compile all configurations, not only those that ship.
    first: leave out samples whose kernels previous samples have launched.
    """
    triton.runtime.driver.set_active(AbsentGpuDriver(TARGETS[target].gpu))
    launches: list[Launch] = []
    mask: set[str] = set()
    for sample in import_module(module).samples():
        with compiling(partial(_collect, launches, every)):
            sample.call()
        names = {launch.kernel.name for launch in launches}
        if first and names <= mask:
            launches.clear()
            continue
        mask |= names
        found = [(launch, read_resources(_compile(launch))) for launch in launches]
        lacks = sample.mma and not any(resources.mma for _, resources in found)
        for launch, resources in found:
            yield Compiled(launch.kernel.name, sample, str(launch.config), target, resources, lacks)
        launches.clear()


def _collect(launches: list[Launch], every: bool, found: Sequence[Launch]) -> None:
    launches += found if every else found[:1]


def _compile(launch: Launch) -> Any:
    config = launch.config
    options = {"num_warps": config.warps, "num_stages": config.stages, **launch.constants}
    return launch.kernel.function.warmup(*launch.args, grid=(1,), **options)


# ---------------------------------------------------------------------------------------------------------------- table
def table(results: Sequence[Compiled]) -> list[str]:
    """Return Markdown lines: a row per kernel and sample, with the resources for each target.

    These are registers, kilobytes of shared memory, matrix instruction and spills.
    """
    targets = list(dict.fromkeys(result.target for result in results))
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for result in results:
        found = result.resources
        spilled = f", spills {found.spills}" if found.spills else ""
        cell = f"{found.registers}, {found.shared / 1024:.3g}{f', {found.mma}' if found.mma else ''}{spilled}"
        rows.setdefault((result.kernel, result.sample.label, result.config), {})[result.target] = (
            cell
        )
    lines = [
        f"| kernel | call | configuration | {' | '.join(targets)} |",
        f"|{'---|' * (3 + len(targets))}",
    ]
    for (kernel, label, config), by_target in rows.items():
        cells = " | ".join(by_target.get(target, "") for target in targets)
        lines.append(f"| `{kernel}` | {label} | {config} | {cells} |")
    return lines


def write_table(path: Path, results: Sequence[Compiled]) -> None:
    """Write the table between the markers of a document."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join([BEGIN, *table(results), END])
    path.write_text(f"{before}{lines}{after}", encoding="utf-8")


def undocumented(path: Path, results: Sequence[Compiled]) -> list[str]:
    """Return the rows of the table that a document lacks."""
    known = set(path.read_text(encoding="utf-8").splitlines())
    return [line for line in table(results) if line not in known]


def main(argv: Sequence[str] | None = None) -> None:
    modules = kernel_modules()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(modules),
        default=list(modules),
        help="modules whose kernels are compiled (default: all)",
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=list(TARGETS),
        default=list(TARGETS),
        help="GPUs to compile for (default: all)",
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--all", action="store_true", help="every configuration, not only those that ship"
    )
    extent.add_argument(
        "--first", action="store_true", help="only the first call of each kernel, not all samples"
    )
    parser.add_argument(
        "--table", type=Path, help="write the table of resources into this document"
    )
    parser.add_argument(
        "--documented", type=Path, help="fail unless this document has the table's rows"
    )
    args = parser.parse_args(argv)
    results = []
    for name in args.only:
        for target in args.targets:
            for result in compiled(modules[name], target, every=args.all, first=args.first):
                results.append(result)
                print(
                    f"{result}: {result.resources}",
                    *(f"  FAULT: {fault}" for fault in result.faults()),
                    sep="\n",
                )
    if args.table:
        write_table(args.table, results)
    if any(result.faults() for result in results):
        sys.exit("some kernels cannot ship")
    if args.documented and (missing := undocumented(args.documented, results)):
        sys.exit(
            "\n".join([f"{args.documented} lacks these rows; write it with --table:", *missing])
        )


if __name__ == "__main__":
    main()
