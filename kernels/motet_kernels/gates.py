"""Activations: sigmoid, SiLU, softplus, GELU, and gates times what they let through.

torch computes the last elements of a tensor, and of each thread's part of it, in other code than the rest, so that an
element's bits depend on where it lies. Native code does not. Shapes: M rows, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import is_cpu
from .errors import KernelError
from .native import Kernel

_GATE = Kernel("motet_gate", "pipiii")
_GATED_KERNEL = Kernel("motet_gated", "pipiii")
_GATED: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
_TWINS = (torch.sigmoid, F.silu, F.softplus, F.gelu, _GATED["gelu_tanh"])


def sigmoid(x_MC: Tensor) -> Tensor:
    """`1 / (1 + e^-x)`, dense float32 like the input; its rows may be strided."""
    return _gate(x_MC, 0)


def silu(x_MC: Tensor) -> Tensor:
    """`x · sigmoid(x)`."""
    return _gate(x_MC, 1)


def softplus(x_MC: Tensor) -> Tensor:
    """`log(1 + e^x)`."""
    return _gate(x_MC, 2)


def gelu(x_MC: Tensor) -> Tensor:
    """`x · Φ(x)`, Φ the normal distribution (Hendrycks and Gimpel 2016), within 3e-7 · |x|."""
    return _gate(x_MC, 3)


def gelu_tanh(x_MC: Tensor) -> Tensor:
    """`x · Φ(x)` as tanh approximates it."""
    return _gate(x_MC, 4)


def gated(x: Tensor, activation: str) -> Tensor:
    """`activation(gate) · up` of rows `[..., 2C]` that hold both, `[..., C]`; "silu" or "gelu_tanh", in x's type."""
    if activation not in _GATED or x.shape[-1] % 2:
        raise KernelError(f"{activation!r} of {x.shape[-1]}: give silu or gelu_tanh, and gate and up of equal width")
    x_MC = x.reshape(-1, x.shape[-1])
    native = _GATED_KERNEL.native() if is_cpu(x) and x.dtype == torch.float32 else None
    if native is None:
        gate, up = x.float().chunk(2, dim=-1)
        return (_GATED[activation](gate) * up).to(x.dtype)
    if x_MC.stride(1) != 1:
        x_MC = x_MC.contiguous()
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2)
    kind = list(_GATED).index(activation)
    native(x_MC.data_ptr(), x_MC.stride(0), out.data_ptr(), len(x_MC), out.shape[-1], kind)
    return out


def _gate(x_MC: Tensor, kind: int) -> Tensor:
    if x_MC.dtype != torch.float32 or x_MC.dim() != 2 or (x_MC.stride(1) != 1 and x_MC.shape[1] > 1):
        raise KernelError(
            f"x_MC: {x_MC.dtype} of shape {list(x_MC.shape)}, strides {list(x_MC.stride())}, must be rows of float32"
        )
    native = _GATE.native() if is_cpu(x_MC) else None
    if native is None:
        return _TWINS[kind](x_MC).contiguous()
    out_MC = torch.empty(x_MC.shape)
    native(x_MC.data_ptr(), x_MC.stride(0), out_MC.data_ptr(), *x_MC.shape, kind)
    return out_MC
