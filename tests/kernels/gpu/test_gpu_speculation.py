"""Counting how far drafts are right in Triton against the twin: the same numbers."""

from __future__ import annotations

import pytest
import torch

from motet_kernels.sampling.speculation import NONE, agreement, agreement_torch


@pytest.mark.parametrize("longest", [1, 2, 5, 32])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_agreement(device: torch.device, count: int, longest: int) -> None:
    random = torch.Generator().manual_seed(count * longest)
    lengths = torch.randint(0, longest + 1, (count,), generator=random).tolist()
    lengths[-1] = longest
    drafts = [torch.randint(0, 9, (length,), generator=random).tolist() for length in lengths]
    drawn = [token if keep else 9 for draft in drafts for token, keep in _noisy(draft, random)]
    ids_R = torch.tensor(drawn).to(device)
    starts = torch.tensor([0, *(1 + length for length in lengths[:-1])]).cumsum(0)
    padded = torch.tensor([draft + [NONE] * (longest - len(draft)) for draft in drafts])
    found = agreement(ids_R, drafts)
    assert found.dtype == torch.int32
    assert found.tolist() == agreement_torch(ids_R.cpu(), padded, starts).tolist()
    assert found.device == ids_R.device


def _noisy(draft: list[int], random: torch.Generator) -> list[tuple[int, bool]]:
    """The draft and what is drawn behind it; of each token, whether it is drawn."""
    kept = (torch.rand(len(draft) + 1, generator=random) < 0.8).tolist()
    return list(zip([*draft, -1], kept, strict=True))
