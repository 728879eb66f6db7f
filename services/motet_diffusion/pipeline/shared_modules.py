"""Wrap the modules that pictures share, for the pipeline of one picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from motet_diffusion.engine.merge import Call

Lock = AbstractContextManager[Any]


class SharedDenoiser:
    """Replace a pipeline's denoiser: calls go to the engine, attribute access to the module."""

    def __init__(
        self, module: nn.Module, signature: inspect.Signature, denoise: Callable[[Call], Any]
    ):
        self._module, self._signature, self._denoise = module, signature, denoise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._denoise(self._signature.bind(*args, **kwargs).arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def cache_context(self, name: str, **_step: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def _reset_stateful_cache(self) -> None:
        """Do nothing, as other pictures are using the module."""


class LockedModule:
    """Serialize some methods of a module, so that one picture at a time uses them."""

    def __init__(self, module: nn.Module, lock: Lock, names: tuple[str, ...]):
        self._module = module
        for name in names:
            setattr(self, name, locked(lock, getattr(module, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def locked(lock: Lock, work: Callable[..., Any]) -> Callable[..., Any]:
    def locked_call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return work(*args, **kwargs)

    return locked_call
