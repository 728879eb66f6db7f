"""Define cases of the KV cache, paged attention, and an encoder's attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels.attention import kv, kv_format
from motet_kernels.attention.blocks import Blocks
from motet_kernels.attention.full_attention import packed_attention
from motet_kernels.attention.paged_attention import attention_torch, paged_attention
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.runtime.device import dtype_name
from motet_kernels.spans import Spans

from .case import Case, Run, Sizes, nbytes_of, random


def stores(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    blocks = -(-sizes.rows // sizes.slots)
    key, value = (random(device, sizes.rows, sizes.kv_heads, sizes.dim) for _ in range(2))
    keys, values = (
        random(device, blocks, sizes.kv_heads, sizes.slots, sizes.dim) for _ in range(2)
    )
    slots_N = torch.randperm(blocks * sizes.slots, device=device)[: sizes.rows]
    yield Case(
        "store_kv",
        partial(kv.store_kv, key, value, keys, values, slots_N),
        nbytes=2 * nbytes_of(key, value),
    )
    for dtype in kv_format.CODED:
        run = partial(
            kv.store_kv,
            key,
            value,
            kv_format.encode(keys, dtype),
            kv_format.encode(values, dtype),
            slots_N,
        )
        moved = nbytes_of(key, value, kv_format.encode(key, dtype), kv_format.encode(value, dtype))
        yield Case(f"store_kv in {dtype_name(dtype)}", run, nbytes=moved)


def moves(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    shape = (2 * sizes.blocks, 2 * sizes.kv_heads, sizes.slots, sizes.dim)
    storages = [random(device, *shape) for _ in range(sizes.layers)]
    blocks = Blocks(storages)
    sources, targets = range(sizes.blocks), range(sizes.blocks, 2 * sizes.blocks)
    sources_B, targets_B = (
        torch.tensor(list(numbers), device=device) for numbers in (sources, targets)
    )

    def by_torch() -> None:
        for storage in storages:
            storage[targets_B] = storage[sources_B]

    moved = 2 * sizes.blocks * blocks.nbytes
    yield Case("copy", partial(blocks.copy, sources, targets), {"torch by layer": by_torch}, moved)
    stacked: dict[str, Run] = {
        "torch by layer": lambda: [storage[sources_B] for storage in storages]
    }
    yield Case("read", partial(blocks.read, sources), stacked, moved)


def paged(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    for sequences in sizes.batch:
        for cache in (None, *kv_format.CODED):
            name = f"decode {sequences} x {sizes.keys}"
            yield _attended(
                sizes, device, sequences, queries=1, keys=sizes.keys, name=name, cache=cache
            )
    for cache in (None, *kv_format.CODED):
        name = f"prefill {sizes.prompt}"
        yield _attended(
            sizes, device, 1, queries=sizes.prompt, keys=sizes.prompt, name=name, cache=cache
        )


def _attended(
    sizes: Sizes,
    device: torch.device,
    sequences: int,
    *,
    queries: int,
    keys: int,
    name: str,
    cache: torch.dtype | None,
) -> Case:
    """Return a case of paged attention.

    cache: 8-bit type of the cache; None: as the queries.
    """
    blocks = -(-keys // sizes.slots)
    tables = torch.randperm(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    starts = torch.arange(sequences + 1, dtype=torch.int32) * queries
    lengths = torch.full((sequences,), keys, dtype=torch.int32)
    batch = PagedBatch(tables, starts, lengths).to(device)
    query = random(device, sequences * queries, sizes.heads, sizes.dim)
    shape = (sequences * blocks, sizes.kv_heads, sizes.slots, sizes.dim)
    key, value = random(device, *shape), random(device, *shape)
    if cache is not None:
        key, value, name = (
            kv_format.encode(key, cache),
            kv_format.encode(value, cache),
            f"{name}, {dtype_name(cache)} cache",
        )
    scale, causal = sizes.dim**-0.5, queries > 1
    dense_k, dense_v = (
        random(device, sequences, sizes.kv_heads, keys, sizes.dim) for _ in range(2)
    )
    peers = {"SDPA on keys in one piece": _sdpa(query, dense_k, dense_v, sequences, scale, causal)}
    if device.type != "cuda":
        peers["twin"] = partial(attention_torch, query, key, value, batch, scale=scale)
    pairs = sequences * queries * keys // (2 if causal else 1)
    run = partial(paged_attention, query, key, value, batch, scale=scale)
    return Case(
        name, run, peers, nbytes_of(query, query, key, value), 4 * pairs * sizes.heads * sizes.dim
    )


def full(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    count, tokens = sizes.encoders, sizes.encoded
    query, key, value = (random(device, count * tokens, sizes.heads, sizes.dim) for _ in range(3))
    scale, spans = sizes.dim**-0.5, Spans.of([tokens] * count, device)
    dense_k, dense_v = (
        x.view(count, tokens, *x.shape[1:]).transpose(1, 2).contiguous() for x in (key, value)
    )
    peers = {"SDPA": _sdpa(query, dense_k, dense_v, count, scale, causal=False)}
    run = partial(packed_attention, query, key, value, spans, scale=scale)
    operations = 4 * count * tokens**2 * sizes.heads * sizes.dim
    yield Case(f"{count} x {tokens}", run, peers, nbytes_of(query, query, key, value), operations)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, sequences: int, scale: float, causal: bool
) -> Run:
    """Return torch's scaled dot product attention on contiguous keys and values."""
    dense_q = query.view(sequences, -1, *query.shape[1:]).transpose(1, 2).contiguous()
    attend = F.scaled_dot_product_attention
    return partial(attend, dense_q, key, value, is_causal=causal, scale=scale, enable_gqa=True)
