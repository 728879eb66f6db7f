"""Keys and values on their way from one engine to another, in a form that neither's blocks are a part of.

What travels is a range of tokens, in parts that each fit into a blob: of some layers, one after the other, the keys
`[N, K, D]` and then the values `[N, K, V]` of some tokens, in the sender's type. So block sizes and types of the two
caches may differ. A latent layer has keys alone. A layer with a sliding window sends only what the token after the
range still sees.

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

from motet_kernels.kv import CODED, decode, dim_of, row_size
from motet_shared.errors import BadRequest

from .kv_cache import KvCache

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
Tables = Sequence[Sequence[int]]  # a request's blocks, by group of layers


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `first` to `end` of `layers`: a part of what has to come before a request goes on from token `stop`.

    start: where the range begins. last: nothing of the range is missing after this part.
    """

    start: int
    stop: int
    layers: tuple[int, ...]
    first: int
    end: int
    last: bool = False


def token_bytes(kv: KvCache, layer: int) -> int:
    """Of one token of a layer, in the cache's type."""
    return sum(t.shape[1] * t.shape[3] for t in kv.tensors(layer)) * kv.dtype.itemsize


def first_seen(kv: KvCache, layer: int, start: int, stop: int) -> int:
    """First token of a range that token `stop` sees in a layer."""
    window = kv.groups[kv.group_of[layer]].window
    return start if window is None else max(start, stop - window + 1)


def plan_parts(kv: KvCache, start: int, stop: int, most_bytes: int) -> list[Part]:
    """The parts of a range, each of at most `most_bytes`, or else of one token of one layer."""
    kinds: dict[int, list[int]] = {}
    for layer in sorted(kv.group_of):
        kinds.setdefault(first_seen(kv, layer, start, stop), []).append(layer)
    pieces = [piece for first, layers in kinds.items() for piece in _cut(kv, layers, first, stop, most_bytes)]
    ends = [False] * (len(pieces) - 1) + [True]
    return [Part(start, stop, *piece, last) for piece, last in zip(pieces, ends, strict=True)]


def _cut(
    kv: KvCache, layers: Sequence[int], first: int, stop: int, most_bytes: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Layers together as far as they fit; a layer that does not fit by itself, token by token."""
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
            yield from (((layer,), begin, min(begin + step, stop)) for begin in range(first, stop, step))
        else:
            together.append(layer)
            room -= size
    if together:
        yield tuple(together), first, stop


def part_bytes(kv: KvCache, part: Part, dtype: torch.dtype) -> int:
    """Bytes of a part that a cache of `dtype` sends."""
    tensors = [tensor for layer in part.layers for tensor in kv.tensors(layer)]
    per_token = sum(t.shape[1] * row_size(dim_of(t), dtype) for t in tensors) * dtype.itemsize
    return per_token * (part.end - part.first)


def pack(kv: KvCache, tables: Tables, part: Part) -> Tensor:
    """The bytes of a part, `uint8` on the CPU."""
    device = kv.layer(part.layers[0])[0].device
    out = torch.empty(part_bytes(kv, part, kv.dtype), dtype=torch.uint8, device=device)
    slots = {g: kv.slots(tables[g], part.first, part.end) for g in {kv.group_of[layer] for layer in part.layers}}
    at = 0
    for layer in part.layers:
        for rows_NKD in kv.pick(layer, slots[kv.group_of[layer]]):
            out[at : at + rows_NKD.nbytes] = rows_NKD.view(torch.uint8).flatten()
            at += rows_NKD.nbytes
    return out.cpu()


def unpack(kv: KvCache, tables: Tables, part: Part, content: Tensor, dtype: torch.dtype) -> None:
    """Store a part, rounded to the cache's type; `content` is `uint8`, as `pack` of a cache of `dtype` gives it."""
    device = kv.layer(part.layers[0])[0].device
    elements = content.to(device).view(dtype)
    slots = {g: kv.slots(tables[g], part.first, part.end) for g in {kv.group_of[layer] for layer in part.layers}}
    at, count = 0, part.end - part.first
    for layer in part.layers:
        rows: list[Tensor] = []
        for cache_PKSD in kv.tensors(layer):
            shape = (count, cache_PKSD.shape[1], row_size(dim_of(cache_PKSD), dtype))
            rows.append(elements[at : at + math.prod(shape)].view(shape))
            at += math.prod(shape)
        if kv.dtype == dtype and dtype in CODED:  # to be rounded again would change them
            kv.put(layer, rows, slots[kv.group_of[layer]])
            continue
        rows = [_converted(row, kv.dtype) for row in rows]
        kv.write(layer, rows[0], rows[1] if len(rows) > 1 else None, slots[kv.group_of[layer]])


def _converted(rows_NKD: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of any type as numbers that a cache of `dtype` takes."""
    wide = decode(rows_NKD) if rows_NKD.dtype in CODED else rows_NKD
    return wide.float() if dtype in CODED else wide.to(dtype)


class Range:
    """What has come of the range that is on its way: parts in order, of every layer, without a gap."""

    def __init__(self, kv: KvCache, start: int, stop: int):
        self.start, self.stop = start, stop
        self._next = {layer: first_seen(kv, layer, start, stop) for layer in kv.group_of}

    def add(self, part: Part) -> None:
        """Raises BadRequest for a part that does not go on where the others end, or is the last too early."""
        if (part.start, part.stop) != (self.start, self.stop):
            raise BadRequest(f"a part of tokens {part.start} to {part.stop} came among {self.start} to {self.stop}")
        if part.end <= part.first or part.end > self.stop or not part.layers:
            raise BadRequest(f"a part has layers {list(part.layers)} of tokens {part.first} to {part.end}")
        for layer in part.layers:
            if self._next.get(layer) != part.first:
                raise BadRequest(f"layer {layer}: token {part.first} came where {self._next.get(layer)} was due")
            self._next[layer] = part.end
        if part.last and (missing := [layer for layer, end in self._next.items() if end < self.stop]):
            raise BadRequest(f"layers {missing[:8]} have not come up to token {self.stop}")


def adapted(kv: str, digest: str) -> str:
    """The fingerprint of what an engine computes with an adapter, from its own; empty where that is."""
    return hashlib.blake2b(f"{kv} {digest}".encode(), digest_size=8).hexdigest() if kv else ""


class Computes(Protocol):
    """What is asked of a `ModelRunner`."""

    kv: KvCache

    def describe(self) -> dict[str, str]: ...


def fingerprint(runner: Computes, deterministic: bool) -> str:
    """Engines for the same model take keys and values from each other if theirs are equal.

    Types of weights and activations have to agree; where tokens must not differ by a bit, so has everything else.
    """
    kv, computed = runner.kv, runner.describe()
    shapes = {
        layer: [[t.shape[1], dim_of(t)] for t in kv.tensors(layer)] + [kv.groups[g].window]
        for layer, g in sorted(kv.group_of.items())
    }
    settings = computed if deterministic else {name: computed[name] for name in ("dtype", "weights")}
    text = json.dumps([shapes, settings, deterministic], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
