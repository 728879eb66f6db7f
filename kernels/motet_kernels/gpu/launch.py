"""Launch kernels in a configuration that ships or was chosen: on a GPU, in the interpreter, or not.

In place of a launch, a call may be handed to a compiler (`compiling`).

    _NORM = GpuKernel(_norm, Config(warps=4))
    _NORM(grid, x, out, len(x), BLOCK=1024)

A call names every constant that determines the result; a `Config` adds those that determine only
the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Constants = Mapping[str, Any]
Grid = tuple[int, ...] | Callable[[Constants], tuple[int, ...]]
Fits = Callable[[Constants], bool]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hold a launch configuration of a kernel.

    warps: warps of 32 threads per program.
    stages: stages of the software pipeline.
    constants: tile sizes.
    """

    warps: int = 4
    stages: int = 2
    constants: Constants = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = "".join(f" {name.lower()}={value}" for name, value in self.constants.items())
        return f"warps={self.warps} stages={self.stages}{sizes}"


@dataclass(frozen=True)
class LaunchSample:
    """Describe a call of a launcher as services make it, on CPU tensors, for the compiler.

    label: sizes and types, torch's types without their prefix.
    mma: whether matrix units must be used.
    """

    label: str
    call: Callable[[], object]
    mma: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label.replace("torch.", ""))


@dataclass(frozen=True)
class Launch:
    """Represent a call that is compiled instead of launched."""

    kernel: GpuKernel
    config: Config
    args: tuple[Any, ...]
    constants: Constants


Chooser = Callable[["GpuKernel", tuple[Any, ...], Constants], Config]
Tuner = Callable[["GpuKernel", Grid, tuple[Any, ...], Constants], Config]

_compiler: ContextVar[Callable[[list[Launch]], None] | None] = ContextVar("compiler", default=None)
_tuner: ContextVar[Tuner | None] = ContextVar("tuner", default=None)
_chooser: Chooser | None = None


class GpuKernel:
    """Launch a Triton function in a configuration that `fits` the constants of a call.

    That is the first one, unless a chooser prefers another on this device (`gpu/tuning.py`).

    function: the result of `@triton.jit`.
    configs: in the order of preference.
    fits: predicate on a call's and a configuration's constants together (default: always True).

    A grid may be a function of these constants.
    """

    def __init__(self, function: Any, *configs: Config, fits: Fits = lambda constants: True):
        self.function, self.configs, self.fits = function, configs, fits
        self.name: str = function.fn.__name__.strip("_")

    def candidates(self, constants: Constants) -> Iterator[Config]:
        """Return the configurations for a call with these constants, the one that ships first."""
        return (config for config in self.configs if self.fits({**constants, **config.constants}))

    def __call__(self, grid: Grid, *args: Any, **constants: Any) -> None:
        if (compiler := _compiler.get()) is not None:
            compiler(
                [
                    Launch(self, config, args, {**constants, **config.constants})
                    for config in self.candidates(constants)
                ]
            )
            return
        self.run(self._choose(grid, args, constants), grid, *args, **constants)

    def _choose(self, grid: Grid, args: tuple[Any, ...], constants: Constants) -> Config:
        if (tuner := _tuner.get()) is not None:
            return tuner(self, grid, args, constants)
        if _chooser is not None and _on_gpu(args):
            return _chooser(self, args, constants)
        return next(self.candidates(constants))

    def run(self, config: Config, grid: Grid, *args: Any, **constants: Any) -> None:
        """Launch in this configuration."""
        every = {**constants, **config.constants}
        sizes = grid(every) if callable(grid) else grid
        if 0 in sizes:
            return
        with _device_of(args):
            self.function[sizes](*args, **every, num_warps=config.warps, num_stages=config.stages)


@contextmanager
def compiling(compiler: Callable[[list[Launch]], None]) -> Iterator[None]:
    """Pass each call to `compiler` instead of launching it, within the context.

    The compiler gets the call once per configuration, the shipped one first.
    """
    token = _compiler.set(compiler)
    try:
        yield
    finally:
        _compiler.reset(token)


@contextmanager
def choosing(tuner: Tuner) -> Iterator[None]:
    """Ask `tuner` for the configuration of each call, within the context."""
    token = _tuner.set(tuner)
    try:
        yield
    finally:
        _tuner.reset(token)


def set_chooser(chooser: Chooser | None) -> None:
    """Have `chooser` pick the configurations of calls on GPUs; None: those that ship."""
    global _chooser
    _chooser = chooser


def _on_gpu(args: tuple[Any, ...]) -> bool:
    return next(arg for arg in args if isinstance(arg, Tensor)).is_cuda


def _device_of(args: tuple[Any, ...]) -> Any:
    """Return a context with the tensors' device as the current one, on which Triton launches."""
    first = next(arg for arg in args if isinstance(arg, Tensor))
    return torch.cuda.device_of(first)
