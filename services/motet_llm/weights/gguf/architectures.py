"""Name what is particular to each of llama.cpp's architectures: its config beyond the common part.

The left column of `ARCHITECTURES` is `general.architecture`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from motet_shared.errors import ConfigError

from .header import Header


@dataclass(frozen=True, slots=True)
class Architecture:
    """config: the fields beyond the common ones. rotates: it has rotary embeddings."""

    config: Callable[[Header], dict[str, Any]]
    rotates: bool = True


def find_architecture(header: Header) -> Architecture:
    """Return the architecture of a file. Raises ConfigError if it is not read."""
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{header.path.name}: general.architecture={header.architecture!r} is not read; {known} are"
        )
    return found


def _llama(header: Header) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
    }


def _qwen2(header: Header) -> dict[str, Any]:
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(header: Header) -> dict[str, Any]:
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


ARCHITECTURES = {
    "llama": Architecture(_llama),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
}
