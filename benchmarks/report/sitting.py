"""Measure the headline targets of one machine in one sitting, and keep them.

`python benchmarks/run.py sitting --help`. Each benchmark of `BENCHMARKS` runs as a process of its own,
one after the other, and its targets replace the kept ones as `summary --take` does; a benchmark that
fails is reported, and the others go on. Tables and JSON files go to `--folder`, for the pages of the
benchmarks. It takes about an hour on two cores; nothing else may run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report.runs import measured
from benchmarks.report.summary import page, take, write_page
from benchmarks.support.document import conditions, load_line
from benchmarks.support.paths import RESULTS_FOLDER

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "llm": ("--rounds", "1"),
    "images": (),
    "voice": ("--rounds", "1"),
    "serving": (),
    "starts": ("--rounds", "3"),
    "codes": ("--threads", "1", "--cpu-time", "--steps", "32"),
    "plumbing": ("--no-peer",),
    "omni": (),
}
TIMEOUT = 3600.0  # seconds for one benchmark
FOLDER = RESULTS_FOLDER / "sitting"


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sitting", description="Measure all headline targets in one sitting, and keep them."
    )
    known = ", ".join(BENCHMARKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known} (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"(default: {FOLDER})")
    args = parser.parse_args(None if argv is None else list(argv))
    if unknown := sorted(set(args.names) - set(BENCHMARKS)):
        parser.error(f"NAME {unknown[0]!r} is not one of {known}")
    args.folder.mkdir(parents=True, exist_ok=True)
    before, taken, failed = conditions(), [], []
    for name in args.names or BENCHMARKS:
        start = time.monotonic()
        print(f"{name} …", end=" ", flush=True)
        try:
            taken.append(measured(name, BENCHMARKS[name], args.folder, timeout=TIMEOUT))
            take(args.folder / f"{name}.json")
            print(f"{time.monotonic() - start:.0f} s", flush=True)
        except (RuntimeError, ValueError) as error:
            failed.append(name)
            print(f"failed: {error}", flush=True)
    write_page()
    print(f"\n{load_line(before)}; {before['processor']}\n\n{page(taken)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
