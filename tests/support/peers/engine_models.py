"""Write pocket-chat, and its language model alone, in the forms that other engines read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.gguf_files import write_qwen3

POCKET = Path(__file__).parents[3] / "models" / "pocket-chat"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PREFIX = "language_model."
_TOWER = "vision_tower."


def text_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a plain Qwen3 checkpoint of pocket-chat, without its vision tower."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((POCKET / "config.json").read_text())["text_config"]
    config |= {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {
        name.removeprefix(_PREFIX): tensor.to(dtype)
        for name, tensor in load_file(POCKET / "model.safetensors").items()
        if name.startswith(_PREFIX)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in (*_TOKENIZER, "generation_config.json"):
        shutil.copy(POCKET / name, folder)
    return folder


def seeing_checkpoint(folder: Path) -> Path:
    """Write pocket-chat with the names of published LLaVA checkpoints, which vLLM reads."""
    shutil.copytree(POCKET, folder)
    tensors = {
        name.replace(_TOWER, f"{_TOWER}vision_model."): tensor
        for name, tensor in load_file(POCKET / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def gguf_file(folder: Path) -> Path:
    """Write the checkpoint in `folder` beside itself as one GGUF file, in float32."""
    path = folder.parent / f"{folder.name}.gguf"
    return path if path.exists() else write_qwen3(folder, path)
