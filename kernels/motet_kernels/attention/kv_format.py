"""Define the rows of a KV cache: plain floats, or codes of 8 bits with a scale per row.

In a cache of 8 bits (int8, float8_e4m3fn) a head's row is D codes followed by their own scale in
float32: `[P, K, S, D + 4]`.

Shapes: P blocks, S slots per block, K key/value heads, D dim, V dim of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 4  # bytes of the scale after a row of 8-bit codes
# The code of the largest value of a row.
_TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
CODED = tuple(_TOP)
TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int8: 2,
    torch.float8_e4m3fn: 3,
}  # the native kernels' numbers for them


def row_size(dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements of a head's row in a cache of `dtype`."""
    return dim + SCALE if dtype in CODED else dim


def dim_of(cache_PKSD: Tensor) -> int:
    """Return D of a cache of any type."""
    return cache_PKSD.shape[3] - (SCALE if cache_PKSD.dtype in CODED else 0)


def is_part(value_PKSV: Tensor, key_PKSD: Tensor) -> bool:
    """Return True if the values are the first elements of their keys, and share the keys' scale."""
    return value_PKSV.data_ptr() == key_PKSD.data_ptr() and value_PKSV.stride() == key_PKSD.stride()


def value_dim_of(value_PKSV: Tensor, key_PKSD: Tensor) -> int:
    """Return V of a cache of any type."""
    return value_PKSV.shape[3] if is_part(value_PKSV, key_PKSD) else dim_of(value_PKSV)


def encode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `[..., D]` in 8 bits with their scales, `[..., D + 4]`.

    A row with a value that is not finite becomes NaN throughout.
    """
    rows = rows.float()
    finite = rows.isfinite().all(-1, keepdim=True)
    scale = torch.where(finite, rows.abs().amax(-1, keepdim=True) / _TOP[dtype], 0.0)
    inverse = torch.where(scale >= 1.2e-38, 1 / scale, 0.0)
    steps = torch.where(finite, rows, 0.0) * inverse
    codes = steps.round() if dtype == torch.int8 else steps.clamp(-448, 448)
    scale = torch.where(finite, scale, torch.nan).contiguous()
    return torch.cat((codes.to(dtype).view(torch.uint8), scale.view(torch.uint8)), -1).view(dtype)


def decode(coded: Tensor) -> Tensor:
    """Return float32 rows `[..., D]` of rows that `encode` returned."""
    codes, scale = (
        coded[..., :-SCALE],
        coded[..., -SCALE:].clone(memory_format=torch.contiguous_format),
    )
    return codes.float() * scale.view(torch.float32)
