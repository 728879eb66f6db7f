"""How kernels are launched: with a configuration that ships, on a GPU, in the interpreter, or into a compiler only.

    _NORM = GpuKernel(_norm, Config(warps=4))
    _NORM(grid, x, out, len(x), BLOCK=1024)

A call names every constant that decides what is computed; a `Config` adds those that decide only how fast.
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
    """warps: of 32 threads, per program; stages: of the software pipeline; constants: sizes of what a program does."""

    warps: int = 4
    stages: int = 2
    constants: Constants = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = "".join(f" {name.lower()}={value}" for name, value in self.constants.items())
        return f"warps={self.warps} stages={self.stages}{sizes}"


@dataclass(frozen=True)
class Sample:
    """A call of a launcher as services make it, on tensors of the CPU: what is to compile.

    label: sizes and types, of torch's by their own names alone; mma: with matrix units.
    """

    label: str
    call: Callable[[], object]
    mma: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label.replace("torch.", ""))


@dataclass(frozen=True)
class Launch:
    """A call that a compiler is to see instead of a GPU."""

    kernel: GpuKernel
    config: Config
    args: tuple[Any, ...]
    constants: Constants


_compiler: ContextVar[Callable[[list[Launch]], None] | None] = ContextVar("compiler", default=None)


class GpuKernel:
    """A Triton function and its configurations: the first one that `fits` the constants of a call is what ships.

    function: what `@triton.jit` made; configs: in the order of preference; fits: of a call's constants and a
    configuration's together (default: any). A grid may be a function of these.
    """

    def __init__(self, function: Any, *configs: Config, fits: Fits = lambda constants: True):
        self.function, self.configs, self.fits = function, configs, fits
        self.name: str = function.fn.__name__.strip("_")

    def candidates(self, constants: Constants) -> Iterator[Config]:
        """The configurations for such a call, the one that ships first."""
        return (config for config in self.configs if self.fits({**constants, **config.constants}))

    def __call__(self, grid: Grid, *args: Any, **constants: Any) -> None:
        candidates = self.candidates(constants)
        if (compiler := _compiler.get()) is not None:
            compiler([Launch(self, config, args, {**constants, **config.constants}) for config in candidates])
            return
        self.run(next(candidates), grid, *args, **constants)

    def run(self, config: Config, grid: Grid, *args: Any, **constants: Any) -> None:
        """Launch with this configuration."""
        every = {**constants, **config.constants}
        sizes = grid(every) if callable(grid) else grid
        if 0 in sizes:
            return
        with _device_of(args):
            self.function[sizes](*args, **every, num_warps=config.warps, num_stages=config.stages)


@contextmanager
def compiling(compiler: Callable[[list[Launch]], None]) -> Iterator[None]:
    """Within, nothing is launched: `compiler` gets each call, once per configuration, the shipped one first."""
    token = _compiler.set(compiler)
    try:
        yield
    finally:
        _compiler.reset(token)


def _device_of(args: tuple[Any, ...]) -> Any:
    """Triton launches on the current device, which need not be that of the tensors."""
    first = next(arg for arg in args if isinstance(arg, Tensor))
    return torch.cuda.device_of(first)
