"""Recurrent mixers: exact on every family, however prompts are cut and whoever shares the step."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_kernels.linear.pack import pack_linear
from motet_kernels.recurrent.packed_rows import PackedRows
from motet_kernels.runtime import native
from motet_llm.models import mixers, recurrent
from motet_llm.models.mamba import Mamba2
from motet_llm.models.recurrent import Mixer, Recurrent
from motet_shared.errors import ConfigError
from support.checkpoints.tiny_mixers import RECURRENT, tiny_model, with_mixers
from support.engine.packed_steps import (
    PlainLayout,
    Sequence,
    check_against_generate,
    run_schedule,
    run_step,
)

KINDS = ("bamba", "jamba", "kimi_linear", "lfm2", "qwen3_next")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def installed(family: str) -> PreTrainedModel:
    return with_mixers(tiny_model(family))


@cache
def mixer(family: str) -> Mixer:
    return next(module for module in installed(family).modules() if isinstance(module, Mixer))


class Slots:
    """Three slots of a mixer's states, and a way to advance some of them."""

    def __init__(self, family: str):
        self.mixer = mixer(family)
        self.states = tuple(torch.zeros(3, *shape) for shape in self.mixer.shapes)

    def advance(self, *rows: tuple[int, Tensor]) -> list[Tensor]:
        """Rows of (slot, hidden `[L, X]`), those of one token first. The rows' outputs."""
        starts = [0]
        for _, hidden in rows:
            starts.append(starts[-1] + len(hidden))
        step = Recurrent(self.states, PackedRows(torch.tensor([slot for slot, _ in rows]), starts))
        out = self.mixer.mix(torch.cat([hidden for _, hidden in rows]), step)
        return list(out.split([len(hidden) for _, hidden in rows]))


def hidden(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.extended("families", after=4)
@pytest.mark.parametrize("family", RECURRENT)
def test_logprobs_equal_generate_under_random_chunks(family: str) -> None:
    reference = tiny_model(family)
    for seed in range(2):
        check_against_generate(reference, installed(family), seed)


@pytest.mark.parametrize("family", KINDS)
def test_long_prompts_span_blocks(family: str) -> None:
    reference = tiny_model(family)
    check_against_generate(
        reference, installed(family), 0, lengths=(64, 65, 200), count=3, longest=150
    )


@pytest.mark.parametrize("family", KINDS)
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 99), max_size=6, unique=True))
def test_cuts_do_not_matter(family: str, cuts: list[int]) -> None:
    whole, cut = Slots(family), Slots(family)
    tokens = hidden(100)
    [expected] = whole.advance((1, tokens))
    bounds = [0, *sorted(cuts), 100]
    parts = [cut.advance((1, tokens[a:b]))[0] for a, b in pairwise(bounds)]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-5)
    for theirs, ours in zip(whole.states, cut.states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert not ours[[0, 2]].any()


@pytest.mark.parametrize("family", KINDS)
def test_company_does_not_matter(family: str) -> None:
    alone, company = Slots(family), Slots(family)
    alone.advance((0, hidden(9)))
    company.advance((2, hidden(5, seed=1)), (0, hidden(9)))
    for token in hidden(4, seed=2).split(1):
        [expected] = alone.advance((0, token))
        got = company.advance((1, token + 1), (0, token), (2, hidden(7, seed=3)))
        torch.testing.assert_close(got[1], expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(company.states, alone.states, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", KINDS)
def test_bits_are_the_same_however_tokens_are_packed(family: str) -> None:
    """With native matrix products, whose rows do not depend on each other. The torch twins promise no bits."""
    assert native.load()["isa"] != "torch"
    whole, cut = Slots(family), Slots(family)
    whole.mixer = cut.mixer = copy.deepcopy(whole.mixer)
    for module in list(whole.mixer.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, pack_linear(child.weight, child.bias, "float32"))
    tokens, others = hidden(90), hidden(30, seed=1)
    [expected] = whole.advance((1, tokens))
    outs = [cut.advance((1, tokens[:1]), (0, others[:7]))[0]]
    outs += cut.advance((1, tokens[1:50]))
    outs += cut.advance((0, others[7:8]), (1, tokens[50:51]), (2, others[8:30]))[1:2]
    outs += cut.advance((2, others[:1]), (1, tokens[51:]))[1:]
    assert torch.equal(torch.cat(outs), expected)
    for ours, theirs in zip(cut.states, whole.states, strict=True):
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("family", KINDS)
def test_nan_stays_in_its_row(family: str) -> None:
    slots, clean = Slots(family), Slots(family)
    poison = hidden(5, seed=1) * torch.nan
    slots.advance((0, poison[:1]), (1, hidden(1)), (2, poison))
    clean.advance((1, hidden(1)))
    out = slots.advance((1, hidden(3)), (2, poison))
    [expected] = clean.advance((1, hidden(3)))
    torch.testing.assert_close(out[0], expected, rtol=1e-5, atol=1e-6)
    assert all(states[1].isfinite().all() for states in slots.states)


def test_smallest_step_holds_for_prompts_and_answers() -> None:
    whole, cut = Slots("nemotron_h"), Slots("nemotron_h")
    whole.mixer = cut.mixer = copy.deepcopy(whole.mixer)
    whole.mixer.dt_bias.fill_(-20)  # type: ignore[operator]
    tokens = hidden(12)
    [expected] = whole.advance((1, tokens))
    outs = [cut.advance((1, token))[0] for token in tokens.split(1)]
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-4, atol=1e-6)
    # The state takes in time_step_min of each token, and hardly anything would come of softplus(-20) = 2e-9.
    assert whole.states[1][1].abs().max() > 1e-4


@pytest.mark.parametrize("family", KINDS)
def test_copied_slot_continues_the_sequence(family: str) -> None:
    slots = Slots(family)
    slots.advance((0, hidden(20)))
    for states in slots.states:
        states[2] = states[0]
    [first] = slots.advance((0, hidden(5, seed=1)))
    [second] = slots.advance((2, hidden(5, seed=1)))
    assert torch.equal(first, second)


def test_states_are_float32_in_a_bfloat16_model() -> None:
    model = with_mixers(tiny_model("bamba").bfloat16())
    states: dict[int, tuple[Tensor, ...]] = {}
    rows = [(Sequence(4, [1, 2, 3, 4], 0), 4)]
    run_step(model, PlainLayout(rows, states, 1))
    assert {state.dtype for layer in states.values() for state in layer} == {torch.float32}
    assert all(state.any() for layer in states.values() for state in layer)


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_attention_of_shared_layers_gets_an_index_each(family: str) -> None:
    row = Sequence(3, [1, 2, 3], 0)
    run_schedule(installed(family), [row], random.Random(0))
    assert {layer for layer, _ in row.kept} == {1, 3}


def test_layer_without_a_mixer_is_refused_by_name() -> None:
    known = {name: mixer for name, mixer in mixers.RECURRENT.items() if name != "BambaMixer"}
    with pytest.raises(ConfigError, match="BambaMixer"):
        recurrent.install(tiny_model("bamba"), known)


def test_mixer_that_computes_something_else_is_refused() -> None:
    class Louder(Mamba2):
        def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
            return 1.1 * super().mix(hidden_NX, state)

    with pytest.raises(ConfigError, match=r"BambaMixer .*Louder"):
        recurrent.install(tiny_model("bamba"), {"BambaMixer": Louder})


def test_call_without_layout_or_with_padding_is_refused() -> None:
    model = installed("bamba")
    with pytest.raises(ConfigError, match=r"Mamba2 .*layer 0"):
        model(input_ids=torch.tensor([[1]]), use_cache=False)
    row = Sequence(2, [1, 2], 0)
    with pytest.raises(ConfigError):
        model(
            input_ids=torch.tensor([[1, 2]]),
            attention_mask=torch.tensor([[0, 1]]),
            use_cache=False,
            layout=PlainLayout([(row, 2)], {}, 1),
        )


def test_projections_keep_their_names() -> None:
    """So that whoever packs matrices finds them."""
    before, after = (
        {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for model in (tiny_model("bamba"), installed("bamba"))
    )
    assert after == before
