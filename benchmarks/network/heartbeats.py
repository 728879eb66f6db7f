"""Measure what the heartbeats of many instances cost each process of a stack.

`python benchmarks/run.py heartbeats --help`. NATS is real, and so are the measured processes: a bus
of a role in a process of its own, that does nothing else. The instances exist as their heartbeats
alone, which a few processes send as often as such an instance would. The numbers go to
`results/heartbeats.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from msgspec.structs import replace

from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_shared.messages import PROTOCOL, Heartbeat, ModelCard, encode
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import NatsServer
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import period_of
from motet_shared.wire.transport import NatsTransport

RESULTS = RESULTS_FOLDER / "heartbeats.json"
MOST_SHARE = 0.02  # of a core
ROLES = ("gateway", "tokenizer", "decode", "tts")
# Share of each role among the instances.
MIX = {"decode": 0.8, "tokenizer": 0.06, "gateway": 0.06, "tts": 0.04, "asr": 0.04}
# A decode worker's load, as of `motet up` with pocket-chat.
LOAD = (
    "cpu rss lag active requests unread running queued batch kv_free tokens prefill_token decode_row "
    "prefill_flex prefill_default prefill_priority steps step_seconds cached prompt_tokens preemptions "
    "adapter_load draft_rate accepted"
).split()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define what is measured: seconds of each measurement, and before it."""

    instances: int = 2000
    roles: tuple[str, ...] = ROLES
    seconds: float = 8.0
    warm_up: float = 6.0


QUICK = Plan(instances=20, roles=("tokenizer",), seconds=0.5, warm_up=0.7)


@dataclass
class Cost:
    """Shares of a core of a process, with no other instance and with all; heartbeats per second."""

    role: str
    idle: float = 0.0
    share: float = 0.0
    heard: float = 0.0

    @property
    def added(self) -> float:
        """Return the share of a core that the instances cost."""
        return self.share - self.idle


@dataclass
class Findings:
    costs: list[Cost] = field(default_factory=list)


def beat_of(role: str, number: int) -> Heartbeat:
    """Return a heartbeat of a simulated instance."""
    card = ModelCard(name="pocket-chat", context=4096, vocab_size=32_000, block_size=16)
    load = {name: 1.0 + number / 7 for name in LOAD} if role == "decode" else {"active": 3.0}
    return Heartbeat(
        v=PROTOCOL,
        role=role,
        instance=f"{role}-{number:08x}",
        state="ready",
        seq=0,
        models=[card] if role != "gateway" else [],
        load=load,
        host=f"host-{number // 8}",
        site="eu-1" if number % 2 else "eu-2",
        pid=number,
    )


def instances(count: int) -> dict[str, list[Heartbeat]]:
    """Return heartbeats of `count` instances by role."""
    return {
        role: [beat_of(role, number) for number in range(round(count * share))]
        for role, share in MIX.items()
    }


async def send(url: str, folder: Path, role: str, count: int) -> None:
    """Send the heartbeats of all instances of a role, evenly over each period, until cancelled."""
    password = (folder / role).read_text()
    transport = await NatsTransport.connect(
        url,
        name=role,
        inbox_prefix=f"{subjects.inbox(f'{role}-1')}.r",
        user=role,
        password=password,
    )
    beats = instances(count)[role]
    period = period_of(count)
    sequence, due = 0, time.monotonic()
    while True:
        sequence += 1
        for index, beat in enumerate(beats):
            beat = replace(beat, seq=sequence, every=period)
            await transport.publish(subjects.heartbeat(beat.instance), encode(beat))
            if index % 16 == 15:
                await asyncio.sleep(max(due + period * index / len(beats) - time.monotonic(), 0))
        due += period
        await asyncio.sleep(max(due - time.monotonic(), 0))


async def listen(url: str, folder: Path, role: str, plan: Plan) -> None:
    """Print the share of a core and the heartbeats per second of a bus that hears all instances."""
    config = ProcessConfig(nats_url=url, nats_credentials=folder, site="eu-1")
    bus = await Bus.connect(config.instance_id(role), config)
    heard = 0
    on_beat = bus.directory.presence.note

    def note(beat: Heartbeat) -> None:
        nonlocal heard
        heard += 1
        on_beat(beat)

    bus.directory.presence.note = note  # type: ignore[method-assign]
    await asyncio.sleep(plan.warm_up)
    heard, began, used = 0, time.monotonic(), time.process_time()
    await asyncio.sleep(plan.seconds)
    passed = time.monotonic() - began
    print(json.dumps([(time.process_time() - used) / passed, heard / passed]), flush=True)
    await bus.close()


async def measured(role: str, plan: Plan, nats: NatsServer) -> tuple[float, float]:
    """Return the share of a core of a process of a role, and the heartbeats that it hears per second."""
    times = [str(plan.seconds), str(plan.warm_up)]
    process = await asyncio.create_subprocess_exec(
        *_me("listen", nats, role, *times), stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    share, heard = json.loads(output)
    return share, heard


async def measure(plan: Plan) -> Findings:
    """Measure one role after another, first without and then with the instances."""
    costs = [Cost(role) for role in plan.roles]
    async with NatsServer() as nats, AsyncExitStack() as senders:
        for cost in costs:
            cost.idle, _ = await measured(cost.role, plan, nats)
        for role in MIX:
            process = await asyncio.create_subprocess_exec(
                *_me("send", nats, role, str(plan.instances))
            )
            senders.push_async_callback(process.wait)
            senders.callback(process.terminate)
        for cost in costs:
            cost.share, cost.heard = await measured(cost.role, plan, nats)
    return Findings(costs)


def _me(command: str, nats: NatsServer, *arguments: str) -> list[str]:
    there = [nats.url, str(nats.credentials)]
    return [sys.executable, "-m", "benchmarks.network.heartbeats", command, *there, *arguments]


def targets(found: Findings, plan: Plan) -> list[Target]:
    most = max(cost.added for cost in found.costs)
    what = f"heartbeats of {plan.instances:,} instances cost a process"
    return [Target(what, 100 * most, 100 * MOST_SHARE, "% of a core")]


def report(found: Findings, plan: Plan) -> str:
    header = ["process", "heartbeats/s", "alone, % of a core", "with them", "they cost"]
    rows = [
        [
            cost.role,
            f"{cost.heard:,.0f}",
            *(f"{100 * share:.2f}" for share in (cost.idle, cost.share, cost.added)),
        ]
        for cost in found.costs
    ]
    return f"{table(header, rows)}\n\n{targets_table(targets(found, plan))}"


def main(argv: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["send"]:
        url, folder, role, count = given[1:]
        uvloop.run(send(url, Path(folder), role, int(count)))
        return
    if given[:1] == ["listen"]:
        url, folder, role, seconds, warm_up = given[1:]
        plan = Plan(seconds=float(seconds), warm_up=float(warm_up))
        uvloop.run(listen(url, Path(folder), role, plan))
        return
    parser = parser_of(__doc__, "twenty instances", RESULTS)
    parser.add_argument("--instances", type=int, help="that are simulated (default: 2,000)")
    parser.add_argument("--seconds", type=float, help="of each measurement (default: 8)")
    parser.add_argument("--roles", action="append", choices=ROLES, help="measured; repeatable")
    args: argparse.Namespace = parser.parse_args(given)
    plan, before = planned(args, Plan(), QUICK), conditions()
    found = asyncio.run(measure(plan))
    print(f"{load_line(before)}\n\n{report(found, plan)}", flush=True)
    write(args.file, before, plan, found, targets(found, plan))


if __name__ == "__main__":
    main()
