"""Every wait between ranks has a deadline: the other rank is a process that is stopped by SIGSTOP."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from motet_kernels.rank_memory import RankMemory, create
from motet_llm.parallel import commands
from motet_llm.parallel.collectives import (
    Collectives,
    GlooCollectives,
    GroupFailed,
    SharedCollectives,
)
from motet_llm.parallel.degrees import Degrees
from motet_llm.parallel.group import Group
from motet_llm.parallel.link import Link, pair
from motet_llm.parallel.membership import Membership
from support.running.service_process import python_environment

MEETING = 60.0  # seconds
SECONDS = 0.4  # deadline of everything that a stopped rank does not do
LATEST = 10.0  # seconds on a busy machine
LARGE = 32 << 20  # numbers, more than the buffers of a connection hold
WAITS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda group: group.sum(torch.ones(3)),
    "large-sum": lambda group: group.sum(torch.ones(LARGE // 8)),
    "smallest": lambda group: group.smallest(1),
    "join": lambda group: group.join(torch.ones(2, 3), [3, 3]),
    "send": lambda group: group.send(torch.ones(LARGE), 1),
    "receive": lambda group: group.receive(torch.ones(3), 1),
}
IN_MEMORY = ("sum", "large-sum", "smallest", "join")


@dataclass
class Stopped:
    """Hold what connects this process, rank 0, to a rank that is stopped."""

    store: dist.Store
    pairs: dict[tuple[str, str], Collectives]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    path = str(tmp_path_factory.mktemp("meeting") / "store")
    memory = create(2, len(IN_MEMORY))
    argv = (path, ",".join(WAITS), str(memory), str(len(IN_MEMORY)), str(MEETING))
    with subprocess.Popen(
        [sys.executable, "-m", "support.engine.stopping_rank", *argv],
        env=python_environment(),
        stdout=subprocess.PIPE,
        pass_fds=(memory,),
    ) as rank:
        try:
            store = dist.FileStore(path, 2)
            pairs: dict[tuple[str, str], Collectives] = {
                ("gloo", name): GlooCollectives(store, 0, 2, MEETING, name) for name in WAITS
            }
            for group, name in enumerate(IN_MEMORY):
                own = RankMemory(memory, 0, 2, MEETING, group)
                pairs["memory", name] = SharedCollectives(own, MEETING)
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"stops\n"
            os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
            for collectives in pairs.values():
                collectives.limit(SECONDS)
            yield Stopped(store, pairs)
        finally:
            rank.kill()
            os.close(memory)


@contextmanager
def given_up() -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(GroupFailed):
        yield
    assert SECONDS / 2 < time.monotonic() - began < LATEST


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("gloo", name) for name in WAITS), *(("memory", name) for name in IN_MEMORY)],
)
def test_a_collective_gives_up_a_stopped_rank(kind: str, name: str, stopped: Stopped) -> None:
    with given_up():
        WAITS[name](stopped.pairs[kind, name])


def test_a_meeting_gives_up_a_stopped_rank(stopped: Stopped) -> None:
    with given_up():
        GlooCollectives(stopped.store, 0, 2, SECONDS, "late")


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(pipeline=2)])
def test_a_membership_gives_up_a_rank_that_does_not_come(
    degrees: Degrees, shares: bool, tmp_path: Path
) -> None:
    memory, store = create(2), dist.FileStore(str(tmp_path / "store"), 2)
    with given_up():
        Membership(store, 0, degrees, SECONDS, MEETING, memory if shares else None)
    os.close(memory)


def test_an_exchange_gives_up_a_rank_that_says_nothing(tmp_path: Path) -> None:
    member = Membership(dist.FileStore(str(tmp_path / "store"), 1), 0, Degrees(), MEETING, SECONDS)
    member.degrees = Degrees(pipeline=2)
    with given_up():
        member.exchange("shapes", "{}")


def test_an_exchange_ends_once_a_rank_is_known_to_have_failed(tmp_path: Path) -> None:
    def fail() -> None:
        raise GroupFailed("rank 1 is gone")

    store = dist.FileStore(str(tmp_path / "store"), 1)
    member = Membership(store, 0, Degrees(), MEETING, MEETING, check=fail)
    member.degrees = Degrees(pipeline=2)
    began = time.monotonic()
    with pytest.raises(GroupFailed, match="rank 1 is gone"):
        member.exchange("shapes", "{}")
    assert time.monotonic() - began < LATEST


class SilentRank:
    """Be a rank that reads nothing and says nothing."""

    number = 1

    def __init__(self) -> None:
        own, self._its = pair()
        self.link: Link[commands.Report] = Link(own, commands.Report)

    def ended(self) -> str:
        return ""

    def close(self, *, at_once: bool = False) -> None:
        self.link.shutdown()
        os.close(self._its)


@pytest.fixture
def group() -> Iterator[Group]:
    found = Group([SilentRank()], SECONDS)
    yield found
    found.close()


def test_the_leader_gives_up_a_rank_that_does_not_start(group: Group) -> None:
    with given_up():
        group.wait_started()


def test_the_leader_gives_up_a_rank_that_does_not_answer(group: Group) -> None:
    with given_up():
        group.ask(commands.PickRows(0, [1]))


def test_the_leader_gives_up_a_rank_that_reads_no_commands(group: Group) -> None:
    with given_up():
        group.send(commands.PutRows(1, 0, [bytes(LARGE)], "float32", [], exact=True))


def test_the_leader_returns_once_all_have_read(tmp_path: Path) -> None:
    """It removes the store then, in which a slow rank would look for what it has not read."""
    path = tmp_path / "store"
    memory = create(2, 1)
    degrees = Degrees(tensor=2)
    found: list[list[bytes]] = []

    def late() -> None:
        store = dist.FileStore(str(path), 2)
        member = Membership(store, 1, degrees, MEETING, MEETING, memory, lambda: time.sleep(0.3))
        found.append(member.exchange("shapes", "second"))

    thread = threading.Thread(target=late)
    thread.start()
    store = dist.FileStore(str(path), 2)
    member = Membership(store, 0, degrees, MEETING, MEETING, memory)
    time.sleep(0.1)  # the other one waits, and will look again in a while
    assert member.exchange("shapes", "first") == [b"first", b"second"]
    path.unlink()
    thread.join(MEETING)
    assert found == [[b"first", b"second"]]
    os.close(memory)
