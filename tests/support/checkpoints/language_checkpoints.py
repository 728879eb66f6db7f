"""Write tiny language model checkpoints with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 256 + len(SPECIAL)
EOS = VOCAB - 1  # <|im_end|>

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": VOCAB - 3,
}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": 12}),
}


def tiny_checkpoint(family: str, path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of `family` (a key of FAMILIES) into the folder `path`: weights, config, tokenizer.

    The tokenizer is byte-level (token = byte, then SPECIAL) with a ChatML template, so the folder serves as a whole
    model. Weights are float32 and spread widely, so that greedy answers vary. `overrides` go into the config.
    """
    config_class, extra = FAMILIES[family]
    config = config_class(**{**_SIZES, **extra, **overrides})
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.15)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer without merges: every byte is a token."""
    vocab = {char: byte for byte, char in _byte_chars().items()}
    special = [
        {
            "id": 256 + i,
            "content": s,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        | {"normalized": False}
        for i, s in enumerate(SPECIAL)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_chars() -> dict[int, str]:
    """Return GPT-2's printable characters for bytes, which byte-level BPE vocabularies use."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
