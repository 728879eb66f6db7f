"""Feature × phase × death: whatever is killed under a request, its client is told what it is told undisturbed.

A covering selection, in which each two of the three meet, is in `make test-long`; the whole product is in
`make extended PART=storm`, which `MOTET_MOVES=2/4` runs a slice of.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

from chaos.moves.features import FEATURES, PHASES, tiered
from chaos.moves.world import World
from chaos.processes import NATS

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("moves"),
    pytest.mark.asyncio(loop_scope="package"),
]
Case = tuple[str, str, str]  # feature, phase, victim


def product() -> list[Case]:
    return [
        (name, phase, victim)
        for name, feature in FEATURES.items()
        for phase in PHASES
        for victim in (*feature.at_work(phase), NATS)
    ]


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Return a selection in which every pair of values is that occurs in a case."""
    left = {pair for case in cases for pair in combinations(enumerate(case), 2)}
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(left.intersection(combinations(enumerate(case), 2))))
        chosen.append(best)
        left.difference_update(combinations(enumerate(best), 2))
    return sorted(chosen, key=cases.index)


def selection() -> list[Case]:
    """Return the covering selection of what can be struck in time on any machine."""
    return pairwise([case for case in product() if case[1] not in FEATURES[case[0]].brief])


@pytest.mark.parametrize(("name", "phase", "victim"), tiered(product(), selection()))
async def test_everything_moves(world: World, name: str, phase: str, victim: str) -> None:
    due = await world.undisturbed(name)
    assert await world.struck(name, phase, victim) == due.result
