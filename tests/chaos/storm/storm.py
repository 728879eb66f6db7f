"""A storm: mixed traffic while processes are struck at random, one or two at a time; and the account.

    PYTHONPATH=tests:models python -m chaos.storm.storm --seconds 600 --every 10 --seed 3   (make extended PART=storm)

Chats, with pictures too, speech, transcripts, spoken conversations, replies of an omni model, drawings, films and
embeddings; two processes of each service, gateways behind a descriptor store; small models whose answers are known
from a quiet time. The clients write a history, which `chaos.storm.check` judges without knowing anything of the
servers. Findings are what was lost, changed, doubled or refused, what died by itself, what is left behind in an idle
service, and what a process has grown by in memory, descriptors and threads; with one the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from chaos.processes import NATS, Processes
from chaos.storm.account import Account, Blow, Resources
from chaos.storm.check import check
from chaos.storm.history import History
from chaos.storm.stack import STORE, storm_stack
from chaos.storm.traffic import Traffic
from e2e.engines.peer import integrities

KINDS = ("kill", "pause", "cut", "slow", "memory", "disk")
BOTH = 0.2  # share of the times in which two are struck at once
LASTS = 3.0  # seconds of a blow other than a kill and a cut
_READY = 60.0  # seconds in which all must be there again
_LOOKS = 30  # one per second, until all are idle


@dataclass(frozen=True)
class Storm:
    """Define a storm. `clients`: so many per share of each kind of traffic, of which there are thirteen."""

    seed: int
    seconds: float = 600.0
    every: float = 10.0
    clients: int = 1
    kinds: tuple[str, ...] = KINDS


@dataclass
class Weather:
    """Carry a storm out. All that is random follows from the seed."""

    storm: Storm
    stack: Processes
    url: str
    history: History
    say: Callable[[str], None]
    blows: list[Blow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.storm.seed)

    async def run(self) -> Account:
        """Return the account of it all. The stack is ready before, and must be ready again afterwards."""
        traffic = Traffic(self.url, random.Random(self.storm.seed + 1), self.history)
        await traffic.learn()
        before = self._resources()
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            supervisor = tasks.create_task(self.stack.supervise())
            asking = tasks.create_task(traffic.run(over, self.storm.clients))
            await self._blow(traffic)
            over.set()
            await asking
            left = await self._left_behind()
            supervisor.cancel()
        died = [member.name for member in self.stack.members for _ in range(member.died)]
        report = check(self.history.path)
        return Account(report, self.blows, died, left, self._growth(before))

    # ---------------------------------------------------------------------------------------------------------- blows
    async def _blow(self, traffic: Traffic) -> None:
        """Strike every few seconds, the last time early enough for the traffic to go on for a while."""
        began = time.monotonic()
        await asyncio.sleep(self.storm.every / 2)
        while (now := time.monotonic()) - began < self.storm.seconds - self.storm.every / 2:
            chosen = [self._choice() for _ in range(1 + (self._random.random() < BOTH))]
            words = " and ".join(f"{kind} {name}" for kind, name in chosen)
            self.say(f"{now - began:6.1f} s  {words:40}  {traffic.asking} questions under way")
            await asyncio.gather(*(self._strike(kind, name) for kind, name in chosen))
            ended = time.monotonic()
            self.blows += [Blow(kind, name, now, ended) for kind, name in chosen]
            await asyncio.sleep(max(0.0, now + self.storm.every - time.monotonic()))

    def _choice(self) -> tuple[str, str]:
        """Return a kind of blow and a process that can be struck so."""
        kind = self._random.choice(self.storm.kinds)
        names = [member.name for member in self.stack.members]
        if kind in ("memory", "disk"):  # nats-server ends of them, and the store needs neither
            names.remove(STORE)
        elif kind == "cut":
            names = [NATS, *(name for name in names if name != STORE)]
        else:
            names.append(NATS)
        return kind, self._random.choice(names)

    async def _strike(self, kind: str, name: str) -> None:
        if kind in ("memory", "disk"):
            await self.stack.limit(name, kind, LASTS)
        elif kind in ("pause", "slow"):
            await (self.stack.pause if kind == "pause" else self.stack.slow)(name, LASTS)
        else:
            await (self.stack.kill if kind == "kill" else self.stack.cut)(name)

    # ------------------------------------------------------------------------------------------------- what they leave
    async def _left_behind(self) -> list[str]:
        """Return what services say of themselves once nothing is asked: who is busy, or holds what is not needed."""
        try:
            await self.stack.all_ready(_READY)
        except TimeoutError as error:
            return [str(error)]
        found = ["nobody was asked"]
        for _ in range(_LOOKS):
            if not (found := await self._complaints()):
                break
            await asyncio.sleep(1.0)
        return found

    async def _complaints(self) -> list[str]:
        said = await integrities(self.stack.nats.url, self.stack.nats.passwords)
        names = {instance: name for name, instance in self.stack.instances().items()}
        found = [
            f"{names.get(instance, instance)}: {word}"
            for instance, word in said.items()
            if word != "ok"
        ]
        return found + [
            f"{name}: says nothing" for instance, name in names.items() if instance not in said
        ]

    def _resources(self) -> dict[int, Resources]:
        """Return what each process has, by its id."""
        return {member.pid: _resources(member.pid) for member in self.stack.members}

    def _growth(self, before: dict[int, Resources]) -> dict[str, Resources]:
        """Return the growth of the processes that have lived through all of it."""
        survivors = [member for member in self.stack.members if member.pid in before]
        return {
            member.name: _resources(member.pid).since(before[member.pid]) for member in survivors
        }


def _resources(pid: int) -> Resources:
    process = psutil.Process(pid)
    return Resources(process.memory_info().rss, process.num_fds(), process.num_threads())


async def run(storm: Storm, folder: Path, say: Callable[[str], None] = print) -> Account:
    """Start everything in `folder`, which is empty, and end it again. The history is `history.jsonl` there."""
    say(
        f"seed {storm.seed}, {storm.seconds:g} s, every {storm.every:g} s of {', '.join(storm.kinds)}"
    )
    history = History(folder / "history.jsonl")
    try:
        async with storm_stack(folder) as (stack, url):
            return await Weather(storm, stack, url, history, say).run()
    finally:
        history.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos.storm.storm", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
        help="of all that is random",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="how long it lasts")
    parser.add_argument(
        "--every", type=float, default=10.0, help="seconds from one blow to the next"
    )
    parser.add_argument(
        "--clients", type=int, default=1, help="thirteen times so many ask at a time"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of blows")
    given = parser.parse_args(argv)
    storm = Storm(given.seed, given.seconds, given.every, given.clients, tuple(given.kinds))
    with tempfile.TemporaryDirectory() as folder:
        account = asyncio.run(run(storm, Path(folder)))
    print(account.table())
    for finding in account.findings():
        print("FINDING", finding)
    print("why requests broke off:", dict(Counter(answer.detail for answer in account.broken)))
    print(*account.remarkable(), sep="\n")
    return 1 if account.findings() else 0


if __name__ == "__main__":
    sys.exit(main())
