"""Share what all draws on a GPU need: scaling, Gumbel noise, and the upload of a step's columns.

Noise is that of `motet_kernels.sampling.noise`, whose 64 bits are identical here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.sampling import noise
from motet_kernels.sampling.choice import Choice
from motet_kernels.spans import upload


@triton.jit
def scaled(x, temperature):
    """Divide logits by the temperature, rounded as torch rounds, so that the same tokens tie."""
    return tl.div_rn(x.to(tl.float32), temperature)


@triton.jit
def uniform(stream, tokens):
    """Return the uniform numbers in (0, 1) for tokens of a stream, uint64: see `noise.gumbel`."""
    x = stream + (tokens + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    bits = ((x ^ (x >> 31)) >> 41).to(tl.int32)
    # 2**23 + bits as float32: cheaper than a conversion, and as exact.
    return ((bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.5) * 1.1920928955078125e-07


@triton.jit
def gumbel(uniform):
    """Return standard Gumbel noise of uniform numbers."""
    return -tl.log(-tl.log(uniform))


@triton.jit
def not_finite(top):
    """Return whether maxima that propagate NaN contain NaN or +inf."""
    return tl.max(((top != top) | (top == float("inf"))).to(tl.int32), 0) > 0


def streams(choices: Sequence[Choice]) -> np.ndarray:
    """Return the noise stream of each row."""
    return noise.streams(
        [choice.seed for choice in choices], [choice.position for choice in choices]
    ).numpy()


def upload_columns(device: torch.device, *columns: np.ndarray) -> list[Tensor]:
    """Return arrays of the host on the device, in one copy."""
    sizes = [
        -(-column.nbytes // 16) * 16 for column in columns
    ]  # Triton specializes on addresses that are multiples of 16 bytes
    packed = np.zeros(max(1, sum(sizes)), np.uint8)  # torch cannot change an empty tensor's type
    begins = np.cumsum([0, *sizes[:-1]])
    for begin, column in zip(begins, columns, strict=True):
        packed[begin : begin + column.nbytes] = column.view(np.uint8)
    there = upload(torch.from_numpy(packed), device)
    return [
        there[begin : begin + column.nbytes].view(torch.from_numpy(column[:0]).dtype)
        for begin, column in zip(begins, columns, strict=True)
    ]
