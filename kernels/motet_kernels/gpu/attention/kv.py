"""Store the keys and values of a step in their slots, both in one launch.

Shapes: as in `motet_kernels.attention.kv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.attention.kv_format import row_size
from motet_kernels.gpu.codes import WORD_BYTES, encoded, largest_of, pages, scale_at, scale_of
from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample


@triton.jit
def _put(
    rows_ptr, rows_stride_n, rows_stride_k, cache_ptr, cache_stride_p, cache_stride_k, cache_stride_s,
    token, head, block, place, K, D, BLOCK: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    word: tl.constexpr = 1 if CODES is None else WORD_BYTES
    at = tl.arange(0, BLOCK)[None, :]
    mask = (head < K) & (at < D)
    rows = tl.load(
        rows_ptr + token * rows_stride_n + head * rows_stride_k + at, mask=mask, other=0.0
    ).to(tl.float32)
    cache = (
        cache_ptr + (block * cache_stride_p + head * cache_stride_k + place * cache_stride_s) * word
    )
    if CODES is None:
        tl.store(cache + at, rows.to(cache_ptr.dtype.element_ty), mask=mask)
    else:
        scale, inverse = scale_of(largest_of(rows), CODES == "float8")
        tl.store(cache + at, encoded(rows, scale, inverse, CODES == "float8"), mask=mask)
        tl.store(scale_at(cache, D), scale, mask=head < K)


@triton.jit
def _store_kv(
    slots_ptr, num_slots, SLOTS, K,
    key_ptr, key_stride_n, key_stride_k, keys_ptr, keys_stride_p, keys_stride_k, keys_stride_s, KEY_DIM,
    value_ptr, value_stride_n, value_stride_k, values_ptr, values_stride_p, values_stride_k, values_stride_s, VALUE_DIM,
    KEY: tl.constexpr, VALUE: tl.constexpr, CODES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS))[:, None]
    slot = tl.load(slots_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        block, place = slot // SLOTS, slot % SLOTS
        _put(
            key_ptr, key_stride_n, key_stride_k, keys_ptr, keys_stride_p, keys_stride_k, keys_stride_s,
            token, head, block, place, K, KEY_DIM, KEY, CODES,
        )  # fmt: skip
        if VALUE > 0:
            _put(
                value_ptr, value_stride_n, value_stride_k, values_ptr, values_stride_p, values_stride_k,
                values_stride_s, token, head, block, place, K, VALUE_DIM, VALUE, CODES,
            )  # fmt: skip


def _fits(constants: Constants) -> bool:
    heads = constants["HEADS"]
    return bool(heads == 1 or heads * max(constants["KEY"], constants["VALUE"]) <= 2048)


_STORE = GpuKernel(
    _store_kv,
    Config(warps=4, constants={"HEADS": 8}),
    Config(warps=2, constants={"HEADS": 4}),
    Config(warps=4, constants={"HEADS": 1}),
    fits=_fits,
)


def store_kv(
    key_NKD: Tensor,
    value_NKD: Tensor | None,
    key_PKSD: Tensor,
    value_PKSD: Tensor | None,
    slots_N: Tensor,
) -> None:
    """Compute `motet_kernels.attention.kv.store_kv` with Triton.

    A token whose slot is out of range is skipped.
    """
    (_, heads, dim), (blocks, _, slots, _) = key_NKD.shape, key_PKSD.shape
    *key, codes = _side("key_PKSD", key_NKD, key_PKSD)
    value, sizes = key, {"KEY": triton.next_power_of_2(dim), "VALUE": 0}
    if value_NKD is not None and value_PKSD is not None:
        *value, _ = _side("value_PKSD", value_NKD, value_PKSD)
        sizes["VALUE"] = triton.next_power_of_2(value_NKD.shape[2])
    grid = partial(_programs, len(slots_N), heads)
    _STORE(grid, slots_N, blocks * slots, slots, heads, *key, *value, CODES=codes, **sizes)


def _side(name: str, rows_NKD: Tensor, cache_PKSD: Tensor) -> tuple[Any, ...]:
    """Return keys or values as the kernel takes them, and CODES."""
    cache, strides, codes = pages(name, cache_PKSD)
    return rows_NKD, *rows_NKD.stride()[:2], cache, *strides, rows_NKD.shape[2], codes


def _programs(tokens: int, heads: int, constants: Constants) -> tuple[int, int]:
    return tokens, triton.cdiv(heads, constants["HEADS"])


def samples() -> Iterator[LaunchSample]:
    """Yield heads of 64 and 128, latents (MLA), and steps in another type than the cache.

    The cache may have 8 bits.
    """
    slots_N = torch.zeros(2, dtype=torch.int64)
    for heads, dim, dtype, cache in (
        (8, 128, torch.bfloat16, torch.bfloat16),
        (8, 64, torch.float16, torch.float16),
        (8, 128, torch.float32, torch.bfloat16),
        (1, 576, torch.bfloat16, torch.bfloat16),
        (8, 128, torch.bfloat16, torch.int8),
        (8, 128, torch.bfloat16, torch.float8_e4m3fn),
        (1, 576, torch.bfloat16, torch.float8_e4m3fn),
    ):
        rows_NKD = torch.zeros(2, heads, dim, dtype=dtype)
        cache_PKSD = torch.zeros(4, heads, 16, row_size(dim, cache), dtype=cache)
        label = f"{heads} heads of {dim}, {dtype} to {cache}"
        value, values = (None, None) if dim == 576 else (rows_NKD, cache_PKSD)
        yield LaunchSample(label, partial(store_kv, rows_NKD, value, cache_PKSD, values, slots_N))
