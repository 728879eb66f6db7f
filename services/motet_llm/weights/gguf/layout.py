"""State how llama.cpp lays tensors out differently from transformers, by `model_type`.

Rows of a matrix may be in another order, which holds for codes too; a matrix's inputs, in the order
of another matrix's rows, are reordered beside its codes. Values differ only in plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Order = Callable[[Any, str, int], Tensor | None]
Values = Callable[[str, Tensor], Tensor]

_CONVOLUTIONS = ("conv.conv.weight", "conv1d.weight")


def _as_stored(config: Any, module: str, size: int) -> Tensor | None:
    return None


def _plainly(name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Describe the tensors of one architecture.

    architecture: `general.architecture`. rows, inputs: `order(config, module, size)` is the indices
        of transformers' rows (inputs) among llama.cpp's, or None if they are the same. values: what
        becomes of a plain tensor, given transformers' name. names: parts of transformers' names and
        what `gguf.get_tensor_name_map` has instead. turned: experts of plain numbers are
        [inputs, outputs] in transformers.
    """

    architecture: str
    rows: Order = _as_stored
    inputs: Order = _as_stored
    values: Values = _plainly
    names: tuple[tuple[str, str], ...] = ()
    turned: bool = False


# ------------------------------------------------------------------------------------------ orders
def _pairs_of_heads(config: Any, module: str, size: int) -> Tensor | None:
    """Return the order of Llama's queries and keys, stored in pairs that rotate together."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(module.rpartition(".")[2])
    if count is None:
        return None
    return torch.arange(size).view(count, -1, 2).transpose(1, 2).flatten()


def _interleaved_gate(config: Any, module: str, size: int) -> Tensor | None:
    """Return the order of gpt-oss's gate and up in turns; llama.cpp has two matrices."""
    if not module.endswith(".experts.gate_up_proj"):
        return None
    return torch.arange(size).view(2, -1).T.flatten()


def _value_heads(config: Any, count: int, width: int, first: int = 0) -> Tensor:
    """Return the order of Qwen3.5's value heads, from row `first` on: by their key head.

    llama.cpp has the first of each key head, then the second, and so on.
    """
    shared = config.linear_num_value_heads // config.linear_num_key_heads
    heads = torch.arange(config.linear_num_value_heads).view(shared, -1).T.flatten()
    rows = (heads.unsqueeze(1) * width + torch.arange(width)).flatten() + first
    return torch.cat((torch.arange(first), rows))[:count]


def _delta_rows(config: Any, module: str, size: int) -> Tensor | None:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    dim = config.linear_value_head_dim
    last = module.rpartition(".")[2]
    if last in ("in_proj_qkv", "conv1d"):
        return _value_heads(config, size, dim, before)
    if last == "in_proj_z":
        return _value_heads(config, size, dim)
    if last in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return _value_heads(config, size, 1)
    return None


def _delta_inputs(config: Any, module: str, size: int) -> Tensor | None:
    if not module.endswith(".linear_attn.out_proj"):
        return None
    return _value_heads(config, size, config.linear_value_head_dim)


# ------------------------------------------------------------------------------------------ values
def _less_one(name: str, tensor: Tensor) -> Tensor:
    """Return norms that transformers adds one to."""
    return tensor.float() - 1 if name.endswith("norm.weight") else tensor


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """Return GPT-2's matrices as [inputs, outputs], as transformers has them."""
    is_matrix = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.T.contiguous() if is_matrix else tensor


def _convolution(name: str, tensor: Tensor) -> Tensor:
    is_flat = name.endswith(_CONVOLUTIONS) and tensor.dim() == 2
    return tensor.unsqueeze(1) if is_flat else tensor


def _as_row(name: str, tensor: Tensor) -> Tensor:
    """Return a gate of one output, stored as a vector, as a matrix."""
    is_row = name.endswith("shared_expert_gate.weight") and tensor.dim() == 1
    return tensor.unsqueeze(0) if is_row else tensor


def _qwen35_values(name: str, tensor: Tensor) -> Tensor:
    if name.endswith(".A_log"):
        return (-tensor.float()).log()
    if name.endswith("linear_attn.norm.weight"):  # the only norm without the one
        return tensor
    return _as_row(name, _convolution(name, _less_one(name, tensor)))


_LLAMA = Layout(architecture="llama", rows=_pairs_of_heads)


def _qwen35(architecture: str) -> Layout:
    return Layout(
        architecture=architecture,
        rows=_delta_rows,
        inputs=_delta_inputs,
        values=_qwen35_values,
        names=((".dt_bias", ".dt_proj.bias"),),
    )


# Keyed by transformers' `model_type`.
LAYOUTS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Layout(architecture="qwen2"),
    "qwen3": Layout(architecture="qwen3"),
    "gemma": Layout(architecture="gemma", values=_less_one),
    "gemma2": Layout(architecture="gemma2", values=_less_one),
    "gemma3_text": Layout(architecture="gemma3", values=_less_one),
    "phi3": Layout(architecture="phi3"),
    "starcoder2": Layout(architecture="starcoder2"),
    "gpt2": Layout(architecture="gpt2", values=_transposed),
    "stablelm": Layout(architecture="stablelm"),
    "nemotron": Layout(architecture="nemotron", values=_less_one),
    "qwen2_moe": Layout(architecture="qwen2moe", values=_as_row),
    "qwen3_moe": Layout(architecture="qwen3moe"),
    "gpt_oss": Layout(
        architecture="gpt-oss",
        rows=_interleaved_gate,
        names=((".sinks", ".sinks.weight"),),
        turned=True,
    ),
    "minimax_m2": Layout(
        architecture="minimax-m2",
        names=((".e_score_correction_bias", ".e_score_correction.bias"),),
    ),
    "lfm2": Layout(architecture="lfm2", values=_convolution),
    "qwen3_5_text": _qwen35("qwen35"),
    "qwen3_5_moe_text": _qwen35("qwen35moe"),
}
