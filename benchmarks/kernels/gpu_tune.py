"""Choose the fastest configuration of each Triton kernel on this GPU, for all later starts.

python benchmarks/run.py gpu_tune [--only MODULE …] [--budget 130]       (make extended PART=gpu)

The cases are those of `gpu_kernels.py`. What has a choice already is left as it is, so that a run that
was broken off goes on behind it; choices are kept in `tuned` under `MOTET_CACHE`. Without a GPU,
`--quick` runs tiny tensors in Triton's interpreter, writes to `--folder` only, and chooses nothing
of value. Needs only torch and Triton.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.kernels.gpu_cases import CASES_BY_MODULE, QUICK, Sizes
from benchmarks.support.measures import table
from motet_kernels import gpu
from motet_kernels.gpu.tuning import Choices, Timed, choices_path, fastest, tuning

REPEATS = 30  # milliseconds of runs of one configuration


def seconds_of(run: Callable[[], None]) -> float:
    """Return the median seconds of a run; in the interpreter, those of one."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    from triton.testing import do_bench

    milliseconds: float = do_bench(run, warmup=10, rep=REPEATS, return_mode="median")
    return milliseconds / 1e3


def rows(timed: Sequence[Timed]) -> list[list[str]]:
    """Return a row per call: the chosen configuration, and how much faster it is than what ships."""
    found = []
    for call in dict.fromkeys(run.call for run in timed):
        runs = [run for run in timed if run.call == call]
        chosen = fastest(runs)
        shipped = next(iter(runs[0].seconds))
        gains = " ".join(f"{run.seconds[shipped] / run.seconds[chosen]:.2f}" for run in runs)
        found.append([call, chosen, gains])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modules = list(CASES_BY_MODULE)
    parser.add_argument(
        "--only", nargs="+", choices=modules, default=modules, help="modules (default: all)"
    )
    parser.add_argument(
        "--budget", type=float, default=130.0, help="seconds after which no call is timed"
    )
    parser.add_argument("--quick", action="store_true", help="tiny tensors; a smoke test")
    parser.add_argument("--folder", type=Path, help="where choices are kept (tuned in MOTET_CACHE)")
    args = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not (args.quick and args.folder):
        parser.error("no GPU here; --quick with --folder shows that the script works")
    gpu.select("on" if has_gpu else "interpret")
    device = torch.device("cuda" if has_gpu else "cpu")
    path = choices_path(device, args.folder) if has_gpu else args.folder / "interpreter.json"
    choices, end = Choices.read(path), time.monotonic() + args.budget
    known, sizes = len(choices.names), QUICK if args.quick else Sizes()
    timed: list[Timed] = []
    for module in args.only:
        with tuning(choices, seconds_of, lambda: time.monotonic() > end) as found:
            for case in CASES_BY_MODULE[module](sizes, device):
                case.ours()
        timed += found
        choices.write()
    print(f"{path}: {known} choices before, {len(choices.names)} now\n")
    print(table(["call", "chosen", "times faster than what ships, by case"], rows(timed)))


if __name__ == "__main__":
    main()
