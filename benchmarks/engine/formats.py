"""Measure formats of weights and KV cache: speed and memory (random weights), and quality.

`python benchmarks/run.py formats --help`. Formats are measured step by step in turn with the exact one;
quality is that of pocket-chat. The table goes to standard output, the numbers to
`results/formats.json`. docs/techniques.md describes the formats.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoint import CHECKPOINT, add_checkpoint
from benchmarks.engine.gguf_checkpoint import convert
from benchmarks.engine.replay import IN_TURN, Job, Replay, blocks_for, rate, run_in_turn
from benchmarks.serving.bench import QUICK, Bench, Plan
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import median_interval, table
from benchmarks.support.paths import MODELS, RESULTS_FOLDER
from motet_llm.engine.engine import Engine
from motet_models.capacity import format_bytes

RESULTS = RESULTS_FOLDER / "formats.json"
POCKET = MODELS / "pocket-chat"
EXACT: dict[str, Any] = {"weights": "float32", "kv_dtype": "float32"}


@dataclass(frozen=True)
class Format:
    """Define a format.

    settings: settings of the engine, otherwise those of EXACT. gguf: type of a GGUF file that is
    made of the random checkpoint; empty: none.
    """

    name: str
    settings: dict[str, Any]
    gguf: str = ""


FORMATS = (
    Format("exact", {}),
    *(
        Format(f"weights {name}", {"weights": name})
        for name in ("bfloat16", "int8", "int4", "float8")
    ),
    *(Format(f"GGUF {name}", {"weights": "auto"}, name) for name in ("Q8_0", "Q4_0")),
    *(Format(f"KV {name}", {"kv_dtype": name}) for name in ("bfloat16", "int8", "float8_e4m3fn")),
    Format("weights int8, KV int8", {"weights": "int8", "kv_dtype": "int8"}),
)


@dataclass
class Found:
    """Hold the results of a format: tokens per second by run, bytes, quality.

    exact: tokens per second of the exact format in the same pairs.
    """

    name: str
    rates: list[float]
    exact: list[float]
    weight_bytes: float
    kv_bytes: float
    quality: dict[str, Any] | None = None

    def cells(self) -> list[str]:
        gains = [ours / theirs for ours, theirs in zip(self.rates, self.exact, strict=True)]
        low, high = median_interval(gains)
        quality = self.quality or {}
        return [
            self.name,
            f"{statistics.median(self.rates):.0f}",
            f"{statistics.median(gains):.2f} ({low:.2f}–{high:.2f})",
            format_bytes(int(self.weight_bytes)),
            format_bytes(int(self.kv_bytes)),
            f"{quality['perplexity']:.4f}" if quality else "",
            f"{quality['accuracy']:.1%}" if quality else "",
        ]


def gguf_folder(folder: Path, kind: str) -> Path:
    """Return the checkpoint with its weights in a GGUF file, converting it on the first call."""
    made = folder.with_name(f"{folder.name}-{kind}")
    if not (made / "model.gguf").is_file():
        made.mkdir(exist_ok=True)
        for path in folder.glob("*.json"):
            if "index" not in path.name:
                shutil.copy(path, made)
        convert(folder, made / "part", kind)
        (made / "part").replace(made / "model.gguf")
    return made


def speed(form: Format, bench: Bench, exact: Engine, streams: int, pairs: int) -> Found:
    """Measure pairs of runs of the same load, exact and in the format, whose steps take turns."""
    where = bench if not form.gguf else _elsewhere(bench, gguf_folder(bench.folder, form.gguf))
    engine = where.engine(**{**EXACT, **form.settings}, **_sizes(bench.plan, streams))
    rates: list[list[float]] = [[], []]
    for _ in range(pairs):
        jobs = [
            Job(0.0, bench.tokens(bench.plan.prompt), bench.plan.output) for _ in range(streams)
        ]
        served = run_in_turn(Replay(exact, jobs), Replay(engine, jobs))
        for which in (0, 1):
            rates[which].append(rate(served[which]))
    stats = engine.stats()
    engine.close()
    return Found(form.name, rates[1], rates[0], stats["weight_bytes"], stats["kv_bytes"])


def _sizes(plan: Plan, streams: int) -> dict[str, Any]:
    """Return engine settings with room for the tokens of all streams."""
    return {
        "max_running": max(streams, 2),
        "num_blocks": blocks_for(streams, plan.prompt + plan.output),
        **IN_TURN,
    }


def _elsewhere(bench: Bench, folder: Path) -> Bench:
    other = object.__new__(Bench)
    other.__dict__ |= bench.__dict__ | {"folder": folder}
    return other


def quality(form: Format, tasks: Path, limit: int) -> dict[str, Any] | None:
    """Return perplexity and accuracy of pocket-chat; None for a format that cannot be made on load."""
    if form.gguf:
        return None
    settings = [
        part
        for item in {**EXACT, **form.settings}.items()
        for part in ("--setting", "=".join(item))
    ]
    argv = [
        sys.executable,
        "-m",
        "motet_evaluation.evaluate",
        str(POCKET),
        "--tasks",
        str(tasks),
        "--limit",
        str(limit),
    ]
    done = subprocess.run(
        [*argv, *settings], check=True, capture_output=True, text=True, timeout=3600
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_tasks(cache: Path, limit: int) -> Path:
    """Write pocket-chat's held-out questions to a file, once; return its path."""
    path = cache / f"pocket-tasks-{limit}.jsonl"
    if not path.is_file():
        recipes = MODELS / "recipes"
        argv = [
            sys.executable,
            str(recipes),
            "chat.tasks",
            str(POCKET),
            "--per-category",
            str(limit),
        ]
        made = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=3600)
        path.write_text(made.stdout, encoding="utf-8")
    return path


def run(
    plan: Plan, streams: int, pairs: int, limit: int, wanted: str, cache: Path, output: Path
) -> list[Found]:
    """Measure all wanted formats, print the table, and write the JSON file."""
    before = conditions()
    torch.set_num_threads(plan.threads or torch.get_num_threads())
    bench = Bench(plan, cache)
    tasks = write_tasks(cache, limit) if limit else None
    exact = bench.engine(**EXACT, **_sizes(plan, streams))
    findings = []
    for form in FORMATS:
        if wanted in form.name:
            found = speed(form, bench, exact, streams, pairs)
            found.quality = quality(form, tasks, limit) if tasks else None
            findings.append(found)
            print(f"  {' · '.join(found.cells())}", flush=True)
    exact.close()
    print(f"\n{load_line(before)}")
    print(
        f"Random weights of the shape {plan.shape!r}, {streams} streams, {pairs} pairs; pocket-chat's answers.\n"
    )
    header = ["format", "tokens/s", "over exact", "weights", "KV", "perplexity", "right"]
    print(table(header, [found.cells() for found in findings]))
    write(output, before, plan, [asdict(found) for found in findings])
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "What formats of weights and KV gain and cost.",
        "a tiny model, one pair, one question of each category",
        RESULTS,
        prog="formats",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="formats whose name contains TEXT (default: all)"
    )
    parser.add_argument(
        "--pairs", type=int, default=6, help="interleaved pairs of runs (default: 6)"
    )
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams (default: 8)")
    parser.add_argument(
        "--limit",
        type=int,
        default=50,
        help="questions of each category; 0: quality is not measured (default: 50)",
    )
    add_checkpoint(parser, "middle")
    args = parser.parse_args(argv)
    plan = planned(args, Plan(), QUICK, CHECKPOINT)
    streams, pairs, limit = (
        (2, 1, min(args.limit, 1)) if args.quick else (args.streams, args.pairs, args.limit)
    )
    run(plan, streams, pairs, limit, args.only, args.cache, args.file)


if __name__ == "__main__":
    main()
