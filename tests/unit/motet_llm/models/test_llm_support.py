"""How the rule of a mask is read, and what a model's code must not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from motet_llm.attention.options import Reach
from motet_llm.models import support
from motet_llm.weights import checkpoint
from motet_shared.errors import ConfigError
from support.families import language_families as families


def mask_of(rule: Any, size: int | None = None) -> torch.Tensor:
    return support._rule_instead_of_mask(
        q_length=6, kv_length=6, mask_function=rule, local_size=size, use_vmap=False
    )


@given(window=st.integers(1, 300), context=st.integers(2, 400))
def test_a_window_is_read_off_its_mask(window: int, context: int) -> None:
    mask = mask_of(sliding_window_causal_mask_function(window), window)
    assert support.reach_of(mask, context) == Reach(window if window < context else None)


@given(context=st.integers(2, 400))
def test_a_causal_mask_has_no_window(context: int) -> None:
    assert support.reach_of(mask_of(causal_mask_function), context) == Reach()


@given(chunk=st.integers(2, 60), context=st.integers(2, 200))
def test_chunks_are_read_off_their_mask(chunk: int, context: int) -> None:
    mask = mask_of(chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long)), chunk)
    assert support.reach_of(mask, context) == Reach(chunk=chunk if chunk < context else None)


@pytest.mark.parametrize(
    "rule",
    [
        bidirectional_mask_function,
        and_masks(causal_mask_function, lambda b, h, q, k: (k % 2 == 0) | (k == q)),
    ],
)
def test_other_masks_are_refused(rule: Any) -> None:
    with pytest.raises(support.Refusal, match="not causal, or have gaps"):
        support.reach_of(mask_of(rule), 64)


class LooksBack(torch.nn.Module):
    """Adds a trace of the token before, behind attention's back."""

    def forward(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        return hidden_1ND + 0.1 * torch.roll(hidden_1ND, 1, dims=1)


class CountsPlaces(torch.nn.Module):
    """Takes positions from places in the batch."""

    def forward(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        return hidden_1ND * (1 + 0.1 * torch.arange(hidden_1ND.shape[1])[:, None])


@pytest.mark.parametrize("extra", [LooksBack, CountsPlaces])
def test_tokens_that_see_each_other_or_their_places_are_found(extra: type[torch.nn.Module]) -> None:
    model = families.random_model("LlamaForCausalLM")
    model.model.layers[2].mlp = torch.nn.Sequential(model.model.layers[2].mlp, extra())
    with pytest.raises(ConfigError, match="model_type="):
        checkpoint.prepare(model)


def test_a_sixteen_bit_model_is_not_taken_for_one_that_mixes_tokens() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=16
    )
    checkpoint.prepare(LlamaForCausalLM(config).bfloat16().eval())
    checkpoint.prepare(families.random_model("Qwen3MoeForCausalLM").bfloat16())


@pytest.mark.parametrize(
    ("name", "window"), [("Qwen2MoeForCausalLM", families.WINDOW), ("NemotronForCausalLM", None)]
)
def test_lost_keyword_arguments_are_brought_back(name: str, window: int | None) -> None:
    seen = support.examine(families.random_model(name), families.CONTEXT)
    assert seen[0].reach == seen[0].passed == Reach(window)
    assert all(layer.complete for layer in seen.values())
