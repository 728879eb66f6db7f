"""Encode keys and values for transfer between engines, independently of their block layouts.

A transfer sends a range of tokens in parts that each fit into a blob: for some layers, one after
the other, the keys `[N, K, D]` and then the values `[N, K, V]` of some tokens, in the sender's
dtype. So block sizes and dtypes of the two caches may differ. A latent layer has keys alone. A
layer with a sliding window sends only what the token after the range still attends to.

Shapes: N tokens of a part, K key/value heads, D and V dimensions of keys and values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from motet_kernels.attention.kv_format import CODED, decode, row_size
from motet_llm.cache.kv_cache import KvCache
from motet_shared.errors import BadRequest

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
Tables = Sequence[Sequence[int]]  # a request's block tables, by group of layers


@dataclass(frozen=True, slots=True)
class KvPart:
    """Locate tokens `first` to `end` of `layers`: part of the range `start` to `stop` of a request.

    A request continues from token `stop` when the range is complete.
    last: this part completes it.
    """

    start: int
    stop: int
    layers: tuple[int, ...]
    first: int
    end: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Hold a part, its bytes (`uint8`, on the CPU) and their dtype."""

    part: KvPart
    content: Tensor
    dtype: str


def token_bytes(kv: KvCache, layer: int) -> int:
    """Return the bytes of one token of a layer, in the cache's dtype."""
    rows = (heads * row_size(dim, kv.dtype) for heads, dim in kv.widths(layer))
    return sum(rows) * kv.dtype.itemsize


def first_seen(kv: KvCache, layer: int, start: int, stop: int) -> int:
    """Return the first token of a range that token `stop` attends to in a layer."""
    return max(start, kv.groups[kv.group_of[layer]].first_seen(stop))


def plan_parts(kv: KvCache, start: int, stop: int, most_bytes: int) -> list[KvPart]:
    """Return the parts of a range, each of at most `most_bytes`, or of one token of one layer."""
    kinds: dict[int, list[int]] = {}
    for layer in sorted(kv.group_of):
        first = first_seen(kv, layer, start, stop)
        if (
            first < stop
        ):  # else token `stop` begins a chunk of the layer, and attends to none of these
            kinds.setdefault(first, []).append(layer)
    pieces = [
        piece
        for first, layers in kinds.items()
        for piece in _cut(kv, layers, first, stop, most_bytes)
    ]
    ends = [False] * (len(pieces) - 1) + [True]
    return [KvPart(start, stop, *piece, last) for piece, last in zip(pieces, ends, strict=True)]


def _cut(
    kv: KvCache, layers: Sequence[int], first: int, stop: int, most_bytes: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield (layers, first, stop) with as many layers as fit into a part.

    A layer that does not fit by itself is split by tokens.
    """
    together: list[int] = []
    room = most_bytes
    for layer in layers:
        per_token = token_bytes(kv, layer)
        size = (stop - first) * per_token
        if together and size > room:
            yield tuple(together), first, stop
            together, room = [], most_bytes
        if size > most_bytes:
            step = max(1, most_bytes // per_token)
            yield from (
                ((layer,), begin, min(begin + step, stop)) for begin in range(first, stop, step)
            )
        else:
            together.append(layer)
            room -= size
    if together:
        yield tuple(together), first, stop


def part_bytes(kv: KvCache, part: KvPart, dtype: torch.dtype) -> int:
    """Return the bytes of a part that a cache of `dtype` sends."""
    widths = [width for layer in part.layers for width in kv.widths(layer)]
    per_token = sum(heads * row_size(dim, dtype) for heads, dim in widths) * dtype.itemsize
    return per_token * (part.end - part.first)


def pack(kv: KvCache, tables: Tables, part: KvPart) -> Tensor:
    """Return the bytes of a part, `uint8` on the CPU."""
    out = torch.empty(part_bytes(kv, part, kv.dtype), dtype=torch.uint8, device=kv.device)
    slots = {
        g: kv.slots(tables[g], part.first, part.end)
        for g in {kv.group_of[layer] for layer in part.layers}
    }
    at = 0
    for layer in part.layers:
        for rows_NKD in kv.collect(layer, slots[kv.group_of[layer]]):
            out[at : at + rows_NKD.nbytes] = rows_NKD.view(torch.uint8).flatten()
            at += rows_NKD.nbytes
    return out.cpu()


def unpack(kv: KvCache, tables: Tables, part: KvPart, content: Tensor, dtype: torch.dtype) -> None:
    """Store a part, rounded to the cache's dtype.

    `content` is `uint8`, as `pack` gives it for a cache of `dtype`.
    """
    elements = content.to(kv.device).view(dtype)
    slots = {
        g: kv.slots(tables[g], part.first, part.end)
        for g in {kv.group_of[layer] for layer in part.layers}
    }
    at, count = 0, part.end - part.first
    for layer in part.layers:
        rows: list[Tensor] = []
        for heads, dim in kv.widths(layer):
            shape = (count, heads, row_size(dim, dtype))
            rows.append(elements[at : at + math.prod(shape)].view(shape))
            at += math.prod(shape)
        if kv.dtype == dtype and dtype in CODED:  # rounding them again would change them
            kv.put(layer, rows, slots[kv.group_of[layer]])
            continue
        rows = [_converted(row, kv.dtype) for row in rows]
        kv.store(layer, rows[0], rows[1] if len(rows) > 1 else None, slots[kv.group_of[layer]])


def _converted(rows_NKD: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert rows of any dtype to numbers that a cache of `dtype` accepts."""
    wide = decode(rows_NKD) if rows_NKD.dtype in CODED else rows_NKD
    return wide.float() if dtype in CODED else wide.to(dtype)


class TransferRange:
    """Check the parts of the range that is arriving: in order, for every layer, without a gap."""

    def __init__(self, kv: KvCache, start: int, stop: int):
        self.start, self.stop = start, stop
        self._next = {layer: first_seen(kv, layer, start, stop) for layer in kv.group_of}

    def add(self, part: KvPart) -> None:
        """Record a part. Raises BadRequest if it leaves a gap, or is marked last too early."""
        if (part.start, part.stop) != (self.start, self.stop):
            raise BadRequest(
                f"a part of tokens {part.start} to {part.stop} came among {self.start} to {self.stop}"
            )
        if part.end <= part.first or part.end > self.stop or not part.layers:
            raise BadRequest(
                f"a part has layers {list(part.layers)} of tokens {part.first} to {part.end}"
            )
        for layer in part.layers:
            if self._next.get(layer) != part.first:
                raise BadRequest(
                    f"layer {layer}: token {part.first} came where {self._next.get(layer)} was due"
                )
            self._next[layer] = part.end
        if part.last and (
            missing := [layer for layer, end in self._next.items() if end < self.stop]
        ):
            raise BadRequest(f"layers {missing[:8]} have not come up to token {self.stop}")


def adapted(kv: str, digest: str) -> str:
    """Return the fingerprint of the engine `kv` with an adapter; empty where `kv` is."""
    return hashlib.blake2b(f"{kv} {digest}".encode(), digest_size=8).hexdigest() if kv else ""


class Fingerprinted(Protocol):
    """Require the parts of a `ModelRunner` that a fingerprint covers."""

    kv: KvCache

    def describe(self) -> dict[str, str]: ...


def fingerprint(runner: Fingerprinted, deterministic: bool) -> str:
    """Return a fingerprint: engines of one model exchange keys and values if theirs are equal.

    It covers shapes and the dtypes of weights and activations; where tokens must not differ by a
    bit, all settings of the runner.
    """
    kv, computed = runner.kv, runner.describe()
    shapes = {
        layer: [[*width] for width in kv.widths(layer)] + [kv.groups[g].window, kv.groups[g].chunk]
        for layer, g in sorted(kv.group_of.items())
    }
    settings = (
        computed if deterministic else {name: computed[name] for name in ("dtype", "weights")}
    )
    text = json.dumps([shapes, settings, deterministic], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
