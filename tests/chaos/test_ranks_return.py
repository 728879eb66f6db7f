"""Kill -9 of a rank while it computes a reply: its group is there again, and the reply is whole.

The stack has no other worker. The ranks of the new group are forked from a process with all imports done.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from chaos.streams import Outcome, Streams, request
from e2e import markov
from e2e.stack import MotetStack, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

MODEL = "markov"
TOKENS = 400
EARLY = 40  # characters of the reply when the rank is killed
BACK = 2.0  # seconds until the group takes work again
BODY = request(0, MODEL, TOKENS) | {"temperature": 0}
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("group")
    model = markov.save(folder / MODEL)
    others = ("--asr", "none", "--tts", "none")
    with MotetStack(folder, "--llm", str(model), "--tensor-parallel", "2", *others) as found:
        found.wait_until_all_ready()
        yield found


def leader(stack: MotetStack) -> psutil.Process:
    return psutil.Process(int(stack.child("decode")["pid"]))


def ranks(stack: MotetStack) -> dict[str, psutil.Process]:
    """Return the processes of a group by name: the leader, and the other ranks."""
    first = leader(stack)
    named = {one.name(): one for one in first.children()}
    return {"leader": first} | {
        name: one for name, one in named.items() if name.startswith("motet-rank-")
    }


async def reply(stack: MotetStack, blow: Callable[[], None] | None = None) -> Outcome:
    """Return a reply; blow: what happens in its midst."""
    async with Streams(stack.url, [BODY]) as streams:
        if blow is not None:
            await streams.reached(EARLY)
            assert not streams.outcomes[0].done, "too few tokens for this machine"
            blow()
        return (await streams.finish())[0]


def last_start(stack: MotetStack) -> float:
    """Return the seconds that the worker's last start took, by its own log."""
    return float(re.findall(r"decode-\w+ ready .*start=([\d.]+)", stack.log())[-1])


@pytest.mark.parametrize("name", ["motet-rank-1", "leader"])
async def test_a_killed_rank_returns_and_the_reply_is_whole(
    name: str, stack: MotetStack, record_property: Record
) -> None:
    undisturbed = await reply(stack)
    assert (undisturbed.finish, undisturbed.error, undisturbed.broken) == ("length", None, "")
    before = ranks(stack)
    assert sorted(before) == ["leader", "motet-rank-1"]
    outcome = await reply(stack, before[name].kill)
    assert outcome.same_as(undisturbed), (outcome, undisturbed)
    after = ranks(stack)
    assert sorted(after) == ["leader", "motet-rank-1"]
    assert not {one.pid for one in before.values()} & {one.pid for one in after.values()}
    record_property("pause", round(outcome.longest_pause, 3))
    record_property("start", last_start(stack))
    assert last_start(stack) < BACK
    await asyncio.to_thread(until, lambda: not any(one.is_running() for one in before.values()), "")
