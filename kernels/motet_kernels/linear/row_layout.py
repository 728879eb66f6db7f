"""Pack nibbles row by row, in blocks of 128 inputs: the int4 layout of `row_linear.py`.

Shapes: N output features, K input features, B = ⌈K/128⌉ blocks, G = 4 B groups of 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels.linear.quantization import GROUP

BLOCK = 128


def pack_nibbles(q_NK: Tensor, scale_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes `[N, 64 B]` of int8 weights from -8 to 7, and scales `[N, 4 B]`."""
    inputs = q_NK.shape[1]
    halves = (
        F.pad(q_NK + 8, (0, -inputs % BLOCK), value=8)
        .to(torch.uint8)
        .unflatten(1, (-1, 2, BLOCK // 2))
    )
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1), F.pad(
        scale_NG, (0, -inputs % BLOCK // GROUP)
    )


def unpack_nibbles(packed_NB: Tensor) -> Tensor:
    """Return weights from -8 to 7 without their scales, int8 `[N, 128 B]`."""
    halves = packed_NB.unflatten(1, (-1, BLOCK // 2))
    return torch.stack((halves & 15, halves >> 4), dim=2).flatten(1).to(torch.int8) - 8
