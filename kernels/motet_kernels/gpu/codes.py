"""Numbers in 8 bits, int8 or float8_e4m3fn: what codes stand for, and the coded rows of a cache.

A coded row is its codes and behind them its scale in float32 (`motet_kernels.kv`), so rows begin at multiples of four
bytes: strides of a coded cache are counted in words of four, which tells Triton that it may load words.

FLOAT8 and CODES are of a kernel's constants: whether codes are float8; "int8", "float8", or None for plain numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from ..errors import KernelError
from ..kv import CODED, SCALE

WORD = tl.constexpr(SCALE)
ROUNDS = tl.constexpr(12582912.0)  # 1.5 · 2^23: what is added to it loses its fraction, ties to even
LARGEST = tl.constexpr(3.4028234663852886e38)  # of the finite ones
_ROUNDS_BITS = tl.constexpr(0x4B400000)
_LEAST = tl.constexpr(1.2e-38)  # a smaller scale has no reciprocal, and its row counts as zeros
_FLOAT8_SCALE = tl.constexpr(2.0**120)
_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}


@triton.jit
def decoded(codes, FLOAT8: tl.constexpr, TYPE: tl.constexpr):
    """The numbers of codes (bytes) in another type, which has them all; a NaN's code is nobody's."""
    if not FLOAT8:
        numbers = codes.to(tl.int8, bitcast=True)
    elif cuda_capability_geq(8, 9):
        numbers = codes.to(tl.float8e4nv, bitcast=True)
    else:  # as float32 the exponent is 120 too small, also of subnormal numbers
        wide = codes.to(tl.int32)
        numbers = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * _FLOAT8_SCALE
    return numbers.to(TYPE)


@triton.jit
def largest_of(x):
    """`[R, 1]`: of float32 rows `[R, X]` the largest size, infinity where a number is not finite."""
    size = tl.abs(x)
    return tl.max(tl.where(size <= LARGEST, size, float("inf")), 1, keep_dims=True)


@triton.jit
def steps_of(largest, FLOAT8: tl.constexpr):
    """Of a row whose largest size is given: its scale, NaN where it is not finite, and what codes are found by."""
    scale = tl.div_rn(largest, 448.0 if FLOAT8 else 127.0)
    inverse = tl.where(scale >= _LEAST, tl.div_rn(1.0, tl.maximum(scale, _LEAST)), 0.0)
    return tl.where(largest <= LARGEST, scale, float("nan")), inverse


@triton.jit
def encoded(x, scale, inverse, FLOAT8: tl.constexpr):
    """Codes (bytes) of float32 numbers by what `steps_of` gave for their row: those of `motet_kernels.kv.encode`."""
    x = tl.where(scale == scale, x, 0.0)
    # Fused with an addition of zero, the product is rounded before anything else is added, as on a CPU.
    size = tl.fma(tl.abs(x), inverse, 0.0)
    negative = x.to(tl.int32, bitcast=True) < 0
    if FLOAT8:
        size = tl.minimum(size, 448.0)
        bits = size.to(tl.int32, bitcast=True)
        subnormal = (size * 512.0 + ROUNDS).to(tl.int32, bitcast=True) - _ROUNDS_BITS
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        code = tl.where(size < 0.015625, subnormal, normal) | tl.where(negative, 0x80, 0)
    else:
        steps = (size + ROUNDS).to(tl.int32, bitcast=True) - _ROUNDS_BITS
        code = tl.where(negative, -steps, steps)
    return code.to(tl.uint8)


@triton.jit
def scale_at(row_ptr, DIM):
    """Where the scale of the coded row at `row_ptr` is."""
    return (row_ptr + DIM).to(tl.pointer_type(tl.float32))


def pages(name: str, cache_PKSD: Tensor) -> tuple[Tensor, tuple[int, ...], str | None]:
    """A cache as kernels take it: its numbers or bytes, the strides of a block, a head and a slot, and CODES.

    Raises `KernelError` on a coded one whose scales do not lie at multiples of four bytes.
    """
    strides = cache_PKSD.stride()[:3]
    if cache_PKSD.dtype not in CODED:
        return cache_PKSD, strides, None
    at = (cache_PKSD.data_ptr(), cache_PKSD.shape[3], *strides)
    if any(number % SCALE for number in at):
        raise KernelError(
            f"{name}: rows of {at[1]} bytes, strides {list(strides)}: on a GPU a cache of {cache_PKSD.dtype} must lie"
            f" in words of {SCALE} bytes; give a dim that is a multiple of {SCALE}, or a cache of 16 bits"
        )
    words = tuple(stride // SCALE for stride in strides)
    return cache_PKSD.view(torch.uint8), words, _NAMES[cache_PKSD.dtype]
