"""Wrap the modules that pictures share, for the pipeline of one picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
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


class LockedVae:
    """Serialize the use of the VAE: one picture at a time encodes, decodes, or has it cast.

    Some pipelines cast their VAE to float32, use it, and cast it back. A picture has the lock from
    the first cast to the last, and all others see `dtype`, the type that the VAE has otherwise.

    lock: reentrant. decode: in place of the VAE's own.
    """

    def __init__(
        self,
        vae: Any,
        lock: Lock,
        dtype: torch.dtype,
        decode: Callable[..., Any] | None = None,
    ):
        self._vae, self._lock, self._dtype = vae, lock, dtype
        self._is_cast = False
        self._held = ExitStack()  # has the lock while the VAE is cast
        self.encode = locked(lock, vae.encode)
        self.decode = locked(lock, decode or vae.decode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that the VAE has for this picture."""
        return self._vae.dtype if self._is_cast else self._dtype

    def to(self, *args: Any, **kwargs: Any) -> LockedVae:
        """Cast the VAE for this picture."""
        if not self._is_cast:
            self._held.enter_context(self._lock)
            self._is_cast = True
        self._vae.to(*args, **kwargs)
        if self._vae.dtype == self._dtype:
            self._release()
        return self

    def restore(self) -> None:
        """Cast the VAE back if this picture has left it cast, as it does when it fails."""
        if self._is_cast:
            try:
                self._vae.to(self._dtype)
            finally:
                self._release()

    def _release(self) -> None:
        self._is_cast = False
        self._held.close()


def locked(lock: Lock, work: Callable[..., Any]) -> Callable[..., Any]:
    def locked_call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return work(*args, **kwargs)

    return locked_call
