"""Record the native calls of a step once and replay them as one call, without Python in between.

The step of a small model spends more time between its kernels than in them. A `Tape` runs a step,
records every call of a native kernel with its arguments, and keeps the tensors that were allocated;
`replay` makes the same calls on the same memory, and releases the GIL once for all of them. It
corresponds to a CUDA graph on a GPU: shapes and addresses are fixed, so whatever differs from step
to step must be written in place, into tensors that the step reads.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .errors import KernelError
from .native import Kernel, naming, observing_calls

T = TypeVar("T")

_REPLAY = Kernel("motet_replay", "pi")
_FLOAT = struct.Struct("<fxxxx").pack
# Operations that allocate memory and compute nothing.
_ALLOCATES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_CHUNK = 1 << 20  # bytes of a workspace's first chunk, at least
_ALIGNMENT = 64  # bytes: a cache line


def can_replay() -> bool:
    """Return True if there is a native library and its calls are not being named for a profiler.

    A tape is a single call, so its kernels would not be named.
    """
    return _REPLAY.native() is not None and not naming()


class Workspace:
    """Provide memory that several tapes use, each from its beginning.

    Each of them overwrites the intermediates and the result of the others.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._chunk = self._offset = 0  # where the next tensor is placed

    def rewind(self) -> Workspace:
        """Place the next tensor at the beginning."""
        self._chunk = self._offset = 0
        return self

    def place(self, like: Tensor) -> Tensor:
        """Return an uninitialized tensor of the dtype, shape and strides of `like`."""
        nbytes = like.untyped_storage().nbytes()
        while self._chunk < len(self._chunks):
            chunk = self._chunks[self._chunk]
            if self._offset + nbytes <= len(chunk):
                break
            self._chunk, self._offset = self._chunk + 1, 0
        else:
            # Twice the one before: rising sizes leave less behind than the largest takes.
            least = 2 * len(self._chunks[-1]) if self._chunks else _CHUNK
            chunk = torch.empty(max(nbytes, least), dtype=torch.uint8, device=like.device)
            self._chunks.append(chunk)
        begin, self._offset = self._offset, self._offset + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        placed = chunk[begin : begin + nbytes].view(like.dtype)
        return placed.as_strided(like.shape, like.stride(), placed.storage_offset())


class Tape(Generic[T]):
    """Record a step while running it once; `result` is overwritten by each `replay`.

    `result` is what the step returned. Raises `KernelError` if the step computes anything outside
    of the native kernels, which a replay would miss. Views and allocations are no computation. The
    step's inputs must outlive the tape.

    workspace: where the step's tensors are placed; without one, the tape has memory of its own.
    """

    def __init__(self, step: Callable[[], T], workspace: Workspace | None = None):
        self._names: list[str] = []
        self._calls = array("q")
        self._kept: list[object] = []  # memory that the calls point to
        with observing_calls(self._record), _KeepTensors(self._kept, workspace):
            self.result = step()
        self._native = _REPLAY.native()

    def replay(self) -> T:
        """Make all recorded calls again and return `result`.

        Raises `KernelError` if a kernel refuses its arguments, for example a slot beyond the cache.
        """
        if self._native is None:
            raise KernelError(
                "a tape needs the native library: see motet_kernels.runtime.native.status()"
            )
        failed = self._native(self._calls.buffer_info()[0], len(self._names))
        if failed:
            raise KernelError(
                f"{self._names[failed - 1]}: call {failed} of a tape refused its arguments"
            )
        return self.result

    def _record(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        address = kernel.replayed()
        if address is None:
            raise KernelError(f"{kernel.name}: cannot be replayed; declare it REPLAYABLE in csrc/")
        packed = b"".join(
            self._pack(letter, arg) for letter, arg in zip(kernel.signature, args, strict=True)
        )
        self._kept.append(packed)
        self._names.append(kernel.name)
        self._calls.extend((address, _address(packed)))

    def _pack(self, letter: str, arg: Any) -> bytes:
        if letter == "f":
            return _FLOAT(arg)
        if isinstance(arg, bytes):
            self._kept.append(arg)
            arg = _address(arg)
        return int(arg or 0).to_bytes(8, "little", signed=True)


class _KeepTensors(TorchDispatchMode):
    """Keep every tensor that is created within; raise `KernelError` on operations that compute.

    Tensors are placed in the workspace, if there is one.
    """

    def __init__(self, kept: list[object], workspace: Workspace | None):
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = kept
        self._workspace = workspace.rewind() if workspace else None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func in _ALLOCATES:
            if self._workspace is not None:
                out = self._workspace.place(out)
                made = [out]
        else:
            given = {
                leaf.untyped_storage().data_ptr()
                for leaf in tree_leaves(args)
                if isinstance(leaf, Tensor)
            }
            views = (
                not func._schema.is_mutable
                and {one.untyped_storage().data_ptr() for one in made} <= given
            )
            if not views:
                raise KernelError(
                    f"step: {func} computes outside of the native kernels, so it cannot be replayed"
                )
        self._tensors += made
        return out


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
