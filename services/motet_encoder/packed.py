"""Run a tower on Motet's kernels: packed matrices, norms and activations in transformers' modules.

On a CPU the result of a row depends on that row alone, so pictures do not depend on their batch.
Parts that no feature reads are left out: LLaVA and its relatives take their features from a layer
before the last one (`vision_feature_layer`), while transformers computes the whole tower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, SiLUActivation

from motet_kernels import gpu
from motet_kernels.gates import gelu_tanh
from motet_kernels.linear.activated_linear import activated_linear, gated_linear
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import pack_linear
from motet_kernels.norm import layer_norm, rms_norm
from motet_kernels.runtime import native

_ACTIVATIONS: dict[type, str] = {SiLUActivation: "silu", nn.SiLU: "silu", GELUTanh: "gelu_tanh"}
Parts = tuple[tuple[nn.Linear, ...], nn.Linear, str]  # of an MLP, as `MLP` takes them
_COMPARED = 4  # rows
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # relative
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
    if (
        type(module) is nn.LayerNorm
        and len(module.normalized_shape) == 1
        and module.bias is not None
    ):
        return FastNorm(module)
    return _rms_norm(module) or _mlp(module, weights)


def _rms_norm(module: nn.Module) -> nn.Module | None:
    """Return a module that computes the same as `module`, if that is a root mean square norm."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if (
        not type(module).__name__.endswith("RMSNorm")
        or not isinstance(weight, Tensor)
        or weight.dim() != 1
        or not isinstance(eps, float)
    ):
        return None
    fast = FastRMSNorm(weight, eps)
    return fast if _same(fast, module, len(weight), weight) else None


def _mlp(module: nn.Module, weights: str) -> nn.Module | None:
    """Return an `MLP` that computes the same as `module`, if that is one, gated or not."""
    parts = _gated_parts(module) or _plain_parts(module)
    if parts is None:
        return None
    exact, read = MLP(*parts, "exact"), parts[0][0]
    if not _same(exact, module, read.in_features, read.weight):
        return None
    return exact if weights == "exact" else MLP(*parts, weights)


def _gated_parts(module: nn.Module) -> Parts | None:
    """Return the parts of `down(activation(gate(x)) · up(x))`."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)))
    if (
        not (type(gate) is type(up) is type(down) is nn.Linear)
        or (gate.bias is None) != (up.bias is None)
        or gate.out_features != up.out_features
        or activation is None
    ):
        return None
    return (gate, up), down, activation


def _plain_parts(module: nn.Module) -> Parts | None:
    """Return the parts of `fc2(activation(fc1(x)))`."""
    first, last = getattr(module, "fc1", None), getattr(module, "fc2", None)
    activation = _ACTIVATIONS.get(type(getattr(module, "activation_fn", None)))
    if not type(first) is type(last) is nn.Linear or activation is None:
        return None
    return (first,), last, activation


@torch.inference_mode()
def _same(fast: nn.Module, module: nn.Module, width: int, like: Tensor) -> bool:
    """Return True if both modules give the same for random rows, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_COMPARED, width, generator=generator).to(like)
    wanted, found = module(x).float(), fast(x).float()
    return bool((found - wanted).norm() <= _TOLERANCES[like.dtype] * wanted.norm())


def _matrix(weight: Tensor, bias: Tensor | None, weights: str) -> Linear:
    form = "int8" if weights == "int8" else str(weight.dtype).removeprefix("torch.")
    return pack_linear(weight.detach(), None if bias is None else bias.detach(), form)


def _is_one_patch(conv: nn.Conv3d) -> bool:
    return conv.kernel_size == conv.stride and conv.groups == 1 and not any(map(int, conv.padding))


def leave_out(towers: PreTrainedModel) -> None:
    """Replace what no feature of `towers` depends on; the numbers of the other layers stay."""
    for module in towers.modules():
        if getattr(module, "use_head", False):
            module.use_head = False  # what it computed is `pooler_output`, a vector per picture
            del module.head
    tower = getattr(towers, "vision_tower", None)
    wanted = getattr(towers.config, "vision_feature_layer", None)
    if isinstance(tower, PreTrainedModel) and wanted is not None:
        layers = _layers(tower)
        deepest = max(_number(index, len(layers)) for index in _as_list(wanted))
        for layer in layers[deepest:]:
            _skip(layer)


def _as_list(wanted: int | list[int]) -> list[int]:
    return [wanted] if isinstance(wanted, int) else list(wanted)


def _number(index: int, num_layers: int) -> int:
    """Return the number of layers below hidden state `index`, of which there are `num_layers` + 1."""
    return index if index >= 0 else num_layers + 1 + index


def _layers(tower: PreTrainedModel) -> list[nn.Module]:
    """Return the layers whose outputs are the tower's hidden states, in order."""
    recorded = getattr(tower, "_can_record_outputs", None) or {}
    kind: Any = recorded.get("hidden_states")
    return [] if kind is None else [m for m in tower.modules() if isinstance(m, kind)]


def _skip(layer: nn.Module) -> None:
    """Make a layer return its input, and drop its weights."""
    for name in list(layer._modules):
        delattr(layer, name)
    layer.forward = _unchanged


def _unchanged(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


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
        return gelu_tanh(x.reshape(-1, x.shape[-1])).view(x.shape)


class MLP(nn.Module):
    """Compute `last(activation(first(x)))`, or `last(activation(gate(x)) · up(x))`.

    first: the one matrix, or gate and up, which are one product.
    """

    def __init__(
        self, first: tuple[nn.Linear, ...], last: nn.Linear, activation: str, weights: str
    ):
        super().__init__()
        biases: list[Tensor] = [linear.bias for linear in first if linear.bias is not None]
        weights_of: list[Tensor] = [linear.weight for linear in first]
        bias = torch.cat(biases) if biases else None
        self._first = _matrix(torch.cat(weights_of), bias, weights)
        self._last = _matrix(last.weight, last.bias, weights)
        self._activate = activated_linear if len(first) == 1 else gated_linear
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._last(self._activate(self._first, x, self._activation))
        return out


class FastRMSNorm(nn.Module):
    """Compute a root mean square norm in one pass, with weights in float32."""

    weight: Tensor

    def __init__(self, weight_C: Tensor, eps: float):
        super().__init__()
        self._eps = eps
        self.register_buffer("weight", weight_C.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps)


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
