"""Hold the experts of a quantized checkpoint as codes until they are packed.

Checkpoints store them expert by expert, as `experts.0.gate_proj` and so on, or all of a layer in
one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_kernels import gpu
from motet_kernels.linear.group_weights import GroupWeights, can_join, joined
from motet_llm.models.experts import PackedExperts, gate_of, is_experts, mix
from motet_shared.errors import ConfigError

from .coded_linear import CodedLinear


class Codes(Protocol):
    """Read the quantized matrices of a checkpoint, by the names of their modules."""

    def has(self, module: str) -> bool: ...

    def read(self, module: str, features: int, inputs: int) -> GroupWeights: ...


class CodedExperts(nn.Module):
    """Compute experts with quantized matrices, replacing a module of which `is_experts` holds."""

    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None

    def __init__(self, original: Any, gate_up: list[GroupWeights], down: list[GroupWeights]):
        super().__init__()
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, getattr(original, name, None))
        self.gate_up, self.down, self.gate = gate_up, down, gate_of(original)

    def forward(self, hidden: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Compute with dequantized matrices, only to examine model code; see `packed`."""
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        products = self._linears()
        return mix(rows_TH, index_Tk, weights_Tk, self.gate, *products).view(hidden.shape)

    def _linears(self) -> tuple[list[CodedLinear], list[CodedLinear]]:
        return (
            _with_biases("gate_up_proj", self.gate_up, self.gate_up_proj_bias),
            _with_biases("down_proj", self.down, self.down_proj_bias),
        )

    def packed(self, device: torch.device, precise: bool) -> PackedExperts:
        """Return experts that compute the same on a CPU. Raises ConfigError for a GPU."""
        if gpu.is_gpu(device):
            raise ConfigError(
                "experts in codes are computed on CPUs only; give the original weights",
                param="device",
            )
        gate_up, down = self._linears()
        return PackedExperts(
            self.gate,
            [linear.packed(device, precise) for linear in gate_up],
            [linear.packed(device, precise) for linear in down],
        )


def _with_biases(
    name: str, codes: Sequence[GroupWeights], bias_EN: Tensor | None
) -> list[CodedLinear]:
    biases = [None] * len(codes) if bias_EN is None else list(bias_EN)
    return [CodedLinear(name, *both) for both in zip(codes, biases, strict=True)]


def put_experts(model: PreTrainedModel, codes: Codes) -> None:
    """Replace experts that are quantized."""
    for name, module in [both for both in model.named_modules() if is_experts(both[1])]:
        experts: Any = module
        if codes.has(f"{name}.gate_up_proj"):
            read: Any = codes
            both = [
                read.read_stack(f"{name}.{part}", *_shape(experts, part))
                for part in ("gate_up_proj", "down_proj")
            ]
        elif codes.has(f"{name}.0.gate_proj"):
            both = _one_by_one(codes, name, experts)
        else:
            continue
        model.set_submodule(name, CodedExperts(experts, *both))


def _shape(experts: Any, part: str) -> tuple[int, int, int]:
    """Return how many experts there are, and a matrix's output and input features."""
    count, features, inputs = getattr(experts, part).shape
    return (count, inputs, features) if experts.is_transposed else (count, features, inputs)


def _one_by_one(codes: Codes, name: str, experts: Any) -> list[list[GroupWeights]]:
    count, features, inputs = _shape(experts, "gate_up_proj")
    gate_up, half = [], features // 2
    for number in range(count):
        parts = [
            codes.read(f"{name}.{number}.{part}", half, inputs) for part in ("gate_proj", "up_proj")
        ]
        if not can_join(parts):
            raise ConfigError(
                f"{name}.{number}: gate_proj and up_proj are quantized in different ways; "
                "give the original weights"
            )
        gate_up.append(joined(parts))
    _, features, inputs = _shape(experts, "down_proj")
    down = [codes.read(f"{name}.{number}.down_proj", features, inputs) for number in range(count)]
    return [gate_up, down]
