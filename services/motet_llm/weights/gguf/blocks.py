"""Decode GGUF's matrix formats: rows of blocks, each with its own scales.

| type | a block | a weight |
|---|---|---|
| Q4_0 | 32: float16 d, 16 bytes | d · (q - 8) |
| Q5_0 | 32: float16 d, a fifth bit each, 16 bytes | d · (q - 16) |
| Q8_0 | 32: float16 d, 32 int8 | d · q |
| Q4_K | 256: float16 d, m, 6-bit scales, minima of 8 groups, 128 bytes | d · scale · q - m · min |
| Q6_K | 256: low four bits, high two bits, 16 int8 scales, float16 d | d · scale · (q - 32) |

Q4_K_M, the usual mixture, consists of Q4_K, Q6_K and, where rows are no multiple of 256, Q5_0 and
Q8_0.

Shapes: N rows, B blocks of a row, X bytes of a block, K = B · (32 or 256) inputs, G groups of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Read = tuple[
    Tensor, Tensor, Tensor | None, int
]  # codes [N, K], scales and shifts [N, G], inputs per group


def read_blocks(kind: str, rows_NY: Tensor) -> Read:
    """Return the codes of rows given as bytes `[N, B · X]`, in the form of `GroupWeights`.

    Raises KeyError for an unknown type.
    """
    size, read = _TYPES[kind]
    return read(rows_NY.unflatten(1, (-1, size)))


def _half(bytes_NB2: Tensor) -> Tensor:
    return bytes_NB2.contiguous().view(torch.float16).float()


def _nibbles(bytes_NBX: Tensor) -> Tensor:
    """Return the lower halves of the bytes, then the upper ones."""
    return torch.cat((bytes_NBX & 15, bytes_NBX >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> Read:
    return _nibbles(blocks[:, :, 2:]).flatten(1), _half(blocks[:, :, :2]).flatten(1), None, 32


def _q5_0(blocks: Tensor) -> Read:
    fifth = (blocks[:, :, 2:6].unsqueeze(3) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2)
    steps = (_nibbles(blocks[:, :, 6:]) | fifth << 4).to(torch.int8) - 16
    return steps.flatten(1), _half(blocks[:, :, :2]).flatten(1), None, 32


def _q8_0(blocks: Tensor) -> Read:
    return (
        blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1),
        _half(blocks[:, :, :2]).flatten(1),
        None,
        32,
    )


def _q4_k(blocks: Tensor) -> Read:
    d, m = _half(blocks[:, :, 0:2]), _half(blocks[:, :, 2:4])
    packed = blocks[:, :, 4:16]
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=2)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=2)
    steps = _nibbles(blocks[:, :, 16:].unflatten(2, (4, 32)))
    return steps.flatten(1), (d * scales).flatten(1), -(m * minima).flatten(1), 32


def _q6_k(blocks: Tensor) -> Read:
    low = blocks[:, :, :128].unflatten(2, (2, 64))
    high = blocks[:, :, 128:192].unflatten(2, (2, 32))
    twos = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=3)
    steps = (_nibbles(low) | twos << 4).to(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    return steps.flatten(1), (_half(blocks[:, :, 208:]) * scales).flatten(1), None, 16


_TYPES: dict[str, tuple[int, Callable[[Tensor], Read]]] = {
    "Q4_0": (18, _q4_0),
    "Q5_0": (22, _q5_0),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
KINDS = tuple(_TYPES)
