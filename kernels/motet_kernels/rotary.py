"""Rotary position embedding (Su et al. 2021) of queries and keys in one pass, with the norm of some models before it.

The two halves of the first R numbers of a head rotate against each other; the rest of a head stays as it is.
Shapes: N tokens, H query heads, K key heads, D head dimension, R rotary dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import is_cpu
from .errors import KernelError
from .native import Kernel
from .norm import rms_norm_torch

_ROTARY = Kernel("motet_rotary", "pippppp" + "iiiii" + "ff")


class HeadNorm(NamedTuple):
    """`rms_norm` of every query and every key, each with weights `[D]` of its own."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    eps: float
    offset: float = 0.0


def rotate_heads(
    x_NC: Tensor, num_queries: int, dim: int, cos_NR: Tensor, sin_NR: Tensor, norm: HeadNorm | None = None
) -> Tensor:
    """Rotated queries and keys `[N, H + K, D]` of rows that hold H queries, then K keys, `C = (H + K) · D` numbers.

    Rows may be strided. Everything is float32. With `norm` every head is normed first.
    """
    _check(x_NC, num_queries, dim, cos_NR, sin_NR, norm)
    tokens, heads, rotary = len(x_NC), x_NC.shape[1] // dim, cos_NR.shape[1]
    native = _ROTARY.native() if is_cpu(x_NC) else None
    if native is None:
        return rotate_heads_torch(x_NC, num_queries, dim, cos_NR, sin_NR, norm)
    out_NHD = torch.empty(tokens, heads, dim)
    native(
        x_NC.data_ptr(),
        x_NC.stride(0),
        cos_NR.data_ptr(),
        sin_NR.data_ptr(),
        None if norm is None else norm.q_weight_D.data_ptr(),
        None if norm is None else norm.k_weight_D.data_ptr(),
        out_NHD.data_ptr(),
        tokens,
        heads,
        num_queries,
        dim,
        rotary,
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.offset,
    )
    return out_NHD


def rotate_heads_torch(
    x_NC: Tensor, num_queries: int, dim: int, cos_NR: Tensor, sin_NR: Tensor, norm: HeadNorm | None = None
) -> Tensor:
    """The twin."""
    x_NHD = x_NC.unflatten(1, (-1, dim))
    parts = [x_NHD[:, :num_queries], x_NHD[:, num_queries:]]
    if norm is not None:
        weights = (norm.q_weight_D, norm.k_weight_D)
        parts = [
            rms_norm_torch(part, weight, norm.eps, norm.offset) for part, weight in zip(parts, weights, strict=True)
        ]
    x_NHD, rotary = torch.cat(parts, dim=1), cos_NR.shape[1]
    turned = x_NHD[..., :rotary]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos_NR[:, None] + torch.cat((-second, first), dim=-1) * sin_NR[:, None]
    return torch.cat((rotated, x_NHD[..., rotary:]), dim=-1)


def _check(x_NC: Tensor, num_queries: int, dim: int, cos_NR: Tensor, sin_NR: Tensor, norm: HeadNorm | None) -> None:
    if x_NC.dtype != torch.float32 or x_NC.dim() != 2 or (x_NC.stride(1) != 1 and x_NC.shape[1] > 1):
        raise KernelError(f"x_NC: {x_NC.dtype}, shape {list(x_NC.shape)}, must be dense rows of float32")
    if x_NC.shape[1] % dim or not 0 <= num_queries * dim <= x_NC.shape[1]:
        raise KernelError(f"x_NC: {x_NC.shape[1]} numbers are not {num_queries} queries and some keys of {dim}")
    for name, table in (("cos_NR", cos_NR), ("sin_NR", sin_NR)):
        if table.dtype != torch.float32 or not table.is_contiguous() or table.dim() != 2 or len(table) != len(x_NC):
            shape = f"{table.dtype} {list(table.shape)}"
            raise KernelError(f"{name}: {shape} must be dense float32 with a row for each of {len(x_NC)} tokens")
    if cos_NR.shape != sin_NR.shape or cos_NR.shape[1] % 2 or cos_NR.shape[1] > dim:
        raise KernelError(
            f"cos_NR, sin_NR: widths {cos_NR.shape[1]}, {sin_NR.shape[1]} must be equal, even, at most {dim}"
        )
    for name, weight in norm._asdict().items() if norm is not None else ():
        if isinstance(weight, Tensor) and (weight.dtype != torch.float32 or weight.shape != (dim,)):
            raise KernelError(f"{name}: {weight.dtype} {list(weight.shape)} must be float32 [{dim}]")
