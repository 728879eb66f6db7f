"""Paged attention against the textbook: one query at a time, loops, float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_llm.attention import Rows, ShapeProbe, StepLayout, paged_attention
from motet_llm.kv_cache import KvCache, LayerShape, bytes_per_block
from motet_shared.errors import ConfigError

DIM, VALUE_DIM, SIZE = 8, 6, 4
LAYER: Any = SimpleNamespace(layer_idx=0)


def textbook(query_HND: Tensor, key_KTD: Tensor, value_KTD: Tensor, first: int, options: dict[str, Any]) -> Tensor:
    """Output `[N, H, D]` of queries at positions `first`, `first + 1`, … over all keys of one sequence."""
    heads, queries, _ = query_HND.shape
    out = torch.zeros(queries, heads, value_KTD.shape[-1], dtype=torch.float64)
    window = options.get("sliding_window") or math.inf
    for head in range(heads):
        group = head * len(key_KTD) // heads
        for i in range(queries):
            seen = [t for t in range(first + i + 1) if first + i - t < window]
            scores = (key_KTD[group, seen].double() @ query_HND[head, i].double()) * options["scaling"]
            if options.get("softcap"):
                scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
            if options.get("s_aux") is not None:
                scores = torch.cat([scores, options["s_aux"][head : head + 1].double()])
            weights = scores.softmax(-1)[: len(seen)]
            out[i, head] = weights @ value_KTD[group, seen].double()
    return out


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    before=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    chunk=st.integers(1, 9),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([None, 1, 3, 100]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_paged_attention_is_the_textbook_s(
    seed: int,
    before: list[int],
    chunk: int,
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    """Decode rows of several sequences and one prefill chunk in one packed step, over blocks in random order."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"scaling": 0.5, "sliding_window": window, "softcap": softcap}
    options["s_aux"] = torch.randn(heads[0]) if sinks else None
    step = Step(before, chunk, *heads)
    out, _ = paged_attention(LAYER, step.query, step.key, step.value, None, layout=step.layout, **options)
    start = 0
    for sequence, (first, count) in enumerate(step.spans):
        rows = slice(start, start + count)
        keys, values = step.keys[sequence], step.values[sequence]
        expected = textbook(step.query[0, :, rows], keys, values, first, options)
        torch.testing.assert_close(out[0, rows].double(), expected, atol=1e-5, rtol=1e-4)
        start += count


class Step:
    """A packed step: every sequence but the last decodes one token, the last prefills `chunk`."""

    def __init__(self, before: list[int], chunk: int, heads: int, kv_heads: int):
        self.spans = [(first, 1) for first in before[:-1]] + [(before[-1], chunk)]
        total = sum(count for _, count in self.spans)
        self.keys = [torch.randn(kv_heads, first + count, DIM) for first, count in self.spans]
        self.values = [torch.randn(kv_heads, first + count, VALUE_DIM) for first, count in self.spans]
        self.query = torch.randn(1, heads, total, DIM)
        self.key = torch.cat([k[:, s[0] :] for k, s in zip(self.keys, self.spans, strict=True)], dim=1).unsqueeze(0)
        self.value = torch.cat([v[:, s[0] :] for v, s in zip(self.values, self.spans, strict=True)], dim=1).unsqueeze(0)
        self.layout = self._layout(kv_heads)

    def _layout(self, kv_heads: int) -> StepLayout:
        free = torch.randperm(40).tolist()
        tables = [[free.pop() for _ in range(-(-(first + count) // SIZE))] for first, count in self.spans]
        kv = KvCache([LayerShape(kv_heads, DIM, VALUE_DIM)], 40, SIZE, torch.float32)
        slots = []
        for (first, count), table, keys, values in zip(self.spans, tables, self.keys, self.values, strict=True):
            own = torch.tensor([table[p // SIZE] * SIZE + p % SIZE for p in range(first + count)])
            kv.write(0, own[:first], keys[:, :first].transpose(0, 1), values[:, :first].transpose(0, 1))
            slots.append(own[first:])
        rows = [self._rows(kv, tables[:-1], 0, 1)] if len(tables) > 1 else []
        rows.append(self._rows(kv, tables[-1:], len(tables) - 1, self.spans[-1][1]))
        return StepLayout(kv, torch.cat(slots), rows)

    def _rows(self, kv: KvCache, tables: list[list[int]], start: int, queries: int) -> Rows:
        width = max(map(len, tables))
        padded = torch.tensor([table + [kv.null_block] * (width - len(table)) for table in tables])
        spans = self.spans[start : start + len(tables)]
        return Rows(start, queries, padded, torch.tensor([[first + i for i in range(queries)] for first, _ in spans]))


# --------------------------------------------------------------------------------------------------------------- limits
def test_model_code_that_keeps_its_own_mask_is_refused() -> None:
    step = Step([3], 2, 4, 2)
    for attention_mask, layout in ((torch.zeros(1), step.layout), (None, None)):
        with pytest.raises(ConfigError, match="SimpleNamespace keeps its own masks or drops keyword arguments"):
            paged_attention(LAYER, step.query, step.key, step.value, attention_mask, layout=layout)


def test_a_layer_that_attends_twice_is_refused() -> None:
    step, probe = Step([3], 2, 4, 2), ShapeProbe()
    out, _ = paged_attention(LAYER, step.query, step.key, step.value, None, layout=probe)
    assert out.shape == (1, 2, 4, VALUE_DIM)
    assert probe.layers == {0: LayerShape(2, DIM, VALUE_DIM)}
    with pytest.raises(ConfigError, match="layer 0 attends twice"):
        paged_attention(LAYER, step.query, step.key, step.value, None, layout=probe)


def test_scrubbed_blocks_are_zero_and_the_cache_takes_the_bytes_it_says() -> None:
    shapes = [LayerShape(2, DIM, VALUE_DIM)] * 3
    kv = KvCache(shapes, 5, SIZE, torch.bfloat16)
    assert kv.nbytes == 6 * bytes_per_block(shapes, SIZE, torch.bfloat16)
    nan = torch.full((SIZE, 2, DIM), torch.nan, dtype=torch.bfloat16)
    kv.write(1, torch.arange(SIZE) + 2 * SIZE, nan, nan[..., :VALUE_DIM])
    kv.scrub([2])
    keys, values = kv.gather(1, torch.tensor([[2]]))
    assert not keys.any()
    assert not values.any()
