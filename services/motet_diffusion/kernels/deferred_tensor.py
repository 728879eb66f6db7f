"""Defer tensors until their next operation is known, so that one kernel computes both.

A norm whose result is scaled and shifted, or goes through an activation, need not be written to
memory first. Its function returns a `DeferredTensor` instead, and the next operation on that
decides: either one kernel computes both (`DeferredWork.after`), or the operation gets the value as if it
had been computed before. So the code of a model is neither read nor changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class DeferredWork(ABC):
    """Represent a pending computation. Its inputs must not change until it is computed."""

    _value: Tensor | None = None

    @abstractmethod
    def compute(self) -> Tensor:
        """Return the value."""

    @abstractmethod
    def after(self, operation: Any, args: Sequence[Any]) -> Any:
        """Return the result of a `torch.ops.aten` operation on the value, or None if not fusible.

        The tensors in `args` are those of the call, this one's `DeferredTensor` among them.
        """

    @property
    def value(self) -> Tensor:
        """Return the value, computed on first use."""
        if self._value is None:
            self._value = self.compute()
        return self._value

    @property
    def is_open(self) -> bool:
        """Return True if the value is not computed yet; a computed one may have changed since."""
        return self._value is None


class DeferredTensor(Tensor):
    """Represent a pending tensor with shape, dtype, device and layout of `like`; no gradients."""

    work: DeferredWork

    @staticmethod
    def __new__(cls, work: DeferredWork, like: Tensor) -> DeferredTensor:
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.work = work
        return made

    def __init__(self, work: DeferredWork, like: Tensor):
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not kwargs:
            for arg in args:
                if not isinstance(arg, DeferredTensor) or not arg.work.is_open:
                    continue
                if (result := arg.work.after(operation, args)) is not None:
                    return result
        return operation(*tree_map(materialized, args), **tree_map(materialized, kwargs or {}))


def materialized(value: Any) -> Any:
    """Return the value of a deferred tensor, and anything else unchanged."""
    return value.work.value if isinstance(value, DeferredTensor) else value


def other(args: Sequence[Any], work: DeferredWork) -> Any:
    """Return the argument, of two, that the work is combined with."""
    one, two = args
    return two if isinstance(one, DeferredTensor) and one.work is work else one
