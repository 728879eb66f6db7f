"""Report what a model needs and what a machine could do with it, from its config.json alone."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from motet_cli.hub.reference import parse_reference
from motet_cli.planning import traffic as plan_traffic
from motet_cli.planning.this_cpu import this_cpu
from motet_cli.supervision.model_folders import local_folder
from motet_models.capacity import (
    KV_FORMATS,
    WEIGHT_FORMATS,
    KvGroup,
    Plan,
    Settings,
    format_bytes,
    layout_of,
    plan,
)
from motet_models.free_memory import available_memory
from motet_models.model_config import model_shape, read_config
from motet_models.model_shape import ModelShape
from motet_models.roofline import GPUS, Bound, Processor, decode_bound, prefill_bound
from motet_shared.errors import ConfigError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_ALIASES = {"bf16": "bfloat16", "fp32": "float32", "float8_e4m3fn": "float8"}
# Memory of an engine process besides the model: on a CPU Python with torch and transformers and
# what its allocator keeps between tensors (measured); on a GPU the CUDA context, cuBLAS
# workspaces and the allocator's slack.
CPU_OVERHEAD = 424 << 20
GPU_OVERHEAD = 1536 << 20


def run(args: Namespace) -> int:
    folder = find_config(args.model)
    shape = model_shape(read_config(folder), folder)
    if args.traffic is not None:
        return _for_traffic(args, shape)
    processor = _processor(args)
    memory = parse_bytes(args.memory, "--memory") if args.memory else _default_memory(processor)
    settings = _settings(args, on_gpu=args.gpu is not None)
    context = parse_tokens(args.context) if args.context else min(shape.context or 4096, 4096)
    answer = Answer(args.model, shape, settings, plan(shape, settings, memory, context), processor)
    if args.json:
        json.dump(answer.document(), sys.stdout, indent=1)
        print()
    else:
        answer.print()
    return 0


# --------------------------------------------------------------------------------------------------------- command line
def find_config(given: str) -> Path:
    """Return the folder of a config.json, given it, the file, or a model's name here or on a hub.

    Of a model on a hub config.json alone is downloaded. Raises ConfigError if there is none.
    """
    path = Path(given).expanduser()
    folder = path.parent if path.is_file() else local_folder(given)
    if folder is None and (reference := parse_reference(given)) is not None:
        from motet_cli.hub.download import fetch_config  # huggingface_hub takes half a second

        folder = fetch_config(reference)
    if folder is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"MODEL={given!r}: no config.json there; give a checkpoint folder, the name of a local"
            " model, or org/name on a hub"
        )
    return folder


def parse_bytes(text: str, name: str) -> int:
    """Parse "24GB" (10^9), "24GiB" (2^30), "500M", or bytes. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ConfigError(f"{name}={text!r}: give bytes such as 24GB or 24GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_tokens(text: str) -> int:
    """Parse "8192", or "8k" (1,024 each). Raises ConfigError."""
    match = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    if match is None or not int(match[1]):
        raise ConfigError(f"--context={text!r}: give tokens such as 8192 or 8k")
    return int(match[1]) * (1024 if match[2] else 1)


def _processor(args: Namespace) -> Processor | None:
    if args.gpu is not None:
        named = {name.lower(): gpu for name, gpu in GPUS.items()}
        if (gpu := named.get(args.gpu.lower())) is None:
            raise ConfigError(
                f"--gpu={args.gpu!r} is not in the table; choose one of {', '.join(GPUS)}"
            )
        return gpu
    if args.cpu:
        bandwidth = parse_bytes(args.bandwidth, "--bandwidth") if args.bandwidth else 0
        return this_cpu(threads=args.threads, bandwidth=bandwidth, flops=(args.gflops or 0) * 1e9)
    return None


def _for_traffic(args: Namespace, shape: ModelShape) -> int:
    for option in ("memory", "context", "gpu"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option}: goes without --traffic, where the price list says what there is"
            )

    def find(name: str) -> Processor | None:
        named = {gpu.lower(): gpu for gpu in GPUS}
        on_gpu = Namespace(
            **{**vars(args), "gpu": named.get(name.lower()), "cpu": name.lower() == "cpu"}
        )
        return _processor(on_gpu)

    return plan_traffic.run(args, shape, _settings(args, on_gpu=not args.cpu), find)


def _default_memory(processor: Processor | None) -> int:
    return processor.memory if processor is not None else available_memory()


def _settings(args: Namespace, on_gpu: bool) -> Settings:
    overhead = (
        parse_bytes(args.overhead, "--overhead")
        if args.overhead
        else GPU_OVERHEAD
        if on_gpu
        else CPU_OVERHEAD
    )
    for name, low in (("block_size", 1), ("token_budget", 1), ("max_running", 1)):
        if getattr(args, name) < low:
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(args, name)}: give at least {low}"
            )
    return Settings(
        weights=WEIGHT_FORMATS[_ALIASES.get(args.weights, args.weights)],
        experts=None
        if on_gpu
        else WEIGHT_FORMATS["float32"],  # the engine's CPU kernels do not support packed experts
        kv=KV_FORMATS[_ALIASES.get(args.kv_dtype, args.kv_dtype)],
        activation_bytes=2 if on_gpu else 4,
        block_size=args.block_size,
        token_budget=args.token_budget,
        max_running=args.max_running,
        prefix_cache=not args.no_prefix_cache,
        overhead=overhead,
    )


# --------------------------------------------------------------------------------------------------------------- output
@dataclass(frozen=True)
class Answer:
    """Figures for a model with these settings, on a processor if one is named."""

    model: str
    shape: ModelShape
    settings: Settings
    plan: Plan
    processor: Processor | None

    def bounds(self) -> dict[str, Bound]:
        """Return upper bounds by phase; none without a processor."""
        if self.processor is None:
            return {}
        bounds = {"decode, 1 sequence": self._decode_bound(self.processor, 1)}
        if self.plan.running > 1:
            bounds[f"decode, {self.plan.running} sequences"] = self._decode_bound(
                self.processor, self.plan.running
            )
        bounds["prefill"] = prefill_bound(
            self.shape, self.processor, self.settings.weights, tokens=self.plan.context
        )
        return bounds

    def _decode_bound(self, processor: Processor, batch: int) -> Bound:
        return decode_bound(
            self.shape,
            processor,
            self.settings.weights,
            batch=batch,
            context=self.plan.context,
            kv=self.settings.kv,
        )

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON members."""
        counts = self.shape.parameters
        return {
            "model": self.model,
            "model_type": self.shape.model_type,
            "parameters": {**asdict(counts), "total": counts.total, "active": counts.active},
            "settings": asdict(self.settings),
            "plan": {**asdict(self.plan), "used": self.plan.used},
            "processor": asdict(self.processor) if self.processor else None,
            "roofline": {name: asdict(bound) for name, bound in self.bounds().items()},
        }

    def print(self) -> None:
        """Print the answer as tables."""
        console = Console(highlight=False)
        title = f"{self.model} ({self.shape.model_type}): parameters"
        console.print(title, _parameters_table(self.shape), sep="\n")
        console.print("memory", _memory_table(self.shape, self.settings, self.plan), sep="\n")
        console.print("capacity", _capacity_table(self.plan, self.settings), sep="\n")
        if (processor := self.processor) is not None:
            rates = f"{processor.bandwidth / 1e9:,.0f} GB/s, {processor.bf16 / 1e12:,.2f} TFLOP/s"
            console.print(
                f"at most on {processor.name} ({rates})", _roofline_table(self.bounds()), sep="\n"
            )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=bool(columns[2:]))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in (0, 2) else "right")
    return table


def _parameters_table(shape: ModelShape) -> Table:
    counts = shape.parameters
    table = _table("part", "count")
    for name in ("embeddings", "attention", "recurrent", "mlp", "experts", "norms", "lm_head"):
        if number := getattr(counts, name):
            table.add_row(name, f"{number:,}")
    if counts.tied:
        table.add_row("lm_head", "the embeddings")
    table.add_row("total", f"{counts.total:,}")
    if counts.active != counts.total:
        table.add_row("active per token", f"{counts.active:,}")
    return table


def _memory_table(shape: ModelShape, settings: Settings, made: Plan) -> Table:
    table = _table("use", "bytes", "how")
    blocks = f"{made.num_blocks:,} blocks of {made.block_size} tokens, {format_bytes(made.block_bytes)} each"
    rows = [
        ("weights", made.weights, settings.weights.name),
        ("activations", made.activations, f"{settings.token_budget} tokens per step"),
        (
            "recurrent states",
            made.states,
            f"{settings.max_running} sequences" + " and snapshots" * settings.prefix_cache,
        ),
        ("overhead", made.overhead, "process, libraries"),
        ("KV cache", made.kv, blocks),
        ("used", made.used, f"of {format_bytes(made.memory)}"),
    ]
    for name, number, how in rows:
        if number:
            table.add_row(name, format_bytes(number), how)
    kinds = ", ".join(
        f"{len(group.layers)} layers {_reach(group)}"
        for group in layout_of(shape.layers, made.block_size, settings.kv).groups
    )
    table.add_row("KV per token", format_bytes(made.per_token), f"groups: {kinds}")
    return table


def _capacity_table(made: Plan, settings: Settings) -> Table:
    table = _table("what", "how much")
    table.add_row(f"KV of a sequence of {made.context:,} tokens", format_bytes(made.per_sequence))
    table.add_row(f"sequences of {made.context:,} tokens at a time", f"{made.sequences:,}")
    if made.running < made.sequences:
        table.add_row("of which run (max_running)", f"{settings.max_running:,}")
    table.add_row("longest single sequence", f"{made.longest:,} tokens")
    return table


def _roofline_table(bounds: dict[str, Bound]) -> Table:
    table = _table("phase", "tokens/s", "limit")
    for name, bound in bounds.items():
        table.add_row(name, f"{bound.tokens_per_second:,.1f}", bound.limit)
    return table


def _reach(group: KvGroup) -> str:
    """Return what a query of a group of layers sees."""
    if group.chunk is not None:
        return f"chunks of {group.chunk}"
    return "full" if group.window is None else f"window {group.window}"
