"""Compute the scores of routers by products whose rows do not depend on each other.

Routers of mixtures hold a matrix of their own and call torch's product, which rounds a row otherwise
in a batch than alone. A deterministic model computes these products by packed matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import pack_linear

_FORMS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _PackedProducts(TorchFunctionMode):
    """Replace `F.linear` of float32 or bfloat16 weights by a packed product, made once for each type."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[torch.dtype, Linear] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is not F.linear or options or args[1].dtype not in _FORMS:
            return func(*args, **options)
        x, weight_NK, *bias = args
        if weight_NK.dtype not in self._packed:
            form = _FORMS[weight_NK.dtype]
            self._packed[weight_NK.dtype] = pack_linear(
                weight_NK, bias[0] if bias else None, form, x.device
            )
        return self._packed[weight_NK.dtype](x)


def install(model: nn.Module) -> int:
    """Have the routers of a model that runs on the CPU use packed products; return how many do."""
    found = [module for module in model.modules() if _is_router(module)]
    for module in found:
        products = _PackedProducts()
        module.forward = partial(_routed, products, module.forward)
    return len(found)


def _is_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "router" in type(module).__name__.lower()
        and isinstance(weight, Tensor)
        and weight.dim() == 2
    )


def _routed(
    products: _PackedProducts, forward: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    with products:
        return forward(*args, **options)
