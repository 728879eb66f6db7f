"""The arithmetic of the benchmark of half load: latencies by kind, failures, memory of processes that come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from benchmarks.operation import soak
from benchmarks.support import document, endurance

TYPICAL = {"chat": 0.03, "speech": 0.6, "picture": 1.5}  # seconds


def lasted(minutes: float, *, slower: str = "", growth: float = 0.0) -> soak.Findings:
    """Return an hour's findings in short; one kind gets slower halfway, or a process grows."""
    found, rng = soak.Findings(full=10.0), Random(0)
    for number in range(int(minutes * 300)):
        minute, kind = number / 300, rng.choice(list(TYPICAL))
        late = 1.5 if kind == slower and minute > minutes / 2 else 1.0
        found.minutes.append(minute)
        found.kinds.append(kind)
        found.seconds.append(late * TYPICAL[kind] * (1 + 0.1 * rng.random()))
        if number % 25 == 0:
            found.memory_minutes.append(minute)
            found.memory.setdefault("tts", []).append(100 + growth * minute + rng.random())
    found.compare(minutes)
    return found


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (lasted(12), [True, True, True]),
        (lasted(12, slower="picture"), [True, False, True]),
        (lasted(12, growth=1.0), [True, True, False]),
    ],
    ids=["flat", "one kind is slower", "growing"],
)
def test_targets_tell_a_flat_hour_from_others(found: soak.Findings, met: list[bool]) -> None:
    plan = soak.Plan(minutes=12)
    assert [target.met for target in soak.targets(found, plan)] == met
    told = soak.report(found, plan)
    assert "p99 per chat" in told
    assert "p99 per embedding" not in told, "none was asked for"


def test_a_request_that_fails_is_a_missed_target(tmp_path: Path) -> None:
    found = lasted(1)
    found.failures["speech: 503"] = 2
    failed = soak.targets(found, soak.Plan(minutes=1))[0]
    assert (failed.met, failed.value) == (False, 2)
    assert "FAILED speech: 503 (2)" in soak.report(found, soak.Plan(minutes=1))
    document.write(tmp_path / "soak.json", document.conditions(), soak.Plan(), found)
    kept = json.loads((tmp_path / "soak.json").read_text())["findings"]
    assert kept["failures"] == {"speech: 503": 2}


async def test_processes_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a value at each time, 0 while it is not there."""
    looks: list[Mapping[str, float]] = [
        {"asr": 5.0},
        {"asr": 6.0, "decoder": 2.0},
        {"decoder": 3.0},
    ]
    monkeypatch.setattr(endurance, "MEMORY_EVERY", 0.0)
    found = endurance.Endurance()
    watching = asyncio.create_task(found.watch_memory(looks.copy().pop))
    async with asyncio.timeout(10):
        while len(found.memory_minutes) < len(looks):  # noqa: ASYNC110
            await asyncio.sleep(0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert found.memory == {"decoder": [3.0, 2.0, 0.0], "asr": [0.0, 6.0, 5.0]}
