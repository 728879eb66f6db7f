"""How far drafts are right: against counting, token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from motet_kernels.runtime.errors import KernelError
from motet_kernels.sampling.speculation import agreement
from support.running.refusals import refuses

rows = st.lists(st.integers(-1, 2), min_size=7, max_size=7)
drafts = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=9)


def counted(draft: list[int], drawn: list[int]) -> int:
    right = 0
    while right < len(draft) and draft[right] == drawn[right]:
        right += 1
    return right


@given(drafts=drafts, data=st.data())
def test_it_counts_up_to_the_first_wrong_token(
    drafts: list[list[int]], data: st.DataObject
) -> None:
    drawn = [data.draw(rows)[: 1 + len(draft)] for draft in drafts]
    ids_R = torch.tensor([token for row in drawn for token in row])
    found = agreement(ids_R, drafts)
    assert found.dtype == torch.int32
    assert found.tolist() == [counted(*pair) for pair in zip(drafts, drawn, strict=True)]


def test_what_does_not_fit_is_refused() -> None:
    for ids_R in (torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)):
        with refuses(KernelError, "ids_R"):
            agreement(ids_R, [[1, 2], []])
