"""Compute activations (sigmoid, SiLU, softplus, GELU) and gated activations.

torch computes the last elements of a tensor, and of each thread's part of it, with other code than
the rest, so an element's bits depend on its position. The native kernels do not have this
dependence.

Shapes: M rows, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.arguments import FLOATS, GPU_FLOATS, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

_GATE = Kernel("motet_gate", "piipiii")
_GATED_KERNEL = Kernel("motet_gated", "piipiii")
_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
# In the order of the native kernel's enumeration.
_TWINS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "gelu_tanh": _GATED["gelu_tanh"],
}
_KINDS = {name: kind for kind, name in enumerate(_TWINS)}


def sigmoid(x_MC: Tensor) -> Tensor:
    """Return `1 / (1 + e^-x)`, dense and in x's type.

    x is float32, bfloat16 or float16; its rows may be strided.
    """
    return _gate(x_MC, "sigmoid")


def silu(x_MC: Tensor) -> Tensor:
    """Return `x · sigmoid(x)`."""
    return _gate(x_MC, "silu")


def softplus(x_MC: Tensor) -> Tensor:
    """Return `log(1 + e^x)`."""
    return _gate(x_MC, "softplus")


def gelu(x_MC: Tensor) -> Tensor:
    """Return `x · Φ(x)`, within 3e-7 · |x|; Φ is the normal CDF (Hendrycks and Gimpel 2016)."""
    return _gate(x_MC, "gelu")


def gelu_tanh(x_MC: Tensor) -> Tensor:
    """Return `x · Φ(x)` in the tanh approximation."""
    return _gate(x_MC, "gelu_tanh")


def gated(x: Tensor, activation: str) -> Tensor:
    """Return `activation(gate) · up` of rows `[..., 2C]` that hold both: `[..., C]` in x's type.

    `activation` is "silu" or "gelu_tanh"; the gate is the first half of a row. x is float32,
    bfloat16 or float16, as for the activations; native for float32 and bfloat16 on the CPU. Raises
    `KernelError` on others and on an odd width.
    """
    if activation not in _GATED or x.shape[-1] % 2:
        raise KernelError(
            f"activation: {activation!r} of {x.shape[-1]}; give silu or gelu_tanh, and gate and up of equal width"
        )
    if x.dtype not in GPU_FLOATS:
        raise KernelError(f"x: {x.dtype} must be float32, bfloat16 or float16")
    if gpu.takes(x):
        from motet_kernels.gpu import gates as kernels

        return kernels.gated(_rows(x), activation).view(*x.shape[:-1], x.shape[-1] // 2)
    native = _GATED_KERNEL.native() if is_cpu(x) and x.dtype in FLOATS else None
    if native is None:
        return gated_torch(x, activation)
    x_MC = _rows(x)
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype)
    kind = list(_GATED).index(activation)
    rows = x_MC.data_ptr(), x.dtype == torch.bfloat16, x_MC.stride(0)
    native(*rows, out.data_ptr(), len(x_MC), out.shape[-1], kind)
    return out


def gated_torch(x: Tensor, activation: str) -> Tensor:
    """Compute `gated` in torch: its twin."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (_GATED[activation](gate) * up).to(x.dtype)


def _rows(x: Tensor) -> Tensor:
    """Return x as rows `[M, C]` with contiguous channels."""
    x_MC = x.reshape(-1, x.shape[-1])
    return x_MC if x_MC.stride(1) == 1 else x_MC.contiguous()


def _gate(x_MC: Tensor, name: str) -> Tensor:
    if (
        x_MC.dtype not in GPU_FLOATS
        or x_MC.dim() != 2
        or (x_MC.stride(1) != 1 and x_MC.shape[1] > 1)
    ):
        raise KernelError(
            f"x_MC: {x_MC.dtype} of shape {list(x_MC.shape)}, strides {list(x_MC.stride())}, must be rows of float32, "
            "bfloat16 or float16"
        )
    if gpu.takes(x_MC):
        from motet_kernels.gpu import gates as kernels

        return kernels.activated(x_MC, name)
    native = _GATE.native() if is_cpu(x_MC) and x_MC.dtype in FLOATS else None
    if native is None:
        return activated_torch(x_MC, name)
    out_MC = torch.empty(x_MC.shape, dtype=x_MC.dtype)
    rows = x_MC.data_ptr(), x_MC.dtype == torch.bfloat16, x_MC.stride(0)
    native(*rows, out_MC.data_ptr(), *x_MC.shape, _KINDS[name])
    return out_MC


def activated_torch(x_MC: Tensor, name: str) -> Tensor:
    """Compute an activation in torch: the activations' twin. `name` is that of the function."""
    return (
        _TWINS[name](x_MC.to(torch.promote_types(x_MC.dtype, torch.float32)))
        .to(x_MC.dtype)
        .contiguous()
    )
