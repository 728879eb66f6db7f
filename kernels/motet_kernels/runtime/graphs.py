"""Capture the kernels of a step as a CUDA graph, and replay them as one launch.

It is on a GPU what a `replay.Tape` is on a CPU: shapes and addresses are fixed, so whatever differs
from step to step must be written in place, into tensors that the step reads, and its results into
tensors that outlive it. Python runs while a step is captured and never again: a step whose Python
depends on data would silently replay the branch of its capture. So `refusing_data` raises an error
for every operation that reads a tensor on the host, has a result whose size depends on data, or
copies between host and GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .errors import KernelError

Step = Callable[[], None]

_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
# Sizes of these depend on data only if an index is a mask.
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Graph(Protocol):
    """Launch the kernels of a captured step."""

    def replay(self) -> None:
        """Compute on what the step's input tensors hold now; does not wait for the GPU."""


class Graphs(Protocol):
    """Capture steps of which one is replayed at a time, because their intermediates share memory."""

    def capture(self, step: Step) -> Graph:
        """Return a graph of `step`, which is called several times.

        Raises `KernelError` for a step that depends on data, and RuntimeError where CUDA refuses it.
        """


class CudaGraphs:
    """Capture steps on one GPU."""

    def __init__(self, device: torch.device):
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def capture(self, step: Step) -> Graph:
        """Return a graph of `step`.

        The first call compiles kernels and uploads what stays, the second is checked; a capture
        executes nothing. Other threads may use the GPU meanwhile.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                step()
                with RefusingData():
                    step()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
        return graph


def graphs_on(device: torch.device) -> Graphs:
    """Return what captures steps on a device. Raises `KernelError` unless that is a CUDA GPU."""
    if device.type != "cuda":
        raise KernelError(f"device={str(device)!r}: only steps on a GPU are captured; give cuda")
    return CudaGraphs(device)


class RefusingData(TorchDispatchMode):
    """Raise `KernelError` within for operations that a graph would not repeat on other data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # operators that call others, which inference mode leaves whole
            if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                return out
        return self.compute(func, args, kwargs)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator that calls no other one."""
        if _depends_on_data(func, args):
            raise KernelError(f"step: {func} depends on numbers of its inputs")
        out = func(*args, **kwargs)
        if func is _aten.lift_fresh.default and out.dim():
            raise KernelError(f"step: {func} takes numbers from the host")
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        # A number on the host is an argument of the kernel, unless it is copied.
        devices = {one.device for one in tensors if one.dim() or func in _COPIES}
        if len(devices) > 1:
            raise KernelError(f"step: {func} copies between {' and '.join(map(str, devices))}")
        return out


def _depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    if func in _INDEXED:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return not _DEPENDS.isdisjoint(func.tags)
