"""Stand in for CUDA graphs on a CPU: record the kernels of a step, and replay them on the same memory.

Nothing of the step's Python runs in a replay, as on a GPU: torch's operators and Triton's launches, in the interpreter,
are repeated with the tensors that they had, and write to the memory that they wrote to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from motet_kernels import spans
from motet_kernels.gpu.launch import GpuKernel
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.graphs import RefusingData, Step

# The first operators of `tolist` and `numpy`; on a GPU that is a copy to the host.
HOST_READS = {torch.ops.aten.resolve_conj.default, torch.ops.aten.resolve_neg.default}


class RecordedGraph:
    """Hold the kernels of one step."""

    def __init__(self) -> None:
        self.kernels: list[Callable[[], None]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for kernel in self.kernels:
            kernel()


class RecordedGraphs:
    """Record steps on tensors of a CPU."""

    def __init__(self, _device: torch.device | None = None) -> None:
        self.graphs: list[RecordedGraph] = []

    def capture(self, step: Step) -> RecordedGraph:
        step()
        graph = RecordedGraph()
        with pytest.MonkeyPatch.context() as patch, _Recorder(graph.kernels):
            patch.setattr(GpuKernel, "run", _recorded_launches(graph.kernels, GpuKernel.run))
            patch.setattr(spans, "upload", _refuse_upload)
            step()
        self.graphs.append(graph)
        return graph


class _Recorder(RefusingData):
    """Record torch's operators."""

    def __init__(self, kernels: list[Callable[[], None]]):
        super().__init__()
        self._kernels = kernels

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in HOST_READS:
            raise KernelError(f"step: {func} reads numbers on the host")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().compute(func, args, kwargs)
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        own = [leaf.untyped_storage().data_ptr() not in given for leaf in made]
        if func._schema.is_mutable or any(own):
            self._kernels.append(_again(func, args, kwargs, made, own))
        return out


def _again(
    func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor], own: list[bool]
) -> Callable[[], None]:
    """Return a call that computes `func` again and writes where its results were; own: not views of inputs."""

    def run() -> None:
        results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for into, result, is_own in zip(made, results, own, strict=True):
            if is_own:
                into.copy_(result)

    return run


def _recorded_launches(kernels: list[Callable[[], None]], launch: Any) -> Any:
    def run(kernel: GpuKernel, *args: Any, **constants: Any) -> None:
        def once() -> None:
            with _disable_current_modes():  # the interpreter's own work on tensors
                launch(kernel, *args, **constants)

        kernels.append(once)
        once()

    return run


def _refuse_upload(*_: Any) -> Tensor:
    raise AssertionError("a step that is captured uploads")
