"""Run steps of packed rows through a model, with a plain layout as the reference.

`check_against_generate` compares a model under a random schedule of chunks with
`transformers.generate`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from motet_kernels.recurrent.packed_rows import PackedRows
from motet_llm.attention.options import AttentionOptions
from motet_llm.attention.paged import RotatesHeads
from motet_llm.models.recurrent import Recurrent

TOLERANCE = 1e-4


@dataclass
class Sequence:
    """Hold a prompt and its continuation; `computed` tokens are done, `logits` follow each."""

    prompt: int
    tokens: list[int]
    slot: int
    computed: int = 0
    kept: dict[Any, Tensor] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)

    def append(self, key: Any, rows: Tensor) -> Tensor:
        self.kept[key] = torch.cat((self.kept[key], rows)) if key in self.kept else rows.clone()
        return self.kept[key]


@dataclass
class PlainLayout(RotatesHeads):
    """Lay out a step of `rows`, with keys and values as plain tensors."""

    rows: Rows[tuple[Sequence, int]]
    states: dict[int, tuple[Tensor, ...]]
    num_slots: int

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions,
    ) -> Tensor:
        assert options.softcap is None
        assert options.sinks_H is None
        outs = []
        for row, span in self._spans():
            keys_KTD = row.append((layer, "key"), key[0, :, span].transpose(0, 1)).transpose(0, 1)
            values_KTD = row.append((layer, "value"), value[0, :, span].transpose(0, 1)).transpose(
                0, 1
            )
            groups = query.shape[1] // len(keys_KTD)
            query_HQD = query[0, :, span]
            out = _causal(
                query_HQD,
                keys_KTD.repeat_interleave(groups, 0),
                values_KTD.repeat_interleave(groups, 0),
                scale,
            )
            outs.append(out.transpose(0, 1))
        return torch.cat(outs).unsqueeze(0)

    def attend_latent(
        self, layer: int, query_NHC: Tensor, latent_NC: Tensor, value_dim: int, scale: float
    ) -> Tensor:
        outs = []
        for row, span in self._spans():
            latent_1TC = row.append((layer, "latent"), latent_NC[span]).unsqueeze(0)
            out = _causal(
                query_NHC[span].transpose(0, 1), latent_1TC, latent_1TC[..., :value_dim], scale
            )
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    def recurrent(
        self, layer: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Recurrent:
        if layer not in self.states:
            self.states[layer] = tuple(
                torch.zeros(self.num_slots, *shape, dtype=dtype) for shape in shapes
            )
        starts = [0]
        for _, count in self.rows:
            starts.append(starts[-1] + count)
        slots = torch.tensor([row.slot for row, _ in self.rows])
        return Recurrent(self.states[layer], PackedRows(slots, starts))

    def _spans(self) -> list[tuple[Sequence, slice]]:
        spans, start = [], 0
        for row, count in self.rows:
            spans.append((row, slice(start, start + count)))
            start += count
        return spans


def _causal(query_HQD: Tensor, keys_KTD: Tensor, values_KTV: Tensor, scale: float) -> Tensor:
    queries, keys = query_HQD.shape[1], keys_KTD.shape[1]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    scores = (query_HQD @ keys_KTD.mT * scale).masked_fill(later, -torch.inf)
    return torch.softmax(scores, dim=-1) @ values_KTV


@torch.inference_mode()
def run_step(model: PreTrainedModel, layout: PlainLayout) -> None:
    """Compute the layout's rows, those of one token first, as the engine packs them."""
    layout.rows = sorted(layout.rows, key=lambda row: row[1] > 1)
    spans = [range(row.computed, row.computed + count) for row, count in layout.rows]
    ids = [row.tokens[i] for (row, _), span in zip(layout.rows, spans, strict=True) for i in span]
    positions = [i for span in spans for i in span]
    output = model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        use_cache=False,
        layout=layout,
    )
    logits = list(output.logits[0])
    for row, count in layout.rows:
        row.logits += logits[:count]
        del logits[:count]
        row.computed += count


def run_schedule(
    model: PreTrainedModel, sequences: list[Sequence], rng: random.Random, longest: int = 40
) -> None:
    """Compute all tokens of `sequences` in random chunks, many of one token."""
    states: dict[int, tuple[Tensor, ...]] = {}
    while pending := [row for row in sequences if row.computed < len(row.tokens)]:
        chosen = rng.sample(pending, rng.randint(1, len(pending)))
        sizes = [rng.choice((1, 1, rng.randint(1, longest))) for _ in chosen]
        rows = [
            (row, min(size, len(row.tokens) - row.computed))
            for row, size in zip(chosen, sizes, strict=True)
        ]
        run_step(model, PlainLayout(rows, states, 1 + max(row.slot for row in sequences)))


@torch.inference_mode()
def generate(reference: PreTrainedModel, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Return the greedy continuation of `count` tokens and their log-probabilities `[count, V]`."""
    ids = torch.tensor([prompt])
    result = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack([step[0] for step in result.logits])
    return result.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1)


def check_against_generate(
    reference: PreTrainedModel,
    ours: PreTrainedModel,
    seed: int,
    lengths: tuple[int, ...] = (1, 3, 37, 90),
    count: int = 8,
    longest: int = 40,
    tolerance: float = TOLERANCE,
) -> None:
    """Raise AssertionError if a log-probability differs from `generate`'s by more than `tolerance`.

    The reference's tokens are the input of both, so a tie that falls the other way ends nothing.
    """
    rng = random.Random(seed)
    expected, sequences = [], []
    for slot, length in enumerate(rng.sample(lengths, len(lengths))):
        prompt = [rng.randrange(reference.config.vocab_size - 3) for _ in range(length)]
        tokens, logprobs = generate(reference, prompt, count)
        expected.append(logprobs)
        sequences.append(Sequence(length, prompt + tokens, slot))
    run_schedule(ours, sequences, rng, longest)
    for row, logprobs in zip(sequences, expected, strict=True):
        got = torch.stack(row.logits[row.prompt - 1 : -1]).log_softmax(-1)
        difference = (got - logprobs).abs().max().item()
        assert difference < tolerance, (
            f"prompt of {row.prompt}: log-probabilities differ by {difference}"
        )
