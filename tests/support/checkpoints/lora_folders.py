"""Write LoRA adapters of tiny models with peft."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from motet_llm.adapters.folder import CONFIG, WEIGHTS


def make_adapter(
    model: PreTrainedModel, path: Path, *, seed: int = 0, strength: float = 0.3, **config: Any
) -> Path:
    """Write an adapter of random factors for `model` into `path`; `model` does not change."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**settings | config))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=strength)
        adapted.save_pretrained(str(path))
        adapted.unload()
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.requires_grad_(False)
    return path


def with_adapter(model: PreTrainedModel, path: Path) -> PeftModel:
    """Return the model as peft runs it with the adapter; this changes `model`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, str(path)).eval()


def change_config(path: Path, **fields: Any) -> None:
    """Write fields into an adapter's config; None removes one."""
    config = json.loads((path / CONFIG).read_text()) | fields
    (path / CONFIG).write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of an adapter, by the end of their names with _ for dots; None removes one."""
    tensors = load_file(path / WEIGHTS)
    for ending, tensor in changes.items():
        key = next((key for key in tensors if key.replace(".", "_").endswith(ending)), ending)
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, path / WEIGHTS)
