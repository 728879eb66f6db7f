"""Store the keys and values of a step in the pages of a paged KV cache.

Keys and values of a layer are two tensors `[P, K, S, D]`, so that a head's part of a block is
contiguous in memory. A slot is `block · S + offset`; a token whose slot is `NO_SLOT` is not stored,
which is for the padding of a step. In a cache of 8 bits (int8, float8_e4m3fn) a head's row is D
codes followed by their own scale in float32: `[P, K, S, D + 4]`.

Shapes: N packed tokens, P blocks, S slots per block, K key/value heads, D dim (that of the values
may differ).
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.attention.kv_format import CODED, TYPES, dim_of, encode
from motet_kernels.runtime.arguments import (
    check_device,
    check_floats,
    check_integers,
    check_pages,
    is_cpu,
)
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

NO_SLOT = -1

_STORE = Kernel("motet_store_kv", "pipiiii")
# Layout of `Store` in csrc/kv.cpp.
_PACK = struct.Struct("10q").pack


def store_kv(
    key_NKD: Tensor,
    value_NKD: Tensor | None,
    key_PKSD: Tensor,
    value_PKSD: Tensor | None,
    slots_N: Tensor,
) -> None:
    """Store a step's keys and values, rounded to the cache's type, each token in its slot.

    `slots_N` is int64, on the same device, without duplicates other than `NO_SLOT`. Inputs may have
    any strides but a dense last dimension. The values are None where they are a view of the keys, as in multi-head
    latent attention. Raises `KernelError` on a slot outside of the cache, which is then unchanged.
    On a GPU slots are not validated, which would synchronize with the device: a token whose slot is
    out of range is skipped.
    """
    _check("key", key_NKD, key_PKSD, slots_N)
    check_slots(slots_N, key_PKSD)
    pairs = [(key_NKD, key_PKSD)]
    if value_NKD is not None and value_PKSD is not None:
        _check("value", value_NKD, value_PKSD, slots_N)
        check_pair(key_PKSD, value_PKSD)
        pairs.append((value_NKD, value_PKSD))
    elif value_NKD is not value_PKSD:
        raise KernelError("value_NKD, value_PKSD: one is None; give both or neither")
    if gpu.takes(key_PKSD):
        from motet_kernels.gpu.attention import kv as kernels

        kernels.store_kv(key_NKD, value_NKD, key_PKSD, value_PKSD, slots_N)
        return
    store = _STORE.native() if is_cpu(key_PKSD) else None
    if store is None:
        for rows_NKD, cache_PKSD in pairs:
            store_torch(rows_NKD, cache_PKSD, slots_N)
        return
    blocks, heads, slots_per_block, _ = key_PKSD.shape
    packed = b"".join([_pack(rows_NKD, cache_PKSD) for rows_NKD, cache_PKSD in pairs])
    bad = store(
        packed, len(pairs), slots_N.data_ptr(), len(slots_N), heads, blocks, slots_per_block
    )
    if bad:
        raise _bad_slot(bad - 1, key_PKSD, slots_N)


def store_torch(rows_NKD: Tensor, cache_PKSD: Tensor, slots_N: Tensor) -> None:
    """Store keys or values in torch: the native kernel's twin."""
    slots_per_block = cache_PKSD.shape[2]
    num_slots = cache_PKSD.shape[0] * slots_per_block
    bad_N = (slots_N < NO_SLOT) | (slots_N >= num_slots)
    if bad_N.any():
        raise _bad_slot(int(bad_N.nonzero()[0]), cache_PKSD, slots_N)
    stored_N = slots_N != NO_SLOT
    rows_NKD, slots_N = rows_NKD[stored_N], slots_N[stored_N]
    blocks_N = torch.div(slots_N, slots_per_block, rounding_mode="floor")
    if cache_PKSD.dtype in CODED:  # as bytes: torch has no indexed assignment of float8
        coded = encode(rows_NKD, cache_PKSD.dtype).view(torch.uint8)
        cache_PKSD.view(torch.uint8)[blocks_N, :, slots_N % slots_per_block] = coded
    else:
        cache_PKSD[blocks_N, :, slots_N % slots_per_block] = rows_NKD.to(cache_PKSD.dtype)


def check_slots(slots_N: Tensor, key_PKSD: Tensor) -> None:
    """Raise `KernelError` unless the slots are int64 `[N]` on the cache's device."""
    check_integers("slots_N", slots_N, 1, torch.int64)
    check_device("slots_N", slots_N, "key_PKSD", key_PKSD)


def check_pair(key_PKSD: Tensor, value_PKSD: Tensor) -> None:
    """Raise `KernelError` unless caches of keys and values agree in blocks, heads and slots."""
    if value_PKSD.shape[:3] != key_PKSD.shape[:3]:
        begin = ", ".join(map(str, key_PKSD.shape[:3]))
        raise KernelError(
            f"value_PKSD: shape {list(value_PKSD.shape)} must begin as the keys' {begin}, …"
        )


def check_cache(
    name: str, shape: tuple[int, ...], cache_PKSD: Tensor, rows: Tensor, slots_N: Tensor
) -> None:
    """Raise `KernelError` unless rows of `shape` `[N, K, D]` fit the cache and `slots_N`.

    `rows` is the tensor that holds the rows; it must be on the cache's device.
    """
    check_pages(f"{name}_PKSD", cache_PKSD)
    tokens, heads, dim = shape
    cache_heads, cache_dim = cache_PKSD.shape[1], dim_of(cache_PKSD)
    if (heads, dim) != (cache_heads, cache_dim):
        raise KernelError(
            f"{name}_NKD: heads and dim {heads}, {dim} must be the cache's {cache_heads}, {cache_dim}"
        )
    if len(slots_N) != tokens:
        raise KernelError(f"slots_N: {len(slots_N)} slots must be as many as the {tokens} tokens")
    check_device(f"{name}_NKD", rows, f"{name}_PKSD", cache_PKSD)


def _check(name: str, rows_NKD: Tensor, cache_PKSD: Tensor, slots_N: Tensor) -> None:
    check_floats(f"{name}_NKD", rows_NKD, 3)
    check_cache(name, tuple(rows_NKD.shape), cache_PKSD, rows_NKD, slots_N)


def _pack(rows_NKD: Tensor, cache_PKSD: Tensor) -> bytes:
    return _PACK(
        rows_NKD.data_ptr(),
        rows_NKD.dtype == torch.bfloat16,
        *rows_NKD.stride()[:2],
        rows_NKD.shape[2],
        cache_PKSD.data_ptr(),
        TYPES[cache_PKSD.dtype],
        *cache_PKSD.stride()[:3],
    )


def _bad_slot(index: int, cache_PKSD: Tensor, slots_N: Tensor) -> KernelError:
    total = cache_PKSD.shape[0] * cache_PKSD.shape[2]
    return KernelError(
        f"slots_N[{index}]: slot {int(slots_N[index])} must be from 0 to {total - 1}, or {NO_SLOT}"
    )
