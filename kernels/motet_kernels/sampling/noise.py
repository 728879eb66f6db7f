"""Generate noise that depends only on (seed, position, token): a counter-based generator.

A request that continues on another instance draws exactly the noise it would have drawn here, with
no state to move. The generator is SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, OOPSLA 2014) over a counter, in wrapping 64-bit integer arithmetic,
so it is the same on every machine and for any subset of the tokens.

Shapes: R rows, C candidate tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """Return the 64-bit two's complement of a Python integer, as torch's int64 requires."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically: torch's own shift extends the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer in place: allocating memory would cost more than the arithmetic."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(FIRST)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(SECOND)
    return x.bitwise_xor_(_shift_right(x, 31))


def streams(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return the generator's state for each row, int64 `[R]`. Seeds are taken modulo 2**64."""
    seeds_R = torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64)
    positions_R = torch.tensor(positions, dtype=torch.int64)
    return _mix(_mix(seeds_R + GOLDEN) + positions_R * GOLDEN)


def gumbel(streams_R: Tensor, tokens_RC: Tensor) -> Tensor:
    """Return standard Gumbel noise `[R, C]`, float32, of each row's stream for the given token ids.

    `argmax(logits + noise)` is then a draw from `softmax(logits)`.
    """
    bits_RC = _shift_right(_mix(streams_R.unsqueeze(1) + (tokens_RC + 1) * GOLDEN), 41)
    # 23 bits and a half: exact in float32, never 0 and never 1, so both logarithms are finite.
    uniform_RC = bits_RC.float().add_(0.5).mul_(2.0**-23)
    return uniform_RC.log_().neg_().log_().neg_()
