"""Test that the selection of moves covers every pair."""

from __future__ import annotations

from itertools import combinations

from chaos.moves.test_moves import pairwise, product


def test_the_selection_covers_every_pair() -> None:
    every = product()
    chosen = pairwise(every)
    for at in combinations(range(3), 2):
        assert {tuple(case[i] for i in at) for case in chosen} == {
            tuple(case[i] for i in at) for case in every
        }
    assert len(chosen) < len(every)
