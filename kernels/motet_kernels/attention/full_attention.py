"""Compute attention of all tokens of packed rows to each other, as in encoders.

Shapes: S tokens of one sequence, N of all rows, H heads, K key/value heads (G = H / K share one), D
dim, V value dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime import native
from motet_kernels.runtime.arguments import check_device, check_floats, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel
from motet_kernels.spans import Spans

_ATTEND = Kernel("motet_full_attention", "piipiipiipiiifi")
_EXACT, _ROUNDED, _PAIRED = range(3)  # as the native kernel counts them


def full_attention(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, *, scale: float, rounded: bool = False
) -> Tensor:
    """Return `softmax(scale · Q · Kᵀ) · V` of each head, `[S, H, D]` in the queries' type.

    All three inputs have the same shape and any strides but a dense last dimension, so they may be
    slices of one matrix. `rounded` multiplies in 16-bit integer steps: queries and keys relative to
    their own largest value, values in 1023 steps relative to their channel's. That is twice as fast
    on CPUs without instructions for narrower types, with an error of about a thousandth. CPUs with
    AMX round to bfloat16 instead, all CPUs with instructions for bfloat16 do so for inputs that all
    are of it, and the twin and GPUs ignore `rounded`. On the CPU a token's result is bit-identical
    for the same sequence, whatever the number of threads. Raises `KernelError` on inputs that do
    not fit each other.
    """
    tensors = {"query_SHD": query_SHD, "key_SHD": key_SHD, "value_SHD": value_SHD}
    for name, tensor in tensors.items():
        check_floats(name, tensor, 3)
        check_device(name, tensor, "query_SHD", query_SHD)
        if tensor.shape != query_SHD.shape:
            raise KernelError(
                f"{name}: shape {list(tensor.shape)} must be the queries' {list(query_SHD.shape)}"
            )
    if gpu.takes(query_SHD):
        from motet_kernels.gpu.attention import full_attention as kernels

        spans = _alone(len(query_SHD), query_SHD.device)
        return kernels.packed_attention(query_SHD, key_SHD, value_SHD, spans, scale=scale)
    attend = _ATTEND.native() if is_cpu(query_SHD) else None
    if attend is None:
        return full_attention_torch(query_SHD, key_SHD, value_SHD, scale=scale)
    is_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    is_paired = (is_bfloat16 and native.is_multiplying_bfloat16()) or (
        rounded and native.is_multiplying_tiles()
    )
    dtype = torch.bfloat16 if is_paired else torch.float32
    query, key, value = (tensor.to(dtype) for tensor in tensors.values())
    out = torch.empty(query.shape, dtype=dtype)
    attend(
        *(query.data_ptr(), *query.stride()[:2]),
        *(key.data_ptr(), *key.stride()[:2]),
        *(value.data_ptr(), *value.stride()[:2]),
        out.data_ptr(),
        *query.shape,
        scale,
        _PAIRED if is_paired else _ROUNDED if rounded else _EXACT,
    )
    return out.to(query_SHD.dtype)


@lru_cache(maxsize=16)
def _alone(tokens: int, device: torch.device) -> Spans:
    """Return the spans of a single row; cached, because all layers of an encoder use the same."""
    return Spans.of([tokens], device)


def full_attention_torch(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, *, scale: float
) -> Tensor:
    """Compute `full_attention` in torch: its twin."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_SHD, key_SHD, value_SHD))
    return (
        F.scaled_dot_product_attention(query, key, value, scale=scale)[0]
        .transpose(0, 1)
        .contiguous()
    )


def packed_attention(
    query_NHD: Tensor,
    key_NKD: Tensor,
    value_NKV: Tensor,
    spans: Spans,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Return full attention within each row of `spans`, `[N, H, V]` in the queries' type.

    `spans` must be on the tensors' device. If `causal`, a token attends to itself and the tokens
    before it. A `window` of w includes the tokens that are fewer than w away. On a GPU this is one
    launch, and a row's result is bit-identical whatever other rows are in the batch; on the CPU
    each row is computed alone. Raises `KernelError` on arguments that do not fit each other.
    """
    _check_packed(query_NHD, key_NKD, value_NKV, spans, window)
    if gpu.takes(query_NHD):
        from motet_kernels.gpu.attention import full_attention as kernels

        return kernels.packed_attention(
            query_NHD, key_NKD, value_NKV, spans, scale=scale, causal=causal, window=window
        )
    out_NHV = query_NHD.new_empty(*query_NHD.shape[:2], value_NKV.shape[-1])
    for start, stop in spans.pairs:
        parts = (query_NHD[start:stop], key_NKD[start:stop], value_NKV[start:stop])
        out_NHV[start:stop] = _within(*parts, scale, causal, window)
    return out_NHV


def _within(
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKV: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    narrow = window is not None and len(query_SHD) > window
    if not causal and not narrow and query_SHD.shape == key_SKD.shape == value_SKV.shape:
        return full_attention(query_SHD, key_SKD, value_SKV, scale=scale)
    return packed_attention_torch(
        query_SHD, key_SKD, value_SKV, scale=scale, causal=causal, window=window
    )


def packed_attention_torch(
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKV: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Compute `packed_attention` of one row in torch: its twin."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_SHD, key_SKD, value_SKV))
    narrow = window is not None and len(query_SHD) > window
    mask = (
        _window_mask(len(query_SHD), window, causal, query.device)
        if narrow and window is not None
        else None
    )
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


def _window_mask(count: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """Return a mask `[S, S]`, bool: True where the query (first dimension) attends to the key."""
    places = torch.arange(count, device=device)
    apart = places[:, None] - places[None, :]
    return (apart >= 0) & (apart < window) if causal else apart.abs() < window


def _check_packed(
    query_NHD: Tensor, key_NKD: Tensor, value_NKV: Tensor, spans: Spans, window: int | None
) -> None:
    for name, tensor in (("query_NHD", query_NHD), ("key_NKD", key_NKD), ("value_NKV", value_NKV)):
        check_floats(name, tensor, 3)
        check_device(name, tensor, "query_NHD", query_NHD)
        if len(tensor) != spans.num_tokens:
            raise KernelError(f"{name}: {len(tensor)} tokens must be the rows' {spans.num_tokens}")
    (_, heads, dim), (_, kv_heads, key_dim) = query_NHD.shape, key_NKD.shape
    if key_dim != dim:
        raise KernelError(f"key_NKD: dim {key_dim} must be the queries' {dim}")
    if kv_heads < 1 or heads % kv_heads:
        raise KernelError(f"query_NHD: {heads} heads must be a multiple of the keys' {kv_heads}")
    if value_NKV.shape[1] != kv_heads:
        raise KernelError(f"value_NKV: {value_NKV.shape[1]} heads must be the keys' {kv_heads}")
    if window is not None and window < 1:
        raise KernelError(f"window: {window} must be at least 1, or None")
    if spans.device != query_NHD.device:
        raise KernelError(
            f"spans: on {spans.device} must be on {query_NHD.device}, where query_NHD is"
        )
