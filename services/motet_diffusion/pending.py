"""Tensors that are computed when it is known what happens to them, so that one kernel does both.

A norm whose result is scaled and shifted, or goes through an activation, needs not be written to memory before. What
computes it returns a `Pending` instead, and the next operation on that decides: either it goes on (`Work.after`), or it
gets the value as if that had been there from the start. So the code of a model is neither read nor changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Work(ABC):
    """What is to be computed. Its inputs are not changed until it is."""

    _value: Tensor | None = None

    @abstractmethod
    def compute(self) -> Tensor:
        """The value."""

    @abstractmethod
    def after(self, operation: Any, args: Sequence[Any]) -> Any:
        """The result of an operation of torch's (`torch.ops.aten`) on the value and others, or None: no more than that.

        The tensors in `args` are those of the call, this one's `Pending` among them.
        """

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._value = self.compute()
        return self._value

    @property
    def is_open(self) -> bool:
        """Whether nobody has asked for the value: it may have been changed since."""
        return self._value is None


class Pending(Tensor):
    """A tensor in shape, type and device of `like`, dense as that one is. Needs no gradients, and has none."""

    work: Work

    @staticmethod
    def __new__(cls, work: Work, like: Tensor) -> Pending:
        made: Pending = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.work = work
        return made

    def __init__(self, work: Work, like: Tensor):
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not kwargs:
            for arg in args:
                if not isinstance(arg, Pending) or not arg.work.is_open:
                    continue
                if (result := arg.work.after(operation, args)) is not None:
                    return result
        return operation(*tree_map(known, args), **tree_map(known, kwargs or {}))


def known(value: Any) -> Any:
    """The value of what is pending; anything else as it is."""
    return value.work.value if isinstance(value, Pending) else value


def other(args: Sequence[Any], work: Work) -> Any:
    """What the work is combined with, of two arguments."""
    one, two = args
    return two if isinstance(one, Pending) and one.work is work else one
