"""Measure the throughput of streams with LoRA adapters against the same streams without, in turn.

`python benchmarks/run.py adapters --help`. The adapters are random and apply to every matrix, as
`target_modules="all-linear"` makes them. The table goes to standard output, the numbers to
`results/adapters.json`. docs/techniques.md describes adapters.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engine.checkpoint import CHECKPOINT, SHAPES, add_checkpoint
from benchmarks.engine.replay import IN_TURN, Job, Replay, blocks_for, rate, run_in_turn
from benchmarks.serving.bench import QUICK, Bench, Plan
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.cache import made
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, median_interval, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_llm.adapters.bank import ResidentAdapter
from motet_llm.adapters.folder import CONFIG, WEIGHTS
from motet_llm.engine.engine import Engine

RESULTS = RESULTS_FOLDER / "adapters.json"
LEAST = 0.70  # of the base model's throughput
MATRICES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True)
class Mix:
    """Assign adapters to streams.

    choose: maps the number of a stream to that of its adapter; None: no adapter.
    """

    name: str
    choose: Callable[[int], int | None]


MIXES = (
    Mix("each its own", lambda stream: stream),
    Mix("all the same", lambda stream: 0),
    Mix("every second one its own", lambda stream: stream if stream % 2 else None),
)
NONE = Mix("none, of an engine with adapters", lambda stream: None)


@dataclass(frozen=True)
class Cost:
    """Hold the throughput of a mix.

    gains: throughput over that of the base model, one value per pair of runs.
    """

    mix: str
    gains: list[float]
    tokens_per_second: float

    def cells(self) -> list[str]:
        low, high = median_interval(self.gains)
        ratio = f"{statistics.median(self.gains):.3f} ({low:.3f}–{high:.3f})"
        return [self.mix, ratio, f"{self.tokens_per_second:,.0f}"]


# -------------------------------------------------------------------------------------------------------------- folders
def random_adapters(shape: str, rank: int, count: int, cache: Path) -> list[Path]:
    """Return folders of adapters for a checkpoint of SHAPES.

    All link to the same file of factors, to save disk space.
    """
    root = made(
        cache / f"{shape}-adapters-rank{rank}",
        lambda folder: _write_factors(folder, shape, rank),
        mark=WEIGHTS,
    )
    found = []
    for number in range(count):
        path = root / str(number)
        path.mkdir(exist_ok=True)
        if not (path / WEIGHTS).is_file():
            os.link(root / WEIGHTS, path / WEIGHTS)
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": "all-linear",
        }
        (path / CONFIG).write_text(
            json.dumps(config | {"base_model_name_or_path": f"{shape}, {number}"})
        )
        found.append(path)
    return found


def _write_factors(folder: Path, shape: str, rank: int) -> None:
    torch.manual_seed(rank)
    tensors = {}
    for name, outputs, inputs in _matrices(SHAPES[shape]):
        down, up = torch.randn(rank, inputs) * inputs**-0.5, torch.randn(outputs, rank) * 0.01
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)


def _matrices(shape: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield name, outputs and inputs of each matrix of a checkpoint."""
    hidden, wide, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    outputs |= {"gate_proj": wide, "up_proj": wide, "down_proj": hidden}
    inputs = {"o_proj": queries, "down_proj": wide}
    for layer in range(shape["num_hidden_layers"]):
        for part, names in MATRICES.items():
            for name in names:
                yield f"model.layers.{layer}.{part}.{name}", outputs[name], inputs.get(name, hidden)


# ----------------------------------------------------------------------------------------------------------- measuring
def measure(
    bench: Bench, mix: Mix, engines: tuple[Engine, Engine], held: list[ResidentAdapter], pairs: int
) -> Cost:
    """Measure a mix in pairs of runs whose steps take turns.

    engines: those of the base model and of the mix; `held` is loaded in the latter.
    """
    base, engine = engines
    gains, mixed = [], 0.0
    for _ in range(pairs):
        prompts = [bench.tokens(bench.plan.prompt) for _ in held]
        plain = [Job(0.0, prompt, bench.plan.output) for prompt in prompts]
        jobs = []
        for stream, job in enumerate(plain):
            number = mix.choose(stream)
            jobs.append(replace(job, adapter=None if number is None else held[number]))
        without, with_it = run_in_turn(Replay(base, plain), Replay(engine, jobs))
        mixed = rate(with_it)
        gains.append(mixed / rate(without))
    return Cost(mix.name, gains, mixed)


def run(
    plan: Plan, streams: int, rank: int, pairs: int, wanted: str, cache: Path, output: Path
) -> list[Cost]:
    """Measure all wanted mixes, print the table, and write the JSON file."""
    before = conditions()
    torch.set_num_threads(plan.threads or torch.get_num_threads())
    bench = Bench(plan, cache)
    folders = random_adapters(plan.shape, rank, streams, cache)
    sizes: dict[str, Any] = {
        "max_running": streams,
        "num_blocks": 2 * blocks_for(streams, plan.prompt + plan.output),
        "token_budget": max(512, streams),
        "prefix_cache": False,
        **IN_TURN,
    }
    plain = bench.engine(**sizes)
    sizes |= {
        "adapters": tuple(f"{number}={folder}" for number, folder in enumerate(folders)),
        "max_adapters": streams,
        "max_rank": max(rank, 1),
    }
    engine = bench.engine(half=0, **sizes)
    unadapted = bench.engine(engine.runner, half=1, **sizes)  # the same model, for streams without
    bank = engine.runner.adapters
    assert bank is not None
    held = [bank.load(str(number), number) for number in range(streams)]
    costs = []
    for mix, base in [(mix, unadapted) for mix in MIXES] + [(NONE, plain)]:
        if wanted in mix.name:
            costs.append(measure(bench, mix, (base, engine), held, pairs))
            print(f"  {' · '.join(costs[-1].cells())}", flush=True)
    for one in (plain, unadapted, engine):
        one.close()
    what = f"{streams} adapters in one batch / the base model"
    own = [cost for cost in costs if cost.mix == MIXES[0].name]
    targets = [Target(what, statistics.median(cost.gains), LEAST, "", most=False) for cost in own]
    print(f"\n{load_line(before)}")
    print(
        f"Random weights of the shape {plan.shape!r}, {streams} streams, adapters of rank {rank} on every matrix;"
    )
    print(f"{pairs} pairs, median and 95 % interval.\n")
    print(table(["adapters", "over none", "tokens/s"], [cost.cells() for cost in costs]))
    print()
    print(targets_table(targets))
    write(output, before, plan, costs, targets)
    return costs


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("What LoRA adapters cost.", "a tiny model and one pair", RESULTS, "adapters")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="mixes whose name contains TEXT (default: all)"
    )
    parser.add_argument(
        "--pairs", type=int, default=8, help="interleaved pairs of runs (default: 8)"
    )
    parser.add_argument(
        "--streams", type=int, default=64, help="concurrent streams, and adapters (default: 64)"
    )
    parser.add_argument("--rank", type=int, default=16, help="rank of every adapter (default: 16)")
    add_checkpoint(parser, "qwen3-0.6b")
    args = parser.parse_args(argv)
    plan = planned(args, Plan(shape="qwen3-0.6b"), QUICK, CHECKPOINT)
    streams, pairs = (4, 1) if args.quick else (args.streams, args.pairs)
    run(plan, streams, args.rank, pairs, args.only, args.cache, args.file)


if __name__ == "__main__":
    main()
