"""Tables of levels: what the 16 codes of a non-linear format of 4 bits mean.

| name | levels | source |
|---|---|---|
| `fp4` | e2m1: a sign, two bits of exponent, one of mantissa | OCP Microscaling Formats 1.0 (MXFP4) |
| `nf4` | quantiles of the normal distribution | QLoRA, arXiv 2305.14314; bitsandbytes |
| `bnb_fp4` | a float of 4 bits of bitsandbytes' own | bitsandbytes |
| `iq4` | llama.cpp's IQ4_NL and IQ4_XS | ggml's `kvalues_iq4nl` |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BNB_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# The native kernel's numbers for tables (csrc/linear_codes.cpp).
LOW, BYTE, WIDE = 2, 3, 4


@dataclass(frozen=True)
class Levels:
    """values: of codes 0 to 15. kind: how the native kernel holds them, as integers of `unit`.

    LOW: from 0 to 32, after `offset` is added; BYTE: of 8 bits; WIDE: from -8191 to 8191, to which
    `nf4` is rounded (by 6e-5 of a block's largest weight at most). All others are exact.
    """

    values: tuple[float, ...]
    kind: int
    unit: float
    offset: int = 0

    @cached_property
    def tensor(self) -> Tensor:
        """Return the levels, float32 `[16]`."""
        return torch.tensor(self.values)

    @cached_property
    def integers(self) -> Tensor:
        """Return the levels in units, `offset` added, int32 `[16]`."""
        return (self.tensor.double() / self.unit).round().to(torch.int32) + self.offset

    @cached_property
    def table(self) -> Tensor:
        """Return the kernel's table: bytes `[16]`, of WIDE ones the low, then the high bytes."""
        if self.kind != WIDE:
            return self.integers.to(torch.uint8)
        return torch.cat((self.integers & 255, self.integers >> 8 & 255)).to(torch.uint8)


LEVELS = {
    "fp4": Levels((*_FP4, *(-value for value in _FP4)), LOW, 0.5, 12),
    "nf4": Levels(_NF4, WIDE, 1 / 8191),
    "bnb_fp4": Levels((*_BNB_FP4, *(-value for value in _BNB_FP4)), WIDE, 1 / 192),
    "iq4": Levels(tuple(float(value) for value in _IQ4), BYTE, 1.0, 128),
}
