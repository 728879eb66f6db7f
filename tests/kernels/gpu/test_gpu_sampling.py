"""Sampling in Triton: the noise of the twins, their kept sets and their tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from motet_kernels.runtime.errors import KernelError
from motet_kernels.sampling import sampling
from motet_kernels.sampling.choice import Choice, Edits
from motet_kernels.sampling.noise import gumbel, streams
from motet_kernels.sampling.sampling import (
    draw,
    draw_torch,
    edit,
    edit_torch,
    filtered_candidates,
    forbid,
    forbid_torch,
    logprobs,
    logprobs_torch,
)
from support.running.refusals import refuses

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with rooms as small as these vocabularies."""
    from motet_kernels.gpu.sampling import candidates as module

    for name, value in (("GROUPS", 32), ("MIN_CANDIDATES", 8), ("CAPACITY", 64)):
        monkeypatch.setattr(module, name, value)
    return module


def randn(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def poisoned(logits_RV: Tensor, device: torch.device) -> Tensor:
    """The same rows, with NaN before and behind each."""
    around = torch.full(
        (logits_RV.shape[0] + 2, logits_RV.shape[1] + 5), math.nan, dtype=logits_RV.dtype
    )
    around[1:-1, 2:-3] = logits_RV
    return around.to(device)[1:-1, 2:-3]


def test_the_noise_is_that_of_the_twin(device: torch.device) -> None:
    """Drawn from logits that are all alike, the highest noise wins, and lower noise never."""
    seeds = (0, 1, -5, 1 << 70, 12345678901234567)
    vocab, choices = 300, [Choice(1.0, seed=seed, position=7 * i) for i, seed in enumerate(seeds)]
    found = draw(torch.zeros(len(choices), vocab, device=device), choices)
    every = torch.arange(vocab).expand(len(choices), vocab)
    noise = gumbel(
        streams([choice.seed for choice in choices], [choice.position for choice in choices]), every
    )
    assert found.tolist() == noise.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 9001])
def test_draws_from_all_tokens(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    choices = [
        Choice(t, seed=i, position=i * i) for i, t in enumerate([1.0, 0.0, 0.3, 1e-6, 3.0, 1e-4])
    ]
    logits = randn(len(choices), vocab, seed=vocab).to(dtype)
    assert torch.equal(draw(poisoned(logits, device), choices).cpu(), draw_torch(logits, choices))


def test_equal_logits_go_to_the_lower_token(device: torch.device) -> None:
    logits = torch.zeros(2, 9000)
    logits[0, 5000], logits[0, 8999] = 1.0, 1.0
    assert draw(logits.to(device), [Choice(0.0), Choice(0.0)]).tolist() == [5000, 0]


@pytest.mark.parametrize(
    "choice", [Choice(0.0), Choice(1.0), Choice(1.0, 2), Choice(0.7, min_p=0.1)], ids=str
)
def test_rows_that_are_not_finite_draw_nothing(device: torch.device, choice: Choice) -> None:
    logits = randn(5, 70)
    logits[1, 3], logits[2, 69], logits[3], logits[4, 5:] = math.nan, math.inf, -math.inf, -math.inf
    found = draw(logits.to(device), [choice] * 5)
    assert torch.equal(found.cpu(), draw_torch(logits, [choice] * 5))
    assert found[1:4].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 1000, 2100])
def test_masks(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    """And draws of what they allow; of the last word more bits are set than there are tokens."""
    choices = [Choice(1.0, seed=1), Choice(0.0), Choice(1.0, top_k=3, seed=2), Choice(0.7, seed=3)]
    generator = torch.Generator().manual_seed(vocab)
    bits = torch.randint(-(2**31), 2**31, (4, vocab // 32 + 2), generator=generator).to(torch.int32)
    bits[3] = -1
    logits = randn(4, vocab, seed=vocab).to(dtype)
    found = forbid(poisoned(logits, device), bits.to(device))
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), forbid_torch(logits, bits))
    drawn = draw(poisoned(logits, device), choices, bits.to(device))
    assert torch.equal(drawn.cpu(), draw_torch(logits, choices, bits))


def test_a_mask_that_allows_nothing(device: torch.device) -> None:
    none = torch.zeros(1, 3, dtype=torch.int32, device=device)
    assert draw(randn(1, 70).to(device), [Choice(1.0)], none).tolist() == [-1]


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40},  # more than are likely
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.99},
    {"min_p": 0.3},
    {"min_p": 1e-4},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.05},
    {"top_k": 60, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.usefixtures("candidates")
@pytest.mark.parametrize(("vocab", "scale"), [(3, 3.0), (64, 20.0), (150, 3.0), (100, 0.01)])
def test_draws_after_filters(device: torch.device, vocab: int, scale: float) -> None:
    """Flat and peaked distributions: those of which few tokens matter, and those of which all do."""
    choices = [Choice(0.8, **options, seed=i, position=3) for i, options in enumerate(FILTERS)]
    logits = randn(len(choices), vocab, seed=vocab, scale=scale)
    assert torch.equal(draw(poisoned(logits, device), choices).cpu(), draw_torch(logits, choices))


@pytest.mark.usefixtures("candidates")
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_of_equal_logits_filters_keep_as_many_as_the_twin(
    device: torch.device, options: dict[str, Any]
) -> None:
    """And those of lower numbers: what is drawn is what wins among these."""
    rows, vocab = 4, 40
    logits = (randn(1, vocab, seed=5, scale=1.0) * 2).round().div(2)
    choices = [Choice(2.0, **options, seed=i) for i in range(rows)]
    scaled, tokens = filtered_candidates(logits.double(), choices[:1])
    kept = logits[0, tokens[0, scaled[0] > -math.inf]]
    lowest = kept.min()
    stays = logits[0] > lowest
    stays[(logits[0] == lowest).nonzero()[: int((kept == lowest).sum())]] = True
    due = draw_torch(
        logits.where(stays, -math.inf).expand(rows, vocab),
        [Choice(2.0, seed=i) for i in range(rows)],
    )
    assert torch.equal(draw(logits.to(device).expand(rows, vocab), choices).cpu(), due)


@pytest.mark.usefixtures("candidates")
def test_a_row_draws_the_same_alone_and_in_company(device: torch.device) -> None:
    choices = [
        Choice(1.0, seed=1),
        Choice(0.0),
        Choice(0.9, top_k=9, seed=2),
        Choice(1.2, top_p=0.9, seed=3),
        Choice(2.0, min_p=0.01, seed=4),
    ]
    logits = randn(len(choices), 120, seed=8).to(device)
    alone = [int(draw(logits[i : i + 1], [choice])) for i, choice in enumerate(choices)]
    assert draw(logits, choices).tolist() == alone


def make_edits(rows: int, vocab: int, seed: int) -> Edits:
    generator = np.random.default_rng(seed)
    places = generator.choice(rows * vocab, size=rows * vocab // 3, replace=False)
    bias, less = generator.normal(size=(2, len(places))).astype(np.float32)
    bias[::7] = -np.inf
    factor = generator.uniform(0.5, 2, size=len(places)).astype(np.float32)
    return Edits(
        (places // vocab).astype(np.int32), (places % vocab).astype(np.int32), bias, factor, less
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 50), (4, 333)])
def test_edits(device: torch.device, rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits, edits = randn(rows, vocab).to(dtype), make_edits(rows, vocab, seed=vocab)
    there = poisoned(logits, device)
    found = edit(there, edits)
    assert found.dtype == torch.float32
    assert torch.equal(there.cpu(), logits)
    torch.testing.assert_close(
        found.cpu().double(), edit_torch(logits.double(), edits), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("vocab", "most"), [(1, 0), (5, 20), (70, 3), (300, 20)])
def test_logprobs(
    device: torch.device, candidates: Any, vocab: int, most: int, dtype: torch.dtype
) -> None:
    rows, logits = [3, 0], randn(4, vocab, seed=vocab).to(dtype)
    ids = torch.arange(4) % vocab
    found = logprobs(poisoned(logits, device), rows, ids.to(device), most)
    due = logprobs_torch(logits.double(), rows, ids, min(most, vocab))
    torch.testing.assert_close(found.chosen_L.cpu().double(), due.chosen_L, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.values_LN.cpu().double(), due.values_LN, rtol=1e-5, atol=1e-5)
    there = logits.double().log_softmax(-1)[rows].gather(1, found.ids_LN.cpu())
    torch.testing.assert_close(
        there, due.values_LN, rtol=1e-9, atol=1e-9
    )  # of equals either may be named
    assert all(len(set(row)) == len(row) for row in found.ids_LN.tolist())


@pytest.mark.usefixtures("candidates")
def test_alternatives_of_which_more_tie_than_there_is_room_for(device: torch.device) -> None:
    logits = torch.zeros(1, 200)
    logits[0, 150] = 1.0
    found = logprobs(logits.to(device), [0], torch.tensor([9]).to(device), 4)
    assert found.ids_LN.tolist() == [[150, 0, 1, 2]]


@pytest.mark.usefixtures("candidates")
def test_rows_that_are_not_finite_have_no_logprobs_and_spare_the_others(
    device: torch.device,
) -> None:
    logits = randn(4, 40)
    logits[0, 3], logits[1, 39], logits[2] = math.nan, math.inf, -math.inf
    ids = torch.tensor([-1, -1, -1, 7])
    found = logprobs(logits.to(device), [0, 1, 2, 3], ids.to(device), 2)
    due = logprobs_torch(logits, [3], ids, 2)
    torch.testing.assert_close(found.values_LN[3:].cpu(), due.values_LN)
    torch.testing.assert_close(found.chosen_L[3:].cpu(), due.chosen_L)


def test_nothing_to_do(device: torch.device) -> None:
    logits, none = randn(0, 9).to(device), np.zeros(0, np.int32)
    assert draw(logits, []).shape == (0,)
    empty = Edits(none, none, *[none.astype(np.float32)] * 3)
    assert torch.equal(edit(randn(1, 9).to(device), empty).cpu(), randn(1, 9))
    assert logprobs(
        randn(1, 9).to(device), [], torch.zeros(1, dtype=torch.int64, device=device), 3
    ).ids_LN.shape == (
        0,
        3,
    )


def test_bad_arguments_are_refused_by_name(device: torch.device) -> None:
    logits, edits = randn(2, 9).to(device), make_edits(2, 9, seed=1)
    for bad, param in (
        (lambda: draw(logits.int(), [Choice(1.0)] * 2), "logits_RV"),
        (lambda: draw(logits.T, [Choice(1.0)] * 9), "logits_RV"),
        (lambda: draw(logits, [Choice(1.0)]), "choices"),
        (lambda: draw(logits, [Choice(1.0)] * 2, torch.zeros(2, 1, device=device)), "bits_RW"),
        (lambda: forbid(logits, torch.zeros(1, 1, dtype=torch.int32, device=device)), "bits_RW"),
        (lambda: edit(logits, edits._replace(tokens=edits.tokens + 9)), "tokens"),
        (lambda: edit(logits, edits._replace(bias=edits.bias.astype(np.float64))), "bias"),
        (
            lambda: logprobs(logits, [2], torch.zeros(2, dtype=torch.int64, device=device), 1),
            "rows",
        ),
        (
            lambda: logprobs(logits, [0], torch.zeros(2, dtype=torch.int32, device=device), 1),
            "ids_R",
        ),
    ):
        with refuses(KernelError, param):
            bad()


def test_the_twin_sees_a_few_candidates_as_it_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = [Choice(1.0, top_p=0.7, seed=seed) for seed in range(20)]
    logits = randn(20, 400)
    few = draw_torch(logits, choices)
    monkeypatch.setattr(sampling, "FIRST_CANDIDATES", 400)
    assert torch.equal(few, draw_torch(logits, choices))
