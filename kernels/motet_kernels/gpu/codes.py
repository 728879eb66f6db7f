"""Encode and decode numbers in 8 bits, int8 or float8_e4m3fn, and address rows of a coded cache.

A coded row is its codes followed by its scale in float32 (`motet_kernels.attention.kv`), so rows begin at
multiples of four bytes: strides of a coded cache are counted in words of four bytes, which tells
Triton that it may load words.

FLOAT8 and CODES are compile-time constants of kernels. FLOAT8: whether codes are float8. CODES:
"int8", "float8", or None for plain numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from motet_kernels.attention.kv_format import CODED, SCALE
from motet_kernels.runtime.errors import KernelError

WORD_BYTES = tl.constexpr(SCALE)
ROUNDS = tl.constexpr(
    12582912.0
)  # 1.5 · 2^23: adding it rounds a number to an integer, ties to even
LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
_ROUNDS_BITS = tl.constexpr(0x4B400000)
_MIN_SCALE = tl.constexpr(1.2e-38)  # smaller scales have no finite reciprocal: zeros
_FLOAT8_SCALE = tl.constexpr(2.0**120)
_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}


@triton.jit
def decoded(codes, FLOAT8: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers that codes (bytes) represent, in TYPE, which represents them exactly.

    The codes of NaN are never stored.
    """
    if not FLOAT8:
        numbers = codes.to(tl.int8, bitcast=True)
    elif cuda_capability_geq(8, 9):
        numbers = codes.to(tl.float8e4nv, bitcast=True)
    else:  # as float32 the exponent is 120 too small, also of subnormal numbers
        wide = codes.to(tl.int32)
        numbers = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(
            tl.float32, bitcast=True
        ) * _FLOAT8_SCALE
    return numbers.to(TYPE)


@triton.jit
def largest_of(x):
    """Return the largest magnitude of each float32 row `[R, X]`, as `[R, 1]`.

    It is infinity where a number is not finite.
    """
    size = tl.abs(x)
    return tl.max(tl.where(size <= LARGEST, size, float("inf")), 1, keep_dims=True)


@triton.jit
def scale_of(largest, FLOAT8: tl.constexpr):
    """Return the scale of a row from its largest magnitude, and its inverse for `encoded`.

    The scale is NaN where the row is not finite.
    """
    scale = tl.div_rn(largest, 448.0 if FLOAT8 else 127.0)
    inverse = tl.where(scale >= _MIN_SCALE, tl.div_rn(1.0, tl.maximum(scale, _MIN_SCALE)), 0.0)
    return tl.where(largest <= LARGEST, scale, float("nan")), inverse


@triton.jit
def encoded(x, scale, inverse, FLOAT8: tl.constexpr):
    """Return codes (bytes) of float32 numbers with the results of `scale_of` for their row.

    They are the codes of `motet_kernels.attention.kv.encode`.
    """
    x = tl.where(scale == scale, x, 0.0)
    # Fused with an addition of zero, the product is rounded before other additions, as on a CPU.
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
    """Return the pointer to the scale of the coded row at `row_ptr`."""
    return (row_ptr + DIM).to(tl.pointer_type(tl.float32))


def pages(name: str, cache_PKSD: Tensor) -> tuple[Tensor, tuple[int, ...], str | None]:
    """Return a cache as kernels take it: its numbers or bytes, strides, and CODES.

    The strides are those of a block, a head and a slot. Raises `KernelError` on a coded cache whose
    scales are not at multiples of four bytes.
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
