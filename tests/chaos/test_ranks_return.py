"""Signals to a rank while it computes a reply: its group is there again, and the reply is whole.

The stack has no other worker. The ranks of the new group are forked from a process with all imports done.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from chaos.streams import Outcome, Streams, request
from e2e import markov
from e2e.stack import MotetStack, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

MODEL = "markov"
TOKENS = 400
EARLY = 40  # characters of the reply when the rank is killed
WAITS = 8.0  # seconds that ranks wait for each other
BODY = request(0, MODEL, TOKENS) | {"temperature": 0}
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("group")
    model = markov.save(folder / MODEL)
    argv = ("--llm", str(model), "--tensor-parallel", "2", "--asr", "none", "--tts", "none")
    env = {"MOTET_COLLECTIVE_TIMEOUT": str(WAITS)}
    with MotetStack(folder, *argv, env=env) as found:
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


async def reply(stack: MotetStack) -> Outcome:
    async with Streams(stack.url, [BODY]) as streams:
        return (await streams.finish())[0]


async def struck(stack: MotetStack, blow: Callable[[], None]) -> Outcome:
    """Return a reply with a blow in its midst."""
    async with Streams(stack.url, [BODY]) as streams:
        await streams.reached(EARLY)
        assert not streams.outcomes[0].done, "too few tokens for this machine"
        blow()
        return (await streams.finish())[0]


def last_start(stack: MotetStack) -> float:
    """Return the seconds that the worker's last start took, by its own log."""
    return float(re.findall(r"decode-\w+ ready .*start=([\d.]+)", stack.log())[-1])


async def undisturbed(stack: MotetStack) -> Outcome:
    found = await reply(stack)
    assert (found.finish, found.error, found.broken) == ("length", None, "")
    return found


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("motet-rank-1", signal.SIGKILL),
        ("leader", signal.SIGKILL),
        ("motet-rank-1", signal.SIGSTOP),
    ],
)
async def test_a_lost_rank_returns_and_the_reply_is_whole(
    name: str, number: signal.Signals, stack: MotetStack, record_property: Record
) -> None:
    expected = await undisturbed(stack)
    before = ranks(stack)
    assert sorted(before) == ["leader", "motet-rank-1"]
    outcome = await struck(stack, lambda: before[name].send_signal(number))
    after = ranks(stack)
    assert outcome.same_as(expected), (outcome, expected)
    assert sorted(after) == ["leader", "motet-rank-1"]
    assert not {one.pid for one in before.values()} & {one.pid for one in after.values()}
    record_property("pause", round(outcome.longest_pause, 3))
    record_property("start", last_start(stack))
    if number == signal.SIGSTOP:
        assert outcome.longest_pause > WAITS / 2
    await asyncio.to_thread(
        until, lambda: not any(one.is_running() for one in before.values()), "the old group is gone"
    )
