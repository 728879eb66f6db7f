"""Make the text half of pocket-chat: a model with real answers that other engines serve, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

_SOURCE = Path(__file__).parents[3] / "models" / "pocket-chat"
_HALF = "language_model."
_FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def pocket_text(folder: Path) -> Path:
    """Write the checkpoint to `folder`, in float32, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.removeprefix(_HALF): tensor.astype(np.float32)
        for name, tensor in load_file(_SOURCE / "model.safetensors").items()
        if name.startswith(_HALF)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((_SOURCE / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    for name in _FILES:
        shutil.copy(_SOURCE / name, folder / name)
    return folder
