"""Feature × phase × death: whatever is killed under a request, its client is told what it is told undisturbed.

A covering selection, with each feature and with each victim in each phase, is in `make test-long`; the whole product is
in `make extended PART=storm`, which `MOTET_MOVES=2/4` runs a slice of.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def covering(cases: Sequence[Case]) -> list[Case]:
    """Return a selection in which each feature occurs, and each victim in each phase that a case has."""
    left = {part for case in cases for part in parts(case)}
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(left & parts(case)))
        chosen.append(best)
        left -= parts(best)
    return sorted(chosen, key=cases.index)


def parts(case: Case) -> set[tuple[str, ...]]:
    """Return what a selection has to cover of a case."""
    name, phase, victim = case
    return {(name,), (phase, victim)}


def selection() -> list[Case]:
    """Return the covering selection of what can be struck in time on any machine."""
    return covering([case for case in product() if case[1] not in FEATURES[case[0]].brief])


@pytest.mark.parametrize(("name", "phase", "victim"), tiered(product(), selection()))
async def test_everything_moves(world: World, name: str, phase: str, victim: str) -> None:
    due = await world.undisturbed(name)
    assert await world.struck(name, phase, victim) == due.result
