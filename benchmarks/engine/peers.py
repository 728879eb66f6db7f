"""Define the engines that `llm.py` compares: how each is started, and what is missing for it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.workers import Worker, has_modules
from motet_models.capacity import KV_FORMATS, KvFormat
from motet_models.weight_formats import WEIGHT_FORMATS, WeightFormat

LLAMA_PYTHON = "MOTET_LLAMA_PYTHON"
VLLM_PYTHON = "MOTET_VLLM_PYTHON"
# Of llama.cpp's formats: blocks of 32 numbers with one float16 scale.
GGUF_FORMATS = {
    "BF16": WEIGHT_FORMATS["bfloat16"],
    "Q8_0": WeightFormat(name="Q8_0", bits=8, group=32, group_bytes=2),
    "Q4_0": WeightFormat(name="Q4_0", bits=4, group=32, group_bytes=2),
}


# What a worker imports, and what is said where it is missing.
_NEEDS = {
    "engine.llama_worker": (
        ("gguf", "llama_cpp", "numpy"),
        f"llama-cpp-python and gguf are not installed for {LLAMA_PYTHON}",
    ),
    "engine.vllm_worker": (("vllm",), f"vllm is not installed for {VLLM_PYTHON}"),
}


@dataclass(frozen=True, kw_only=True)
class Peer(Worker):
    """Define one engine in one format."""

    module: str = "engine.worker"
    format: WeightFormat
    kv: KvFormat = KV_FORMATS["bfloat16"]


def peers(transformers_dtype: str) -> list[Peer]:
    """Return all engines, ours first; ours prefills at full speed, without protecting streams."""
    options = {"decode_slowdown": 0}
    ours = [
        Peer(
            name=f"motet {name}",
            format=WEIGHT_FORMATS[weights],
            task={"driver": "motet", "format": weights, "options": options},
        )
        for name, weights in (("bf16", "bfloat16"), ("int8", "int8"), ("int4", "int4"))
    ]
    theirs = [
        Peer(
            name=f"transformers {name}, {transformers_dtype}",
            format=WEIGHT_FORMATS[transformers_dtype],
            kv=KV_FORMATS[transformers_dtype],
            task={"driver": driver, "format": transformers_dtype},
        )
        for name, driver in (("generate", "generate"), ("continuous batching", "continuous"))
    ]
    python = os.environ.get(LLAMA_PYTHON) or sys.executable
    llama = [
        Peer(
            name=f"llama.cpp {kind}",
            format=form,
            module="engine.llama_worker",
            python=python,
            task={"gguf": kind},
        )
        for kind, form in GGUF_FORMATS.items()
    ]
    vllm = Peer(
        name=f"vllm {transformers_dtype}",
        format=WEIGHT_FORMATS[transformers_dtype],
        kv=KV_FORMATS[transformers_dtype],
        module="engine.vllm_worker",
        python=os.environ.get(VLLM_PYTHON) or sys.executable,
        task={"format": transformers_dtype},
    )
    return [*ours, *theirs, *llama, vllm]


def absent(peer: Peer, device: str = "cpu") -> str:
    """Return why a peer cannot run; empty if it can."""
    if peer.module not in _NEEDS:
        return ""
    if device != "cpu":
        return "it is compared on CPUs"
    modules, packages = _NEEDS[peer.module]
    if has_modules(peer.python, *modules):
        return ""
    return f"{packages} (see benchmarks/README.md)"


def measure(peer: Peer, task: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run the worker once. Raises RuntimeError with the end of its log on failure or timeout."""
    task = {**task, **peer.task}
    if "gguf" in peer.task:
        task["file"] = str(gguf_file(peer, Path(task["folder"])))
        return peer.run(["measure", json.dumps(task)], threads=threads)
    return peer.run([json.dumps(task)], threads=threads)


def gguf_file(peer: Peer, folder: Path) -> Path:
    """Return the checkpoint in the peer's format, converted on the first call."""
    file = folder.with_name(f"{folder.name}.{peer.task['gguf']}.gguf")
    if not file.exists():
        unfinished = file.with_suffix(f".{os.getpid()}")
        convert = ["convert", str(folder), str(unfinished), peer.task["gguf"]]
        peer.run(convert, threads=os.cpu_count() or 1, output=False)
        unfinished.rename(file)
    return file
