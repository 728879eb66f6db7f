"""Find the formats and dialects of model families, for docs/models.md.

Formats are what the loader makes of a tiny quantized checkpoint of each class, and what its
registries list. Dialects are those of the table in docs/dialects.md. Rankers are the classes that
are compared with sentence-transformers.
"""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from motet_llm.weights import checkpoint
from motet_llm.weights.gguf.layout import LAYOUTS as GGUF_TYPES
from motet_llm.weights.quantized_checkpoint import METHODS
from motet_shared.errors import ConfigError
from support.checkpoints.ranking_checkpoints import FAMILIES as CROSS_ENCODERS
from support.checkpoints.ranking_checkpoints import OTHER_RANKERS
from support.families import language_families as families

DIALECTS = Path(__file__).resolve().parents[1] / "docs" / "dialects.md"
QUANTIZED = tuple(method for method in METHODS if method != "mxfp4")
MXFP4_TYPES = ("gpt_oss",)  # the format of their experts; test_llm_experts.py loads one
_EXPERT = re.compile(r"\.experts\.\d+\.")


def formats_of(name: str, model_type: str) -> str:
    """Return the formats of checkpoints of a class that are read, beside plain floats."""
    found = {
        "quantized": reads_quantized(name),
        "mxfp4": model_type in MXFP4_TYPES,
        "GGUF": model_type in GGUF_TYPES,
    }
    return ", ".join(form for form, read in found.items() if read)


def reads_quantized(name: str) -> bool:
    """Return True if a tiny checkpoint of a class is loaded with its matrices in codes of float8.

    As in published checkpoints, linear layers but the head are quantized, and experts that are
    stored one by one. The other methods lead to the same modules.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = families.random_model(name)
        head = model.get_output_embeddings()
        linears = {
            module_name
            for module_name, module in model.named_modules()
            if type(module) is nn.Linear and module is not head
        }
        model.save_pretrained(folder)
        if not _quantize(folder, linears):
            return False
        try:
            checkpoint.load_model(folder, checkpoint.load_config(folder), torch.float32)
        except ConfigError:
            return False
    return True


def _quantize(folder: Path, linears: set[str]) -> int:
    """Quantize matrices of a checkpoint to float8; return how many."""
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(path)
    codes = [
        key
        for key, tensor in tensors.items()
        if key.endswith(".weight")
        and tensor.ndim == 2
        and (key.removesuffix(".weight") in linears or _EXPERT.search(key))
    ]
    for key in codes:
        scale = tensors[key].abs().max() / 448
        tensors[key] = (tensors[key] / scale).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = scale
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None}
    (folder / "config.json").write_text(json.dumps(config))
    return len(codes)


def dialects() -> dict[str, tuple[str, str]]:
    """Return the formats of tool calls and of reasoning by `model_type`, as docs/dialects.md has them."""
    table = DIALECTS.read_text().split("| models |")[1].split("\n\n")[0]
    found: dict[str, tuple[list[str], list[str]]] = {}
    for line in table.splitlines()[2:]:
        _, types, *formats = [cell.strip() for cell in line.strip("|").split("|")][:4]
        for model_type in re.findall(r"`(\w+)`", types):
            known = found.setdefault(model_type, ([], []))
            for names, cell in zip(known, formats, strict=True):
                if cell != "–" and cell not in names:
                    names.append(cell)
    return {
        kind: (", ".join(tools), ", ".join(reasoning)) for kind, (tools, reasoning) in found.items()
    }


@cache
def rankers() -> dict[str, list[tuple[str, str]]]:
    """Return the classes that score documents, each with how it does, by `model_type`."""
    found: dict[str, list[tuple[str, str]]] = {}
    for make in CROSS_ENCODERS.values():
        model = make()
        found.setdefault(model.config.model_type, []).append((type(model).__name__, "pairs"))
    for model_type, ranker in OTHER_RANKERS.items():
        found.setdefault(model_type, []).append(ranker)
    return dict(sorted(found.items()))
