"""Paged attention as model code calls it, against the textbook: one query at a time, loops, float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.attention.paged_batch import PagedBatch
from motet_llm.attention.paged import GroupStep, ShapeProbe, StepLayout, paged_attention
from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_models.capacity import KvGroup
from motet_shared.errors import ConfigError

DIM, VALUE_DIM, SIZE = 8, 6, 4
LAYER: Any = SimpleNamespace(layer_idx=0)


def textbook(
    query_HND: Tensor, key_KTD: Tensor, value_KTD: Tensor, first: int, options: dict[str, Any]
) -> Tensor:
    """Output `[N, H, D]` of queries at positions `first`, `first + 1`, … over all keys of one sequence."""
    heads, queries, _ = query_HND.shape
    out = torch.zeros(queries, heads, value_KTD.shape[-1], dtype=torch.float64)
    window = options.get("sliding_window") or math.inf
    for head in range(heads):
        group = head * len(key_KTD) // heads
        for i in range(queries):
            seen = [t for t in range(first + i + 1) if first + i - t < window]
            scores = (key_KTD[group, seen].double() @ query_HND[head, i].double()) * options[
                "scaling"
            ]
            if options.get("softcap"):
                scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
            if options.get("s_aux") is not None:
                scores = torch.cat([scores, options["s_aux"][head : head + 1].double()])
            weights = scores.softmax(-1)[: len(seen)]
            out[i, head] = weights @ value_KTD[group, seen].double()
    return out


@settings(max_examples=60)
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
    out, _ = paged_attention(
        LAYER, step.query, step.key, step.value, None, layout=step.layout, **options
    )
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
        self.values = [
            torch.randn(kv_heads, first + count, VALUE_DIM) for first, count in self.spans
        ]
        self.query = torch.randn(1, heads, total, DIM)
        self.key = torch.cat(
            [k[:, s[0] :] for k, s in zip(self.keys, self.spans, strict=True)], dim=1
        ).unsqueeze(0)
        self.value = torch.cat(
            [v[:, s[0] :] for v, s in zip(self.values, self.spans, strict=True)], dim=1
        ).unsqueeze(0)
        self.layout = self._layout(kv_heads)

    def _layout(self, kv_heads: int) -> StepLayout:
        free = torch.randperm(40).tolist()
        tables = [
            [free.pop() for _ in range(-(-(first + count) // SIZE))] for first, count in self.spans
        ]
        kv = KvCache({0: LayerShape(kv_heads, DIM, VALUE_DIM)}, 40, SIZE, torch.float32)
        slots = []
        for (first, count), table, keys, values in zip(
            self.spans, tables, self.keys, self.values, strict=True
        ):
            own = torch.tensor([table[p // SIZE] * SIZE + p % SIZE for p in range(first + count)])
            kv.write(
                0, keys[:, :first].transpose(0, 1), values[:, :first].transpose(0, 1), own[:first]
            )
            slots.append(own[first:])
        width = max(map(len, tables))
        padded = torch.tensor(
            [table + [kv.null_block] * (width - len(table)) for table in tables], dtype=torch.int32
        )
        starts = torch.tensor([0, *(count for _, count in self.spans)], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        lengths = torch.tensor([first + count for first, count in self.spans], dtype=torch.int32)
        return StepLayout(kv, [GroupStep(torch.cat(slots), PagedBatch(padded, starts, lengths))])


# --------------------------------------------------------------------------------------------------------------- limits
def test_model_code_that_keeps_its_own_mask_is_refused() -> None:
    step = Step([3], 2, 4, 2)
    for attention_mask, layout in ((torch.zeros(1), step.layout), (None, None)):
        with pytest.raises(ConfigError, match="SimpleNamespace"):
            paged_attention(LAYER, step.query, step.key, step.value, attention_mask, layout=layout)


def test_a_layer_that_attends_twice_is_refused() -> None:
    step, probe = Step([3], 2, 4, 2), ShapeProbe()
    out, _ = paged_attention(LAYER, step.query, step.key, step.value, None, layout=probe)
    assert out.shape == (1, 2, 4, VALUE_DIM)
    assert probe.layers == {0: LayerShape(2, DIM, VALUE_DIM)}
    with pytest.raises(ConfigError, match="layer 0"):
        paged_attention(LAYER, step.query, step.key, step.value, None, layout=probe)


def test_scrubbed_blocks_are_zero_and_the_cache_takes_the_bytes_it_says() -> None:
    shapes = {layer: LayerShape(2, DIM, VALUE_DIM) for layer in range(3)}
    kv = KvCache(shapes, 5, SIZE, torch.bfloat16)
    assert kv.nbytes == 6 * kv.layout.block_bytes == 6 * 3 * 2 * (DIM + VALUE_DIM) * 2 * SIZE
    nan = torch.full((SIZE, 2, DIM), torch.nan, dtype=torch.bfloat16)
    kv.write(1, nan, nan[..., :VALUE_DIM], torch.arange(SIZE) + 2 * SIZE)
    kv.scrub([2])
    for tensor in kv.layer(1):
        assert not tensor.any()


# --------------------------------------------------------------------------------------------------------------- groups
def test_layers_that_forget_alike_share_a_block_table_and_all_share_storage() -> None:
    plain, narrow = LayerShape(1, DIM, DIM), LayerShape(2, DIM, DIM, window=8)
    shapes = {0: narrow, 1: narrow, 2: plain, 3: narrow, 4: narrow, 5: plain, 6: narrow}
    kv = KvCache(shapes, 3, SIZE, torch.float32)
    assert kv.groups == (KvGroup((2, 5)), KvGroup((0, 1), 8), KvGroup((3, 4), 8), KvGroup((6,), 8))
    assert kv.layout.block_bytes == 2 * 2 * 2 * DIM * 4 * SIZE  # two layers of the wider kind
    assert [kv.group_of[layer] for layer in range(7)] == [1, 1, 0, 2, 2, 0, 3]


@given(position=st.integers(0, 60), window=st.integers(1, 30), size=st.integers(1, 9))
def test_no_block_before_the_first_needed_one_is_seen(
    position: int, window: int, size: int
) -> None:
    first = KvGroup((0,), window).gap(position, size).stop
    oldest = max(0, position - window + 1)
    assert first == oldest // size
    assert not KvGroup((0,)).gap(position, size)


@given(
    context=st.integers(0, 200),
    step=st.integers(1, 40),
    size=st.integers(1, 9),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_most_blocks_is_what_prefilling_and_decoding_ever_hold(
    context: int, step: int, size: int, window: int | None
) -> None:
    group = KvGroup((0,), window)
    held = 0
    for start in range(context):
        end = min(start + step, context)
        held = max(held, -(-end // size) - group.gap(start, size).stop)
    assert held <= group.most_blocks(context, step, size) <= held + 1


def test_blocks_travel_whole() -> None:
    shapes = {0: LayerShape(2, DIM, VALUE_DIM), 1: LayerShape(2, DIM, VALUE_DIM)}
    kv = KvCache(shapes, 4, SIZE, torch.float32)
    for layer in shapes:
        rows = torch.randn(SIZE, 2, DIM)
        kv.write(layer, rows, rows[..., :VALUE_DIM], torch.arange(SIZE))
    kv.copy([0], [1])
    kv.write_blocks([2], [kv.read_block(0)])
    for layer in shapes:
        for tensor in kv.layer(layer):
            assert tensor[0].any()
            assert torch.equal(tensor[0], tensor[1])
            assert torch.equal(tensor[0], tensor[2])


def test_a_latent_layer_keeps_one_tensor_that_is_key_and_value() -> None:
    """Multi-head latent attention: all heads attend to the same latents, whose first numbers are the values."""
    rank, rope, heads, first = 5, 3, 4, 6
    kv = KvCache({0: LayerShape(1, rank + rope, 0)}, 4, SIZE, torch.float32)
    latents = torch.randn(first + 1, rank + rope)
    kv.write(0, latents[:first].unsqueeze(1), None, torch.arange(first))
    batch = PagedBatch(
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([first + 1], dtype=torch.int32),
    )
    layout = StepLayout(kv, [GroupStep(torch.tensor([first]), batch)])
    query = torch.randn(1, heads, rank + rope)
    out = layout.attend_latent(0, query, latents[first:], rank, 0.5)
    weights = (query[0] @ latents.T * 0.5).softmax(-1)
    torch.testing.assert_close(out[0], weights @ latents[:, :rank], atol=1e-5, rtol=1e-5)
    assert kv.layout.block_bytes == (rank + rope) * 4 * SIZE
