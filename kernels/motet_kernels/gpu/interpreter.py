"""Correct Triton's interpreter for bfloat16, and for numpy 2.4.

It stores bfloat16 as plain 16-bit integers and computes with these, silently (seen with Triton
3.9). Here matrix products widen them, conversions round to nearest, and other arithmetic is an
error: a kernel must widen first. Before Triton 3.7 it converts arrays of one number to integers,
which numpy deprecates and then refuses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from motet_kernels.runtime.errors import KernelError

_cast, _dot, _binary, _unary = (
    getattr(InterpreterBuilder, name)
    for name in ("cast_impl", "create_dot", "binary_op", "unary_op")
)


_patch_tensor = interpreter._patch_lang_tensor


def patch() -> None:
    """Replace the methods of Triton's interpreter that miscompute; idempotent."""
    interpreter._patch_lang_tensor = patch_tensor
    for name, method in (
        ("cast_impl", cast),
        ("create_dot", dot),
        ("binary_op", binary),
        ("unary_op", unary),
    ):
        setattr(InterpreterBuilder, name, method)
    # Class attributes that refer to the original method since the class was created.
    for name, member in list(vars(InterpreterBuilder).items()):
        if member is _cast:
            setattr(InterpreterBuilder, name, cast)


def patch_tensor(tensor: Any, scope: Any) -> None:
    """Give Triton's tensors their methods for the interpreter, and an index that numpy takes."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def cast(self: Any, src: Any, dst_type: Any) -> Any:
    """Convert between bfloat16 and float32 by bits, and other types to bfloat16 through float32."""
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds[1] == tl.bfloat16 and kinds[0] not in (tl.float32, tl.bfloat16):
        src, kinds = _cast(self, src, tl.float32), (tl.float32, tl.bfloat16)
    if kinds == (tl.bfloat16, tl.float32):
        return TensorHandle(widened(src.data), tl.float32)
    if kinds == (tl.float32, tl.bfloat16):
        return TensorHandle(rounded(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Multiply bfloat16 matrices by the values that their bits represent."""
    return _dot(self, _wide(a), _wide(b), d, *options)


def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    """Apply a binary operation; raise `KernelError` if an operand is bfloat16."""
    _refuse(op, lhs, rhs)
    with np.errstate(all="ignore"):  # GPUs do not warn of overflow
        result = _binary(self, lhs, rhs, op)
    if result.data.dtype == np.bool_:  # the interpreter gives it the operands' type
        result.dtype = tl.int1
    return result


def unary(self: Any, arg: Any, op: Any) -> Any:
    """Apply a unary operation; raise `KernelError` if the operand is bfloat16."""
    _refuse(op, arg)
    with np.errstate(all="ignore"):
        return _unary(self, arg, op)


def widened(bits: np.ndarray) -> np.ndarray:
    """Return float32 of bfloat16 bits."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """Return bfloat16 bits of float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    up = bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)
    return (
        np.where(np.isnan(numbers), np.uint32(0x7FC0), up >> 16)
        .astype(np.uint16)
        .reshape(np.shape(numbers))
    )


def _wide(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(widened(handle.data), tl.float32)


def _refuse(op: Any, *handles: Any) -> None:
    if any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
        name = getattr(op, "__name__", op)
        raise KernelError(
            f"{name}: of bfloat16; widen to float32 first; the interpreter computes with its bits"
        )
