"""Apply rotary position embedding (Su et al. 2021) to queries and keys in one pass.

Some models norm queries and keys before; that is part of the pass. The two halves of the first R
elements of a head rotate against each other; the rest of a head is unchanged. The angles are in
tables with a row for each token, which a model computes from its positions, including those of
several axes (m-RoPE).

Shapes: N tokens, H query heads, K key heads, D head dimension, R rotary dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.attention.head_norm import HeadNorm
from motet_kernels.attention.kv import check_cache, check_pair, check_slots, store_kv
from motet_kernels.norm import rms_norm_torch
from motet_kernels.runtime.arguments import GPU_FLOATS, check_device, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

_ROTARY = Kernel("motet_rotary", "pippppp" + "iiiii" + "ff")
_NAMES = "float32, bfloat16 or float16"


class PackedHeads(NamedTuple):
    """Hold rows `[N, (H + 2K) · D]` of H queries, K keys and K values, with their rotation tables."""

    x_NC: Tensor
    num_queries: int
    num_keys: int
    dim: int
    cos_NR: Tensor
    sin_NR: Tensor
    norm: HeadNorm | None = None

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries `[N, H, D]`, rotated keys `[N, K, D]`, and values `[N, K, D]`."""
        queries, rotated = self.num_queries, (self.num_queries + self.num_keys) * self.dim
        tables = self.cos_NR, self.sin_NR
        turned_NHD = rotate_heads(self.x_NC[:, :rotated], queries, self.dim, *tables, self.norm)
        value_NKD = self.x_NC[:, rotated:].unflatten(1, (-1, self.dim))
        return turned_NHD[:, :queries], turned_NHD[:, queries:], value_NKD


def rotate_heads(
    x_NC: Tensor,
    num_queries: int,
    dim: int,
    cos_NR: Tensor,
    sin_NR: Tensor,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Return rotated queries and keys `[N, H + K, D]`.

    Rows of x hold H queries, then K keys, `C = (H + K) · D` elements, and may be strided. With
    `norm` every head is normed first. x is float32, bfloat16 or float16, the tables are float32 or
    of x's type, the weights of norms float32; native where all is float32 on the CPU. Raises
    `KernelError` on others.
    """
    _check(x_NC, num_queries, dim, cos_NR, sin_NR, norm)
    if gpu.takes(x_NC):
        from motet_kernels.gpu.attention import rotary as kernels

        return kernels.rotate_heads(x_NC, num_queries, dim, cos_NR, sin_NR, norm)
    tokens, heads, rotary = len(x_NC), x_NC.shape[1] // dim, cos_NR.shape[1]
    narrow = (
        x_NC.dtype != torch.float32
        or cos_NR.dtype != torch.float32
        or sin_NR.dtype != torch.float32
    )
    native = None if narrow or not is_cpu(x_NC) else _ROTARY.native()
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


def rotate_store_kv(
    heads: PackedHeads, key_PKSD: Tensor, value_PKSD: Tensor, slots_N: Tensor
) -> Tensor:
    """Store the rotated keys and the values in their slots, as `kv.store_kv`.

    Return the rotated queries `[N, H, D]`. On a GPU this is one launch, and keys are rounded once,
    to the cache's type.
    """
    x_NC, queries, keys, dim = heads[:4]
    if not gpu.takes(x_NC):
        query_NHD, key_NKD, value_NKD = heads.rotated()
        store_kv(key_NKD, value_NKD, key_PKSD, value_PKSD, slots_N)
        return query_NHD
    _check(x_NC, queries, dim, heads.cos_NR, heads.sin_NR, heads.norm)
    if x_NC.shape[1] != (queries + 2 * keys) * dim:
        raise KernelError(
            f"x_NC: {x_NC.shape[1]} numbers must be {queries} queries, {keys} keys and values of {dim}"
        )
    shape = (len(x_NC), keys, dim)
    check_slots(slots_N, key_PKSD)
    check_cache("key", shape, key_PKSD, x_NC, slots_N)
    check_cache("value", shape, value_PKSD, x_NC, slots_N)
    check_pair(key_PKSD, value_PKSD)
    from motet_kernels.gpu.attention import rotary as kernels

    tables = heads.cos_NR, heads.sin_NR, heads.norm
    return kernels.rotate_store_kv(x_NC, queries, *tables, key_PKSD, value_PKSD, slots_N)


def rotate_heads_torch(
    x_NC: Tensor,
    num_queries: int,
    dim: int,
    cos_NR: Tensor,
    sin_NR: Tensor,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Compute `rotate_heads` in torch: its twin."""
    wide = torch.promote_types(x_NC.dtype, torch.float32)
    x_NHD = x_NC.to(wide).unflatten(1, (-1, dim))
    parts = [x_NHD[:, :num_queries], x_NHD[:, num_queries:]]
    if norm is not None:
        weights = (norm.q_weight_D, norm.k_weight_D)
        parts = [
            rms_norm_torch(part, weight, norm.eps, norm.offset)
            for part, weight in zip(parts, weights, strict=True)
        ]
    x_NHD, rotary = torch.cat(parts, dim=1), cos_NR.shape[1]
    rotated = x_NHD[..., :rotary]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos_NR[:, None].to(wide) + torch.cat((-second, first), dim=-1) * sin_NR[
        :, None
    ].to(wide)
    return torch.cat((rotated, x_NHD[..., rotary:]), dim=-1).to(x_NC.dtype)


def _check(
    x_NC: Tensor, num_queries: int, dim: int, cos_NR: Tensor, sin_NR: Tensor, norm: HeadNorm | None
) -> None:
    if (
        x_NC.dtype not in GPU_FLOATS
        or x_NC.dim() != 2
        or (x_NC.stride(1) != 1 and x_NC.shape[1] > 1)
    ):
        raise KernelError(
            f"x_NC: {x_NC.dtype}, shape {list(x_NC.shape)}, must be dense rows of {_NAMES}"
        )
    if x_NC.shape[1] % dim or not 0 <= num_queries * dim <= x_NC.shape[1]:
        raise KernelError(
            f"x_NC: {x_NC.shape[1]} numbers are not {num_queries} queries and some keys of {dim}"
        )
    for name, table in (("cos_NR", cos_NR), ("sin_NR", sin_NR)):
        right = table.dtype in (torch.float32, x_NC.dtype) and table.is_contiguous()
        if not right or table.dim() != 2 or len(table) != len(x_NC):
            what, kinds = (
                f"{table.dtype} {list(table.shape)}",
                " or ".join({"torch.float32", str(x_NC.dtype)}),
            )
            raise KernelError(
                f"{name}: {what} must be dense {kinds} with a row for each of {len(x_NC)} tokens"
            )
        check_device(name, table, "x_NC", x_NC)
    if cos_NR.shape != sin_NR.shape or cos_NR.shape[1] % 2 or cos_NR.shape[1] > dim:
        raise KernelError(
            f"cos_NR, sin_NR: widths {cos_NR.shape[1]}, {sin_NR.shape[1]} must be equal, even, at most {dim}"
        )
    if norm is not None:
        _check_weight("q_weight_D", norm.q_weight_D, dim, x_NC)
        _check_weight("k_weight_D", norm.k_weight_D, dim, x_NC)


def _check_weight(name: str, weight_D: Tensor, dim: int, x_NC: Tensor) -> None:
    if weight_D.dtype != torch.float32 or weight_D.shape != (dim,) or not weight_D.is_contiguous():
        raise KernelError(
            f"{name}: {weight_D.dtype} {list(weight_D.shape)} must be dense float32 [{dim}]"
        )
    check_device(name, weight_D, "x_NC", x_NC)
