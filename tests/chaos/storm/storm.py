"""A storm: mixed traffic while processes are killed, paused and cut off at random, NATS among them; and the account.

    PYTHONPATH=tests:models python -m chaos.storm --seconds 600 --every 10 --seed 3   (make extended PART=storm)

Chats, speech, transcripts, spoken conversations and pictures, two processes of each service, tiny models whose answers
are known from a quiet time. Every question is accounted for: completed exactly as in the quiet time, or broken off in
a way that tells the client to ask again. What was lost, changed or refused, what died by itself, what is left behind
in an idle service, and what a process has grown by are findings; with one the exit code is 1.
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

from chaos.storm_account import Account, Blow
from chaos.storm_stack import NATS, StormStack, storm_stack
from chaos.storm_traffic import Traffic
from e2e.engines.peer import integrities

KINDS = ("kill", "pause", "cut")
PAUSE = 3.0  # seconds
_READY = 60.0  # seconds in which everybody must be there again
_LOOKS = 30  # one per second, until everybody is idle


@dataclass(frozen=True)
class Storm:
    """What is asked for. `clients`: so many per share of each kind of traffic, of which there are eight."""

    seed: int
    seconds: float = 600.0
    every: float = 10.0
    clients: int = 1
    kinds: tuple[str, ...] = KINDS


@dataclass
class Weather:
    """Carries a storm out. All that is random follows from the seed."""

    storm: Storm
    stack: StormStack
    say: Callable[[str], None]
    blows: list[Blow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.storm.seed)

    async def run(self) -> Account:
        """The account of it all. The stack is ready before, and must be ready again afterwards."""
        traffic = Traffic(self.stack.urls, random.Random(self.storm.seed + 1))
        await traffic.learn()
        before = self._memory()
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
        return Account(traffic.answers, self.blows, died, left, self._growth(before))

    # ---------------------------------------------------------------------------------------------------------- blows
    async def _blow(self, traffic: Traffic) -> None:
        """A blow every few seconds, the last one early enough for the traffic to go on for a while."""
        began = time.monotonic()
        names = [NATS, *(member.name for member in self.stack.members)]
        await asyncio.sleep(self.storm.every / 2)
        while (now := time.monotonic()) - began < self.storm.seconds - self.storm.every / 2:
            kind, name = self._random.choice(self.storm.kinds), self._random.choice(names)
            self.say(
                f"{now - began:6.1f} s  {kind:5}  {name:12}  {traffic.asking} questions under way"
            )
            await self._strike(kind, name)
            self.blows.append(Blow(kind, name, now, time.monotonic()))
            await asyncio.sleep(max(0.0, now + self.storm.every - time.monotonic()))

    async def _strike(self, kind: str, name: str) -> None:
        if kind == "pause":
            await self.stack.pause(name, PAUSE)
        else:
            await (self.stack.kill if kind == "kill" else self.stack.cut)(name)

    # ------------------------------------------------------------------------------------------------- what they leave
    async def _left_behind(self) -> list[str]:
        """What the services say of themselves once nobody asks any more: who is busy, or holds what nobody needs."""
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

    def _memory(self) -> dict[int, int]:
        """Bytes by process."""
        return {
            member.pid: psutil.Process(member.pid).memory_info().rss
            for member in self.stack.members
        }

    def _growth(self, before: dict[int, int]) -> dict[str, int]:
        """Of those that have lived through all of it."""
        now = self._memory()
        survivors = [member for member in self.stack.members if member.pid in before]
        return {member.name: now[member.pid] - before[member.pid] for member in survivors}


async def run(storm: Storm, folder: Path, say: Callable[[str], None] = print) -> Account:
    """Starts everything in `folder`, which is empty, and ends it again."""
    say(
        f"seed {storm.seed}, {storm.seconds:g} s, every {storm.every:g} s one of {', '.join(storm.kinds)}"
    )
    async with storm_stack(folder) as stack:
        return await Weather(storm, stack, say).run()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos.storm", description=__doc__.splitlines()[0])
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
    parser.add_argument("--clients", type=int, default=1, help="eight times so many ask at a time")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of blows")
    given = parser.parse_args(argv)
    storm = Storm(given.seed, given.seconds, given.every, given.clients, tuple(given.kinds))
    with tempfile.TemporaryDirectory() as folder:
        account = asyncio.run(run(storm, Path(folder)))
    print(account.table())
    for finding in account.findings():
        print("FINDING", finding)
    print("why questions broke off:", dict(Counter(answer.detail for answer in account.broken)))
    return 1 if account.findings() else 0


if __name__ == "__main__":
    sys.exit(main())
