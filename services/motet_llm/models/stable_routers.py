"""Route tokens to experts by operations whose rows do not depend on each other.

Routers of mixtures hold a matrix of their own and call torch's product, which rounds a row otherwise
in a batch than alone; so does torch's sigmoid, whose last few numbers take another path than those
that fill a vector. In a deterministic model both are replaced within the blocks that route.
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
_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid)
_VECTORS = 64  # numbers: a multiple of what torch computes in one go, on every instruction set


class _StableOperations(TorchFunctionMode):
    """Replace sigmoids, and the product of a router.

    router: whose only product is packed, once for each type of its weights; None: products stay.
    """

    def __init__(self, router: nn.Module | None = None) -> None:
        super().__init__()
        self._router = router
        self._packed: dict[torch.dtype, Linear] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in _SIGMOIDS and not options:
            return _sigmoid(args[0])
        if func is F.linear and self._router is not None and args[1].dtype in _FORMS:
            return self._product(*args, **options)
        return func(*args, **options)

    def _product(self, x: Tensor, weight_NK: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = weight_NK.dtype
        if dtype not in self._packed:
            self._packed[dtype] = pack_linear(weight_NK, bias, _FORMS[dtype], x.device)
        product: Tensor = self._packed[dtype](x)
        return product


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of each number, whatever numbers are beside it."""
    step = _VECTORS * torch.get_num_threads()
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % step)).sigmoid_()
    return padded[: len(flat)].view(x.shape)


def install(model: nn.Module) -> int:
    """Have the blocks of a model that runs on the CPU route so; return the number of routers."""
    found = 0
    for parent in list(model.modules()):
        routers = [child for child in parent.children() if _is_router(child)]
        for router in routers:
            _wrap(router, _StableOperations(router))
        if routers:
            _wrap(parent, _StableOperations())
        found += len(routers)
    return found


def _wrap(module: nn.Module, operations: _StableOperations) -> None:
    module.forward = partial(_within, operations, module.forward)


def _is_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "router" in type(module).__name__.lower()
        and isinstance(weight, Tensor)
        and weight.dim() == 2
    )


def _within(
    operations: _StableOperations, forward: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    with operations:
        return forward(*args, **options)
