"""`motet doctor` over an omni model at work, of which one stage computes more than the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from motet_doctor import Finding, ObservationWindow, Snapshot, diagnose
from motet_shared.process.actor import Actor
from support.families import omni
from support.stages.omni_stage import Omni, services

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]

REPLIES, TOKENS = 4, 60
SECONDS, EVERY = 6.0, 0.5
HEAVY: dict[str, dict[str, Any]] = {
    # A code is 20 ms of sound, which is a chunk: the window is decoded anew for each code.
    "code2wav": {
        "dit": {"num_hidden_layers": 6},
        "vocoder": {
            "upsample_initial_channel": 64,
            "upsample_rates": [5, 3, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
        },
    },
}


async def converse(made: Omni) -> None:
    while True:
        await made.answer(made.call(tokens=TOKENS))


async def watched(made: Omni, actors: list[Actor]) -> list[Finding]:
    """Return what the doctor finds in some seconds of replies."""
    async with asyncio.TaskGroup() as group:
        callers = [group.create_task(converse(made)) for _ in range(REPLIES)]
        snapshots = []
        async with asyncio.timeout(60):  # until there is sound, all stages are not at work
            while actors[-1].load().get("seconds", 0.0) == 0.0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for number in range(int(SECONDS / EVERY)):
            for actor in actors:
                actor.bus.heartbeat()
            await asyncio.sleep(EVERY)
            snapshots.append(Snapshot(number * EVERY, made.made.gateway.directory.everyone()))
        for caller in callers:
            caller.cancel()
    return diagnose(ObservationWindow.of(snapshots))


@pytest.mark.parametrize("heavy", HEAVY)
async def test_the_stage_that_limits_is_named(tmp_path: Path, heavy: str) -> None:
    omni.write(tmp_path, endless=True, sizes=HEAVY[heavy])
    async with services(tmp_path) as made:
        await made.thinker()
        await made.talker(context=160)
        await made.code2wav()
        actors = list(made.made.actors)
        found = {finding.name: finding for finding in await watched(made, actors)}
        await made.made.idle()
    assert "stage_limits" in found, found
    finding = found["stage_limits"]
    assert finding.resource == f"{heavy} instances", finding.numbers
    assert finding.knob.startswith(f"motet scale {heavy}=2")
    shares = {name: value for name, value in finding.numbers.items() if name.endswith("_busy")}
    assert max(shares, key=lambda name: shares[name]) == f"{heavy}_busy"
    assert set(shares) == {"decode_busy", "talker_busy", "code2wav_busy"}
