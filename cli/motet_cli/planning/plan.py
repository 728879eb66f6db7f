"""Report a model's memory and the speed limits of a machine, from config.json: `motet plan`."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from motet_cli.checkpoints.conversion import gguf_folder, is_gguf
from motet_cli.checkpoints.model_folders import local_folder
from motet_cli.engines.degrees import parse_ranks
from motet_cli.hub.reference import parse_reference
from motet_cli.planning import traffic as plan_traffic
from motet_cli.planning.engine_memory import (
    Checkpoint,
    engine_plan,
    engine_settings,
    parse_bytes,
)
from motet_cli.planning.this_cpu import this_cpu
from motet_cli.stack_file.presets import show_presets
from motet_models.capacity import (
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
from motet_models.ranks import Ranks, largest_share
from motet_models.roofline import GPUS, Bound, Processor, decode_bound, prefill_bound
from motet_models.weight_formats import WeightFormat
from motet_shared.errors import ConfigError


def run(args: Namespace) -> int:
    if args.preset == "":
        show_presets()
        return 0
    if args.preset is not None:
        args.stack = ["--preset", args.preset, *(args.stack or ())]
    if args.stack is not None:
        return _plan_stack(args)
    if args.model is None:
        raise ConfigError("MODEL: is not given; give one, or --stack", param="MODEL")
    folder = find_config(args.model)
    config = read_config(folder)
    ranks = parse_ranks(args)
    shape = largest_share(model_shape(config, folder), ranks)
    checkpoint = Checkpoint(config, next(folder.glob("*.gguf"), None))
    if args.traffic is not None:
        return _plan_for_traffic(args, shape, checkpoint)
    processor = _processor(args)
    memory = (
        parse_bytes(args.memory, "--memory")
        if args.memory
        else _default_memory(processor, ranks.count)
    )
    settings = engine_settings(args, checkpoint, on_gpu=args.gpu is not None)
    context = parse_tokens(args.context) if args.context else min(shape.context or 4096, 4096)
    model_report = ModelReport(
        args.model, shape, settings, plan(shape, settings, memory, context), processor, ranks
    )
    if args.json:
        json.dump(model_report.document(), sys.stdout, indent=1)
        print()
    else:
        model_report.print()
    return 0


# --------------------------------------------------------------------------------------------------------- command line
def find_config(given: str) -> Path:
    """Return the folder of a config.json.

    given: the folder, the file, a GGUF file, the name of a local model, or `org/name` on a hub, of
    which only config.json is downloaded, or the header of `org/name:file.gguf`. Raises ConfigError
    if there is none.
    """
    path = Path(given).expanduser()
    if is_gguf(path):
        return gguf_folder(path, "MODEL")
    folder = path.parent if path.is_file() else local_folder(given)
    if folder is None and (reference := parse_reference(given)) is not None:
        from motet_cli.hub import download  # huggingface_hub takes half a second

        if reference.file:
            from motet_cli.hub.gguf_header import fetch_header

            return gguf_folder(fetch_header(reference), "MODEL")
        folder = download.fetch_config(reference)
    if folder is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"MODEL: {given!r} has no config.json; give a checkpoint folder, the name of a local"
            " model, or org/name on a hub",
            param="MODEL",
        )
    return folder


def parse_tokens(text: str) -> int:
    """Parse tokens: "8192", or "8k" (1,024 each). Raises ConfigError."""
    match = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    if match is None or not int(match[1]):
        raise ConfigError(
            f"--context: {text!r} is not a number of tokens; give one such as 8192 or 8k",
            param="--context",
        )
    return int(match[1]) * (1024 if match[2] else 1)


def _processor(args: Namespace) -> Processor | None:
    if args.gpu is not None:
        named = {name.lower(): gpu for name, gpu in GPUS.items()}
        if (gpu := named.get(args.gpu.lower())) is None:
            raise ConfigError(
                f"--gpu: {args.gpu!r} is unknown; choose one of {', '.join(GPUS)}",
                param="--gpu",
            )
        return gpu
    if args.cpu:
        bandwidth = parse_bytes(args.bandwidth, "--bandwidth") if args.bandwidth else 0
        return this_cpu(threads=args.threads, bandwidth=bandwidth, flops=(args.gflops or 0) * 1e9)
    return None


def _plan_for_traffic(args: Namespace, shape: ModelShape, checkpoint: Checkpoint) -> int:
    for option in ("memory", "context", "gpu"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option}: excludes --traffic, which takes hardware from --prices; give only one",
                param=f"--{option}",
            )

    def find_processor(name: str) -> Processor | None:
        named = {gpu.lower(): gpu for gpu in GPUS}
        on_gpu = Namespace(
            **{**vars(args), "gpu": named.get(name.lower()), "cpu": name.lower() == "cpu"}
        )
        return _processor(on_gpu)

    return plan_traffic.run(
        args, shape, engine_settings(args, checkpoint, on_gpu=not args.cpu), find_processor
    )


def _plan_stack(args: Namespace) -> int:
    from motet_cli.planning import stack_plan  # it imports all of `motet up`

    for option in ("model", "traffic", "memory"):
        if getattr(args, option) is not None:
            name = "MODEL" if option == "model" else f"--{option}"
            raise ConfigError(
                f"{name}: excludes --stack, behind which are the flags of `motet up`; give only one",
                param=name,
            )

    def tokens_of(folder: Path, memory: int, on_gpu: bool) -> int:
        found = engine_plan(args, folder, memory, on_gpu=on_gpu)
        return found.kv // found.per_token if found.per_token else 0

    return stack_plan.run(args, tokens_of)


def _default_memory(processor: Processor | None, ranks: int) -> int:
    """Return the memory of a GPU, or a rank's share of this machine's that is available."""
    return processor.memory if processor is not None else available_memory() // ranks


# --------------------------------------------------------------------------------------------------------------- output
@dataclass(frozen=True)
class ModelReport:
    """Hold the figures of a model with these settings.

    processor: hardware for upper bounds of speed; None: memory only. ranks: the group that computes
    the model; the other figures are those of the rank that holds the most.
    """

    model: str
    shape: ModelShape
    settings: Settings
    plan: Plan
    processor: Processor | None
    ranks: Ranks = field(default_factory=Ranks)

    def bounds(self) -> dict[str, Bound]:
        """Return upper bounds of speed by phase; empty without a processor."""
        if self.processor is None:
            return {}
        bounds = {"decode, 1 sequence": self._decode_bound(self.processor, 1)}
        if self.plan.running > 1:
            bounds[f"decode, {self.plan.running} sequences"] = self._decode_bound(
                self.processor, self.plan.running
            )
        bounds["prefill"] = prefill_bound(
            self.shape, self.processor, self._read_format(), tokens=self.plan.context
        )
        return bounds

    def _decode_bound(self, processor: Processor, batch: int) -> Bound:
        return decode_bound(
            self.shape,
            processor,
            self._read_format(),
            batch=batch,
            context=self.plan.context,
            kv=self.settings.kv,
        )

    def _read_format(self) -> WeightFormat:
        codes = self.settings.codes
        return self.settings.weights if codes is None else codes.format

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        counts = self.shape.parameters
        return {
            "model": self.model,
            "model_type": self.shape.model_type,
            "ranks": {**asdict(self.ranks), "count": self.ranks.count},
            "parameters": {**asdict(counts), "total": counts.total, "active": counts.active},
            "settings": asdict(self.settings),
            "plan": {**asdict(self.plan), "used": self.plan.used},
            "processor": asdict(self.processor) if self.processor else None,
            "roofline": {name: asdict(bound) for name, bound in self.bounds().items()},
        }

    def print(self) -> None:
        """Print the report as tables."""
        console = Console(highlight=False)
        title = f"{self.model} ({self.shape.model_type}): parameters"
        if self.ranks.count > 1:
            title += f" of the largest of {self.ranks.count} ranks"
        console.print(title, _parameters_table(self.shape), sep="\n")
        console.print("memory", _memory_table(self.shape, self.settings, self.plan), sep="\n")
        console.print("limits", _capacity_table(self.plan, self.settings), sep="\n")
        if (processor := self.processor) is not None:
            rates = f"{processor.bandwidth / 1e9:,.0f} GB/s, {processor.bf16 / 1e12:,.2f} TFLOP/s"
            console.print(
                f"upper bounds on {processor.name} ({rates})",
                _roofline_table(self.bounds()),
                sep="\n",
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


def _memory_table(shape: ModelShape, settings: Settings, memory_plan: Plan) -> Table:
    table = _table("use", "bytes", "details")
    each = format_bytes(memory_plan.block_bytes)
    blocks = f"{memory_plan.num_blocks:,} blocks of {memory_plan.block_size} tokens, {each} each"
    rows = [
        ("weights", memory_plan.weights, _formats(settings)),
        ("activations", memory_plan.activations, f"{settings.token_budget} tokens per step"),
        ("CUDA graphs", memory_plan.graphs, "decode steps of all sizes"),
        (
            "recurrent states",
            memory_plan.states,
            f"{settings.max_running} sequences" + " and snapshots" * settings.prefix_cache,
        ),
        ("overhead", memory_plan.overhead, "process, libraries"),
        ("KV cache", memory_plan.kv, blocks),
        ("used", memory_plan.used, f"of {format_bytes(memory_plan.memory)}"),
    ]
    for name, number, how in rows:
        if number:
            table.add_row(name, format_bytes(number), how)
    kinds = ", ".join(
        f"{len(group.layers)} layers {_reach(group)}"
        for group in layout_of(shape.layers, memory_plan.block_size, settings.kv).groups
    )
    table.add_row("KV per token", format_bytes(memory_plan.per_token), f"groups: {kinds}")
    return table


def _formats(settings: Settings) -> str:
    codes = settings.codes
    return (
        settings.weights.name if codes is None else f"{codes.format.name}, {settings.weights.name}"
    )


def _capacity_table(memory_plan: Plan, settings: Settings) -> Table:
    table = _table("capacity", "value")
    table.add_row(
        f"KV of a sequence of {memory_plan.context:,} tokens",
        format_bytes(memory_plan.per_sequence),
    )
    table.add_row(
        f"concurrent sequences of {memory_plan.context:,} tokens", f"{memory_plan.sequences:,}"
    )
    if memory_plan.running < memory_plan.sequences:
        table.add_row("of which run (max_running)", f"{settings.max_running:,}")
    table.add_row("longest single sequence", f"{memory_plan.longest:,} tokens")
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
