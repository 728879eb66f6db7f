"""Triton's interpreter, made right for bfloat16.

It keeps bfloat16 as plain 16-bit integers and computes with these, silently (seen with Triton 3.9). Here products of
matrices widen them, conversions round to the nearest, and other arithmetic is an error: a kernel is to widen first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ..errors import KernelError

_cast, _dot, _binary, _unary = (
    getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_dot", "binary_op", "unary_op")
)


def mend() -> None:
    """Replace what is wrong; a second call changes nothing."""
    for name, method in (("cast_impl", cast), ("create_dot", dot), ("binary_op", binary), ("unary_op", unary)):
        setattr(InterpreterBuilder, name, method)
    # These are class attributes that hold the method which was there when the class was made.
    for name, member in list(vars(InterpreterBuilder).items()):
        if member is _cast:
            setattr(InterpreterBuilder, name, cast)


def cast(self: Any, src: Any, dst_type: Any) -> Any:
    """Between bfloat16 and float32 by their bits, and from other types to bfloat16 by way of float32."""
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds[1] == tl.bfloat16 and kinds[0] not in (tl.float32, tl.bfloat16):
        src, kinds = _cast(self, src, tl.float32), (tl.float32, tl.bfloat16)
    if kinds == (tl.bfloat16, tl.float32):
        return TensorHandle(widened(src.data), tl.float32)
    if kinds == (tl.float32, tl.bfloat16):
        return TensorHandle(rounded(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Of bfloat16 as of the numbers that it stands for."""
    return _dot(self, _wide(a), _wide(b), d, *options)


def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    _refuse(op, lhs, rhs)
    with np.errstate(all="ignore"):  # no GPU says that something overflowed
        result = _binary(self, lhs, rhs, op)
    if result.data.dtype == np.bool_:  # it says that a comparison has the type of what was compared
        result.dtype = tl.int1
    return result


def unary(self: Any, arg: Any, op: Any) -> Any:
    _refuse(op, arg)
    with np.errstate(all="ignore"):
        return _unary(self, arg, op)


def widened(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 bits."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float32, to the nearest, ties to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    up = bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), up >> 16).astype(np.uint16).reshape(np.shape(numbers))


def _wide(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(widened(handle.data), tl.float32)


def _refuse(op: Any, *handles: Any) -> None:
    if any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
        name = getattr(op, "__name__", op)
        raise KernelError(f"{name} of bfloat16: widen to float32 first; the interpreter computes with its bits")
