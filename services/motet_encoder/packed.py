"""Run a tower on Motet's kernels: transformers' modules with packed matrices and a faster GELU.

On a CPU the result of a row depends on that row alone, so pictures do not depend on their batch. On
a GPU layer norms and attention are replaced too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh

from motet_kernels import gpu
from motet_kernels.gates import gelu_tanh
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import pack_linear
from motet_kernels.norm import layer_norm
from motet_kernels.runtime import native

_LANGUAGE_TENSORS = ("language_model", "text_model")


def pack(model: nn.Module, weights: str) -> None:
    """Replace the matrices of `model`, outside of language layers, by packed ones.

    The originals are dropped. weights: "exact" keeps their dtype; "int8" rounds them per output
    channel, and activations per row. Without native kernels, a model on a CPU with exact weights is
    left to torch.
    """
    device = next(model.parameters()).device
    if weights == "exact" and not gpu.is_gpu(device) and native.load()["isa"] == "torch":
        return
    for name, parent in list(model.named_modules()):
        if any(part in _LANGUAGE_TENSORS for part in name.split(".")):
            continue
        for child_name, child in list(parent.named_children()):
            packed = _packed(child, weights)
            if packed is None and gpu.is_gpu(device):
                packed = _on_gpu(child)
            if packed is not None:
                setattr(parent, child_name, packed)


def _packed(module: nn.Module, weights: str) -> nn.Module | None:
    """Return the replacement of a module, or None."""
    if type(module) is nn.Linear:  # no subclasses: their weight is read by other code
        return _matrix(module.weight, module.bias, weights)
    if isinstance(module, nn.Conv3d) and _is_one_patch(module):
        return PatchMatrix(module)
    if isinstance(module, GELUTanh):
        return FastGELU()
    return None


def _on_gpu(module: nn.Module) -> nn.Module | None:
    """Return a further replacement of a module on a GPU, where every launch counts, or None."""
    if (
        type(module) is nn.LayerNorm
        and len(module.normalized_shape) == 1
        and module.bias is not None
    ):
        return FastNorm(module)
    return None


def _matrix(weight: Tensor, bias: Tensor | None, weights: str) -> Linear:
    form = "int8" if weights == "int8" else str(weight.dtype).removeprefix("torch.")
    return pack_linear(weight.detach(), None if bias is None else bias.detach(), form)


def _is_one_patch(conv: nn.Conv3d) -> bool:
    return conv.kernel_size == conv.stride and conv.groups == 1 and not any(map(int, conv.padding))


class PatchMatrix(nn.Module):
    """Compute a convolution over separate patches as a matrix product.

    Patches are `[N, C, frames, height, width]`.
    """

    def __init__(self, conv: nn.Conv3d):
        super().__init__()
        self._matrix = _matrix(conv.weight.flatten(1), conv.bias, "exact")
        self.weight = nn.Parameter(
            conv.weight.new_empty(0), requires_grad=False
        )  # models read its dtype

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self._matrix(patches.flatten(1))
        return out[:, :, None, None, None]


class FastGELU(nn.Module):
    """Compute GELU by tanh natively; torch's takes four times as long on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 and not gpu.takes(x):
            out: Tensor = nn.functional.gelu(x, approximate="tanh")
            return out
        return gelu_tanh(x.reshape(-1, x.shape[-1])).view(x.shape)


class FastNorm(nn.Module):
    """Compute a layer norm in one launch, with weights in float32."""

    weight: Tensor
    bias: Tensor

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self._eps = norm.eps
        # Buffers, not parameters: the dtype of a model is read from its first parameter.
        self.register_buffer("weight", norm.weight.detach().float())
        self.register_buffer("bias", norm.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self._eps)
