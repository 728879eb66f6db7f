"""Assign each test to one tier by its markers: `make test`, `make test-long` or `make extended`.

@pytest.mark.long                  `make test-long`; of a parametrized test with `after=1` all cases
but the first

@pytest.mark.extended("soak")      `make extended PART=soak`, never in CI; with `after=1` all cases but
the first, which runs where it would without this marker

neither                            `make test`

`--tier NAME` selects one. Without it all tests run except extended ones, so that a file can be run
by its name. `scripts/list_tiers.py` prints every test with its tier.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

TEST, LONG, EXTENDED = "test", "test-long", "extended"
PARTS = ("peers", "conformance", "storm", "soak", "groups", "gpu", "eyes", "families")
NAMES = (TEST, LONG, *(f"{EXTENDED}-{part}" for part in PARTS))
CI = "ci"  # everything but the extended tests
ALL = "all"
COLLECTED = pytest.StashKey[list[tuple[str, str]]]()  # tier and id of each collected test


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tier` and `--tier-list`."""
    group = parser.getgroup("tiers")
    group.addoption(
        "--tier", choices=[*NAMES, CI, ALL], default=CI, help=f"tests to run (default: {CI})"
    )
    group.addoption(
        "--tier-list", metavar="FILE", help="write a line of tier and test for every collected test"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other tiers than `--tier`."""
    found = list(zip(tiers_of(items), items, strict=True))
    config.stash[COLLECTED] = [(tier, item.nodeid) for tier, item in found]
    if (path := config.getoption("--tier-list")) and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = sorted(f"{tier} {test}\n" for tier, test in config.stash[COLLECTED])
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(lines)
    chosen = select(found, config.getoption("--tier"))
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


def select(found: Iterable[tuple[str, T]], wanted: str) -> list[T]:
    """Return the tests that `--tier WANTED` runs, of tests with their tiers."""
    return [
        test
        for tier, test in found
        if wanted in (tier, ALL) or (wanted == CI and not tier.startswith(EXTENDED))
    ]


def mostly_long(values: Iterable[object], quick: Sequence[object]) -> list[object]:
    """Return parameters of which those outside `quick` carry the marker `long`.

    Raises ValueError if `quick` names an unknown one.
    """
    return _marked(values, quick, pytest.mark.long)


def mostly_extended(values: Iterable[object], quick: Sequence[object], part: str) -> list[object]:
    """Return parameters of which those outside `quick` carry the marker `extended(part)`.

    Raises ValueError if `quick` names an unknown one.
    """
    return _marked(values, quick, pytest.mark.extended(part))


def _marked(
    values: Iterable[object], quick: Sequence[object], mark: pytest.MarkDecorator
) -> list[object]:
    known = list(values)
    if missing := [value for value in quick if value not in known]:
        raise ValueError(f"quick: {missing} are not among the parameters")
    return [value if value in quick else pytest.param(value, marks=mark) for value in known]


def tiers_of(items: Sequence[pytest.Item]) -> list[str]:
    """Return the tier of each test: one of `NAMES`."""
    cases: Counter[str] = Counter()
    found = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        found.append(_tier_of(item, cases[function]))
        cases[function] += 1
    return found


def _tier_of(item: pytest.Item, case: int) -> str:
    """Return the tier of case number `case`, counted from 0, of a test."""
    for extended in item.iter_markers("extended"):
        if len(extended.args) != 1 or extended.args[0] not in PARTS:
            raise pytest.UsageError(
                f"{item.nodeid}: extended{extended.args}: give one of {', '.join(PARTS)}"
            )
        if case >= extended.kwargs.get("after", 0):
            return f"{EXTENDED}-{extended.args[0]}"
    marks = list(item.iter_markers("long"))
    return LONG if any(case >= mark.kwargs.get("after", 0) for mark in marks) else TEST
