"""Draws on every instruction set and in torch: the same tokens as the twin, for every kind of row."""

from __future__ import annotations

import pytest
import torch

from motet_kernels.runtime.errors import KernelError
from motet_kernels.sampling.choice import Choice
from motet_kernels.sampling.sampling import draw, draw_torch, forbid
from support.running.refusals import refuses

KINDS = (
    Choice(0.0),
    Choice(0.7),
    Choice(1.0),
    Choice(1.8),
    Choice(1.0, top_k=3),
    Choice(0.9, top_p=0.8),
    Choice(1.0, min_p=0.1),
)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def choices(rows: int) -> list[Choice]:
    """Every kind in turn, each row with a stream of its own."""
    return [
        KINDS[row % len(KINDS)]._replace(seed=row * 7919 - 3, position=row // 2)
        for row in range(rows)
    ]


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("vocab", [1, 7, 511, 512, 513, 2000])
def test_it_draws_what_the_twin_draws(backend: str, vocab: int, spread: float) -> None:
    logits_RV = randn(28, vocab + 3)[:, :vocab] * spread
    assert draw(logits_RV, choices(28)).tolist() == draw_torch(logits_RV, choices(28)).tolist()


def test_a_row_s_token_does_not_depend_on_its_company(backend: str) -> None:
    logits_RV, every = randn(28, 900), choices(28)
    whole = draw(logits_RV, every).tolist()
    assert [int(draw(logits_RV[row : row + 1], every[row : row + 1])) for row in range(28)] == whole


def test_draws_follow_the_distribution(backend: str) -> None:
    logits_V, count = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 0.5]), 20_000
    ids = draw(
        logits_V.expand(count, -1).contiguous(),
        [Choice(1.0, seed=5, position=at) for at in range(count)],
    )
    shares = torch.bincount(ids, minlength=5) / count
    torch.testing.assert_close(shares, logits_V.softmax(-1), rtol=0, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_cannot_be_drawn_from_are_told(backend: str, kind: Choice) -> None:
    logits_RV = randn(5, 600)
    logits_RV[1, 599], logits_RV[2, 3], logits_RV[3] = torch.nan, torch.inf, -torch.inf
    logits_RV[4, :599] = -torch.inf
    ids = draw(logits_RV, [kind] * 5).tolist()
    assert ids[1:] == [-1, -1, -1, 599]
    assert ids[0] >= 0


# ------------------------------------------------------------------------------------------------------------- the mask
def masks(rows: int, vocab: int) -> torch.Tensor:
    """By turns of few tokens, most, all, and those of one stretch; of the last word more bits than there are tokens."""
    generator = torch.Generator().manual_seed(vocab)
    words = torch.randint(-(2**31), 2**31, (3, rows, vocab // 32 + 2), generator=generator).to(
        torch.int32
    )
    bits_RW = words[0] & words[1] & words[2]
    bits_RW[1::4] = (words[0] | words[1] | words[2])[1::4]
    bits_RW[2::4] = -1
    bits_RW[3::4, : bits_RW.shape[1] // 2] = 0
    return bits_RW


def test_bits_forbid_what_they_do_not_name() -> None:
    logits_RV, bits_RW = randn(8, 70), masks(8, 70)
    masked_RV = forbid(logits_RV, bits_RW)
    for row in range(8):
        for token in range(70):
            is_set = int(bits_RW[row, token // 32]) >> token % 32 & 1
            assert float(masked_RV[row, token]) == (
                float(logits_RV[row, token]) if is_set else -torch.inf
            )


@pytest.mark.parametrize("spread", [0.01, 20.0])
@pytest.mark.parametrize("vocab", [1, 31, 64, 511, 512, 513, 2000])
def test_of_what_is_allowed_it_draws_what_the_twin_draws(
    backend: str, vocab: int, spread: float
) -> None:
    logits_RV, bits_RW = randn(28, vocab + 3)[:, :vocab] * spread, masks(28, vocab)
    assert (
        draw(logits_RV, choices(28), bits_RW).tolist()
        == draw_torch(logits_RV, choices(28), bits_RW).tolist()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_forbidden_is_not_looked_at(backend: str, kind: Choice) -> None:
    logits_RV, bits_RW = randn(3, 600), torch.full((3, 19), -1, dtype=torch.int32)
    logits_RV[0, 5], logits_RV[1, 70] = torch.nan, torch.inf
    bits_RW[0, 0] &= ~(1 << 5)
    bits_RW[2] = 0
    first, second, third = draw(logits_RV, [kind] * 3, bits_RW).tolist()
    assert (first >= 0, second, third) == (True, -1, -1)


def test_masks_that_do_not_fit_are_refused() -> None:
    logits_RV = randn(2, 70)
    for bad in (
        torch.zeros(2, 2),
        torch.zeros(1, 3),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(3, 2).T,
    ):
        bits_RW = bad if bad.dtype == torch.int64 else bad.int()
        for function in (lambda b: forbid(logits_RV, b), lambda b: draw(logits_RV, choices(2), b)):
            with refuses(KernelError, "bits_RW"):
                function(bits_RW)
