"""Decode GGUF's matrix formats: rows of blocks, each with its own scales.

| type | a block | a weight |
|---|---|---|
| Q4_0 | 32: float16 d, 16 bytes | d · (q - 8) |
| Q4_1 | 32: float16 d, m, 16 bytes | d · q + m |
| Q5_0 | 32: float16 d, a fifth bit each, 16 bytes | d · (q - 16) |
| Q5_1 | 32: float16 d, m, a fifth bit each, 16 bytes | d · q + m |
| Q8_0 | 32: float16 d, 32 int8 | d · q |
| MXFP4 | 32: an exponent e, 16 bytes | 2^(e - 127) · fp4(q) |
| IQ4_NL | 32: float16 d, 16 bytes | d · level(q) |
| Q2_K | 256: 4-bit scales and minima of 16 groups, 64 bytes, float16 d, m | d · scale · q - m · min |
| Q3_K | 256: a third bit each, 64 bytes, 16 6-bit scales, float16 d | d · (scale - 32) · (q - 4) |
| Q4_K | 256: float16 d, m, 6-bit scales, minima of 8 groups, 128 bytes | d · scale · q - m · min |
| Q5_K | 256: as Q4_K, a fifth bit each before the 128 bytes | d · scale · q - m · min |
| Q6_K | 256: low four bits, high two bits, 16 int8 scales, float16 d | d · scale · (q - 32) |
| IQ4_XS | 256: float16 d, 6-bit scales of 8 groups, 128 bytes | d · (scale - 32) · level(q) |

The usual mixtures, such as Q4_K_M, consist of these; `levels.py` has the tables of levels.

Shapes: N rows, B blocks of a row, X bytes of a block, K = B · (32 or 256) inputs, G groups of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from motet_kernels.linear.scales import Scales, SpanScales


class Read(NamedTuple):
    """Hold codes `[N, K]`, scales and shifts `[N, G]`, inputs per group, and a table of levels.

    narrow: codes are from 0 to 3.
    """

    codes_NK: Tensor
    scale_NG: Scales
    shift_NG: Scales | None
    group: int
    levels: str | None = None
    narrow: bool = False


def read_blocks(kind: str, rows_NY: Tensor) -> Read:
    """Return the codes of rows given as bytes `[N, B · X]`, in the form of `GroupWeights`.

    Raises KeyError for an unknown type.
    """
    size, read = _TYPES[kind]
    return read(rows_NY.unflatten(1, (-1, size)))


def _half(bytes_NB2: Tensor) -> Tensor:
    """Return a float16 per block, as float32 `[N, B]`."""
    return bytes_NB2.contiguous().view(torch.float16).float().flatten(1)


def _nibbles(bytes_NBX: Tensor) -> Tensor:
    """Return the lower halves of the bytes, then the upper ones."""
    return torch.cat((bytes_NBX & 15, bytes_NBX >> 4), dim=-1)


def _bits(bytes_NBX: Tensor) -> Tensor:
    """Return the bits of all bytes in a row, the lowest first."""
    return (bytes_NBX.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _planes(bytes_NBX: Tensor, bits: int, width: int) -> Tensor:
    """Return the small integers of `width` bytes at a time: all lowest ones, then the next."""
    parts = bytes_NBX.unflatten(2, (-1, width))
    mask = (1 << bits) - 1
    return torch.cat([parts >> shift & mask for shift in range(0, 8, bits)], dim=3).flatten(2)


def _spans(fine_NBG: Tensor, coarse_NB: Tensor) -> SpanScales:
    """Return a block's small integers times its own number."""
    return SpanScales(fine_NBG.to(torch.int8).flatten(1), coarse_NB, fine_NBG.shape[2])


def _q4_0(blocks: Tensor) -> Read:
    return Read(_nibbles(blocks[:, :, 2:]).flatten(1), _half(blocks[:, :, :2]), None, 32)


def _q4_1(blocks: Tensor) -> Read:
    d, m = _half(blocks[:, :, :2]), _half(blocks[:, :, 2:4])
    return Read(_nibbles(blocks[:, :, 4:]).flatten(1), d, m, 32)


def _q5_0(blocks: Tensor) -> Read:
    steps = _nibbles(blocks[:, :, 6:]) | _bits(blocks[:, :, 2:6]) << 4
    return Read((steps.to(torch.int8) - 16).flatten(1), _half(blocks[:, :, :2]), None, 32)


def _q5_1(blocks: Tensor) -> Read:
    steps = _nibbles(blocks[:, :, 8:]) | _bits(blocks[:, :, 4:8]) << 4
    d, m = _half(blocks[:, :, :2]), _half(blocks[:, :, 2:4])
    return Read(steps.to(torch.int8).flatten(1), d, m, 32)


def _q8_0(blocks: Tensor) -> Read:
    codes = blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1)
    return Read(codes, _half(blocks[:, :, :2]), None, 32)


def _mxfp4(blocks: Tensor) -> Read:
    scale = torch.exp2(blocks[:, :, 0].float() - 127)
    return Read(_nibbles(blocks[:, :, 1:]).flatten(1), scale, None, 32, "fp4")


def _iq4_nl(blocks: Tensor) -> Read:
    return Read(_nibbles(blocks[:, :, 2:]).flatten(1), _half(blocks[:, :, :2]), None, 32, "iq4")


def _q2_k(blocks: Tensor) -> Read:
    scales, d, m = blocks[:, :, :16], _half(blocks[:, :, 80:82]), _half(blocks[:, :, 82:])
    codes = _planes(blocks[:, :, 16:80], 2, 32)
    scale, shift = _spans(scales & 15, d), _spans(scales >> 4, -m)
    return Read(codes.flatten(1), scale, shift, 16, narrow=True)


def _q3_k(blocks: Tensor) -> Read:
    low, third = _planes(blocks[:, :, 32:96], 2, 32), _planes(blocks[:, :, :32], 1, 32)
    packed = blocks[:, :, 96:108]
    scales = _nibbles(packed[:, :, :8]) | _planes(packed[:, :, 8:], 2, 4) << 4
    # Steps minus 4 as codes of offset 8.
    codes = (low | third << 2) + 4
    fine = scales.to(torch.int8) - 32
    return Read(codes.flatten(1), _spans(fine, _half(blocks[:, :, 108:])), None, 16)


def _scales_and_minima(blocks: Tensor) -> tuple[SpanScales, SpanScales]:
    """Return the scales and shifts that Q4_K and Q5_K begin with."""
    packed = blocks[:, :, 4:16]
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=2)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=2)
    return _spans(scales, _half(blocks[:, :, 0:2])), _spans(minima, -_half(blocks[:, :, 2:4]))


def _q4_k(blocks: Tensor) -> Read:
    steps = _nibbles(blocks[:, :, 16:].unflatten(2, (4, 32)))
    return Read(steps.flatten(1), *_scales_and_minima(blocks), 32)


def _q5_k(blocks: Tensor) -> Read:
    low = _nibbles(blocks[:, :, 48:].unflatten(2, (4, 32))).flatten(2)
    steps = low | _planes(blocks[:, :, 16:48], 1, 32) << 4
    return Read(steps.to(torch.int8).flatten(1), *_scales_and_minima(blocks), 32)


def _q6_k(blocks: Tensor) -> Read:
    low = _nibbles(blocks[:, :, :128].unflatten(2, (2, 64))).flatten(2)
    steps = low | _planes(blocks[:, :, 128:192], 2, 32) << 4
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    codes = (steps.to(torch.int8) - 32).flatten(1)
    return Read(codes, _spans(scales, _half(blocks[:, :, 208:])), None, 16)


def _iq4_xs(blocks: Tensor) -> Read:
    low = blocks[:, :, 4:8]
    low = torch.stack((low & 15, low >> 4), dim=3).flatten(2)
    high = (blocks[:, :, 2:4].unsqueeze(3) >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(
        2
    )
    fine = (low | high << 4).to(torch.int8) - 32
    codes = _nibbles(blocks[:, :, 8:].unflatten(2, (8, 16))).flatten(1)
    return Read(codes, _spans(fine, _half(blocks[:, :, :2])), None, 32, "iq4")


_TYPES: dict[str, tuple[int, Callable[[Tensor], Read]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "MXFP4": (17, _mxfp4),
    "IQ4_NL": (18, _iq4_nl),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_XS": (136, _iq4_xs),
}
KINDS = tuple(_TYPES)
