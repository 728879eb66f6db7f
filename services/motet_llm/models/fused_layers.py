"""Replace norms, gated MLPs and whole decoder layers of a packed model by fused versions.

At one token per step, Python and many small operators cost as much as a layer's matrices. So
modules that are built as in Llama (and Qwen, Mistral and similar families) compute the same in a
few calls. Whether a module is built so is not inferred from its name: the replacement runs beside
it on the same random input, and is used only if both give the same result. All others stay as they
are. They are compared in float32, whatever dtype the model is to run in, so that rounding hides no
difference.

Shapes: N packed tokens, H heads, K key/value heads, D head dimension, R rotary dimension.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_kernels import gpu
from motet_kernels.attention.head_norm import HeadNorm
from motet_kernels.attention.rotary import PackedHeads
from motet_kernels.linear.activated_linear import gated_linear
from motet_kernels.linear.linear import Linear
from motet_kernels.norm import add_rms_norm, rms_norm
from motet_llm.attention.options import AttentionOptions, Reach, Temperature
from motet_llm.attention.paged import Layout, RotatesHeads
from motet_llm.engine.step_memory import StepMemory
from motet_shared.errors import ConfigError

from .fused_modules import FusedModules
from .joined_linear import JoinedLinear, JoinedPart

POSITIONS = (
    0,
    41,
    997,
    30_011,
    123_457,
)  # positions of the compared tokens: far apart, since some modules scale with them
TOKENS = len(POSITIONS)
TOLERANCE = 1e-4
# Where matrices round their inputs, the last bit of an input may decide the direction. So layers
# are compared on several inputs and must agree on one; layers built differently agree on none.
ROUNDED_TOLERANCE = 1e-3
ATTEMPTS = 8


def install(
    model: PreTrainedModel, device: torch.device, known: FusedModules | None = None
) -> FusedModules:
    """Replace modules that have a fused version, inner ones first; return which.

    device: where the model is. known: what was found before for the same weights and code, so that
    nothing is compared.
    """
    found = FusedModules()
    with torch.inference_mode(), device:
        for parent, name, path, child in _children(model):
            norm = _norm_like(child) if known is None else _known_norm(child, known.norms.get(path))
            if norm is not None:
                setattr(parent, name, norm)
                found.norms[path] = norm.offset
        for parent, name, path, child in _children(model):
            mlp = _mlp_like(child) if known is None else _known_mlp(child, known.mlps.get(path))
            if mlp is not None:
                setattr(parent, name, mlp)
                found.mlps[path] = mlp.activation
        rotary: nn.Module | None = getattr(model.base_model, "rotary_emb", None)
        for parent, name, path, child in _children(model):
            if rotary is None or not _has_the_parts(child):
                continue
            layer = (
                _layer_like(child, rotary)
                if known is None
                else _known_layer(child, known.layers.get(path))
            )
            if layer is not None:
                setattr(parent, name, layer)
                found.layers[path] = layer.describe()
    return found


def _children(model: nn.Module) -> list[tuple[nn.Module, str, str, nn.Module]]:
    """Return all modules with their parents, their names there and in the model."""
    return [
        (parent, name, f"{path}.{name}" if path else name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
    ]


def _random(width: int, seed: int = 0) -> Tensor:
    """Return random input `[1, TOKENS, width]`, drawn on the CPU, on the default device."""
    x = torch.randn(1, TOKENS, width, generator=torch.Generator().manual_seed(seed), device="cpu")
    return x.to(torch.get_default_device())


def _same(replacement: Tensor, original: Any, tolerance: float = TOLERANCE) -> bool:
    if (
        not isinstance(original, Tensor)
        or replacement.shape != original.shape
        or not original.isfinite().all()
    ):
        return False
    return torch.allclose(
        replacement, original, rtol=tolerance, atol=tolerance * float(original.abs().max())
    )


# ---------------------------------------------------------------------------------------------------------------- norms
class Norm(nn.Module):
    """Compute a root mean square norm; `offset` is added to the weight."""

    def __init__(self, weight_C: Tensor, eps: float, offset: float):
        super().__init__()
        self.weight = nn.Parameter(weight_C, requires_grad=False)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)

    def after(self, matrix: Linear, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return `matrix(x) + residual` and its norm.

        On a CPU the matrix product adds the residual, on a GPU the norm does.
        """
        if gpu.takes(x):
            return add_rms_norm(matrix(x), residual, self.weight, self.eps, self.offset)
        total = matrix(x, residual)
        return total, self(total)

    def like(self, other: Norm) -> bool:
        """Return True if both differ in their weights only."""
        return (self.eps, self.offset) == (other.eps, other.offset)


def _norm_like(module: nn.Module) -> Norm | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        "RMSNorm" not in type(module).__name__
        or not isinstance(weight, Tensor)
        or not isinstance(eps, float)
    ):
        return None
    if (
        weight.dim() != 1
        or not weight.is_floating_point()
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    x, wide = _random(len(weight)), weight.detach().float()
    original = module(x)
    return next(
        (n for n in (Norm(wide, eps, offset) for offset in (0.0, 1.0)) if _same(n(x), original)),
        None,
    )


def _known_norm(module: Any, offset: float | None) -> Norm | None:
    if offset is None:
        return None
    eps: float = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return Norm(module.weight.detach().float(), eps, offset)


# ----------------------------------------------------------------------------------------------------------------- MLPs
class Mlp(nn.Module):
    """Compute `down(activation(gate(x)) · up(x))`, with gate and up as one product."""

    def __init__(self, gate_up: JoinedLinear, down_proj: Linear, activation: str):
        super().__init__()
        self.gate_up, self.down_proj, self.activation = gate_up, down_proj, activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the output; a `residual` of x's shape is added to it."""
        down, linear = self.down_proj, self.gate_up.linear
        if isinstance(down, Linear) and down.is_plain and down.format == "bfloat16":
            hidden = gated_linear(linear, x, self.activation, narrows=True)
            return down.into(x.dtype, hidden, residual)
        output: Tensor = down(gated_linear(linear, x, self.activation), residual)
        return output


def _mlp_like(module: nn.Module) -> Mlp | None:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (
        isinstance(gate, JoinedPart)
        and isinstance(up, JoinedPart)
        and gate.joined is up.joined
        and _is_product(down)
    ):
        return None
    if (
        gate.stop - gate.start != up.stop - up.start
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    x = _random(gate.joined.linear.in_features)
    original = module(x)
    kinds = (Mlp(gate.joined, down, activation) for activation in ("silu", "gelu_tanh"))
    return next((mlp for mlp in kinds if _same(mlp(x), original)), None)


def _known_mlp(module: Any, activation: str | None) -> Mlp | None:
    return (
        None if activation is None else Mlp(module.gate_proj.joined, module.down_proj, activation)
    )


# --------------------------------------------------------------------------------------------------------------- layers
class FusedLayer(nn.Module):
    """Compute a decoder layer: norm, attention, residual, norm, MLP, residual."""

    def __init__(self, original: Any, scale: float, options: AttentionOptions):
        super().__init__()
        attention: Any = original.self_attn
        self.first_norm: Norm = original.input_layernorm
        self.second_norm: Norm = original.post_attention_layernorm
        self.qkv: JoinedLinear = attention.q_proj.joined
        self.o_proj: Linear = attention.o_proj
        self.mlp: Mlp = original.mlp
        self.q_norm: Norm | None = getattr(attention, "q_norm", None)
        self.k_norm: Norm | None = getattr(attention, "k_norm", None)
        self.layer_idx: int = attention.layer_idx
        self.dim: int = attention.head_dim
        self.num_queries = attention.q_proj.stop // self.dim
        self.num_keys = attention.k_proj.stop // self.dim - self.num_queries
        self.scale, self.options = scale, options

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        layout: Layout | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the output; input and output are `[1, N, hidden]`.

        Raises ConfigError without a layout, and for a mask: rows are packed.
        """
        if layout is None or position_embeddings is None or attention_mask is not None:
            raise ConfigError(
                f"layer {self.layer_idx}: packed rows come with a layout and positions, without a mask"
            )
        memory: StepMemory | None = getattr(layout, "memory", None)
        if memory is None:
            return self._read(hidden_states, position_embeddings, layout)
        return memory.run(
            self.layer_idx, partial(self._read, layout=layout), hidden_states, position_embeddings
        )

    def describe(self) -> list[Any]:
        """Return how it attends, as `_known_layer` takes it."""
        options = self.options
        return [self.scale, options.reach, options.softcap, options.temperature]

    def _read(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Layout
    ) -> Tensor:
        heads_NC = self.qkv.linear(self.first_norm(hidden_states))[0]
        cos, sin = position_embeddings
        heads = PackedHeads(
            heads_NC, self.num_queries, self.num_keys, self.dim, cos[0], sin[0], self._head_norm()
        )
        out = layout.attend_heads(self.layer_idx, heads, self.scale, self.options)
        hidden_states, normed = self.second_norm.after(self.o_proj, out.flatten(2), hidden_states)
        output: Tensor = self.mlp(normed, hidden_states)
        return output

    def _head_norm(self) -> HeadNorm | None:
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return None
        return HeadNorm(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset)


class _Recorder(RotatesHeads):
    """Attend within one sequence, and record the scale and options of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, AttentionOptions]] = []

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions,
    ) -> Tensor:
        self.calls.append((scale, options))
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        weights = (query @ key.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2)


def _layer_like(module: Any, rotary: nn.Module) -> FusedLayer | None:
    """Return a fused layer if the module has the same structure and result; else None."""
    rounded = module.self_attn.o_proj.format != "float32"
    try:
        tried = (_try_layer(module, rotary, seed) for seed in range(ATTEMPTS if rounded else 1))
        return next((layer for layer in tried if layer is not None), None)
    except (ConfigError, TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return None  # the module takes other arguments than such a layer: it stays as it is


def _try_layer(module: Any, rotary: nn.Module, seed: int) -> FusedLayer | None:
    """Return a `FusedLayer` of the module's parts if both give the same on the input of `seed`."""
    x = _random(module.self_attn.q_proj.joined.linear.in_features, seed)
    recorder = _Recorder()
    positions = torch.tensor([POSITIONS])
    turns = rotary(x, positions)
    options: dict[str, Any] = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": turns,
    }
    original = module(x, **options, layout=recorder)
    if len(recorder.calls) != 1 or recorder.calls[0][1].sinks_H is not None:
        return None
    layer = FusedLayer(module, *recorder.calls[0])
    tolerance = TOLERANCE if layer.o_proj.format == "float32" else ROUNDED_TOLERANCE
    return layer if _same(layer(x, **options, layout=recorder), original, tolerance) else None


def _known_layer(module: Any, how: list[Any] | None) -> FusedLayer | None:
    if how is None:
        return None
    scale, reach, softcap, temperature = how
    options = AttentionOptions(
        reach=Reach(*reach),
        softcap=softcap,
        temperature=None if temperature is None else Temperature(*temperature),
    )
    return FusedLayer(module, scale, options)


def _has_the_parts(module: Any) -> bool:
    attention = getattr(module, "self_attn", None)
    if attention is None or not isinstance(getattr(module, "mlp", None), Mlp):
        return False
    wanted = {
        Norm: (module, "input_layernorm post_attention_layernorm"),
        JoinedPart: (attention, "q_proj k_proj v_proj"),
    }
    for kind, (owner, names) in wanted.items():
        if not all(isinstance(getattr(owner, name, None), kind) for name in names.split()):
            return False
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    plain = q_norm is None and k_norm is None
    alike = isinstance(q_norm, Norm) and isinstance(k_norm, Norm) and q_norm.like(k_norm)
    return _is_product(getattr(attention, "o_proj", None)) and (plain or alike)


def _is_product(module: Any) -> TypeGuard[Linear]:
    """Return True for a packed matrix that adds a residual, or one that is summed over ranks."""
    return isinstance(module, Linear) or isinstance(getattr(module, "summed", None), Linear)
