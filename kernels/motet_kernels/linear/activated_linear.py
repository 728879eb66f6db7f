"""Apply an activation to a product where its results are still in the cache.

For many rows the product's float32 results, which are larger than a cache, are then never written.
Bits are the same either way: those of `activation(product in float32)`, rounded once.

Shapes: M rows, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from motet_kernels import gates
from motet_kernels.linear.linear import Linear, input_arguments
from motet_kernels.linear.panels import PANEL
from motet_kernels.runtime.arguments import is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

_ACTIVATED = Kernel("motet_linear_activated", "piipippiiiiiii")
_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": gates.silu,
    "gelu_tanh": gates.gelu_tanh,
    "gelu": gates.gelu,
}
MANY_ROWS = 64  # from which on the product's results leave the cache


def activated_linear(
    linear: Linear, x: Tensor, activation: str, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return `activation(linear(x))` `[..., N]`.

    activation: "silu", "gelu_tanh" or "gelu". dtype: of the result, float32 or bfloat16, by default
    that of x. Raises `KernelError` on another activation, and as `linear` does.
    """
    dtype = x.dtype if dtype is None else dtype
    if activation not in _KINDS:
        raise KernelError(f"activation: {activation!r}; give one of {', '.join(_KINDS)}")
    fused = _fused(linear, x, activation, dtype, gated=False)
    if fused is not None:
        return fused
    wide = _wide(linear, x)
    return _KINDS[activation](wide.reshape(-1, wide.shape[-1])).view(wide.shape).to(dtype)


def gated_linear(linear: Linear, x: Tensor, activation: str, *, narrows: bool = False) -> Tensor:
    """Return `activation(gate) · up` `[..., N]` of a product `[..., 2N]` that holds both.

    The gate is its first half. activation: "silu" or "gelu_tanh". The result is of x's type. With
    `narrows`, for what rounds its input to bfloat16 anyway, it is bfloat16 where that saves time,
    else float32. Raises `KernelError` on another activation, and as `linear` does.
    """
    dtype = torch.bfloat16 if narrows else x.dtype
    fused = _fused(linear, x, activation, dtype, gated=True)
    if fused is not None:
        return fused
    made = gates.gated(_wide(linear, x), activation)
    return made if narrows else made.to(dtype)


def _fused(
    linear: Linear, x: Tensor, activation: str, dtype: torch.dtype, *, gated: bool
) -> Tensor | None:
    """Return the result of the one kernel; None where it is of no use."""
    if not _is_plain(linear) or not linear.is_exact:
        return None
    rows, width = x.numel() // linear.in_features, linear.out_features // (1 + gated)
    if (
        rows < MANY_ROWS
        or not is_cpu(x)
        or (gated and linear.out_features % (2 * PANEL))
        or (gated and activation == "gelu")
    ):
        return None
    kernel = _ACTIVATED.native()
    if kernel is None:
        return None
    linear.check(x, None)
    out = x.new_empty((*x.shape[:-1], width), dtype=dtype)
    _kept, inputs = input_arguments(x, linear.in_features)
    kernel(
        *inputs, *linear.weight_arguments, out.data_ptr(), dtype == torch.bfloat16, width,
        rows, width, linear.in_features, list(_KINDS).index(activation), gated,
    )  # fmt: skip
    return out


def _is_plain(linear: nn.Module) -> bool:
    return isinstance(linear, Linear) and linear.is_plain


def _wide(linear: Linear, x: Tensor) -> Tensor:
    """Return the product in float32, or in the type of x where the format computes in another way."""
    if _is_plain(linear) and is_cpu(x):
        return linear.into(torch.float32, x)
    out: Tensor = linear(x)
    return out
