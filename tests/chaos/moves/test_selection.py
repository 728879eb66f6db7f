"""Test that the selection of moves covers each feature, and each victim in each phase."""

from __future__ import annotations

from chaos.moves.test_moves import covering, parts, product


def test_the_selection_covers_all_parts() -> None:
    every = product()
    chosen = covering(every)
    assert set().union(*map(parts, chosen)) == set().union(*map(parts, every))
    assert len(chosen) < len(every)
