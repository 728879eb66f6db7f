"""Measure what the heartbeats of many instances cost each process of a stack.

`python benchmarks/run.py heartbeats --help`. NATS is real, and so are the measured processes: a bus
of a role in a process of its own, that does nothing else. The instances exist as their heartbeats
alone, which a few processes send as often as such an instance would.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop
from msgspec.structs import replace

from motet_shared.messages import PROTOCOL, Heartbeat, ModelCard, encode
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import NatsServer
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import period_of
from motet_shared.wire.transport import NatsTransport

ROLES = ("gateway", "tokenizer", "decode", "tts")
# Share of each role among the instances.
MIX = {"decode": 0.8, "tokenizer": 0.06, "gateway": 0.06, "tts": 0.04, "asr": 0.04}
# A decode worker's load, as of `motet up` with pocket-chat.
LOAD = (
    "cpu rss lag active requests unread running queued batch kv_free tokens prefill_token decode_row "
    "prefill_flex prefill_default prefill_priority steps step_seconds cached prompt_tokens preemptions "
    "adapter_load draft_rate accepted"
).split()
WARM_UP = 6.0  # seconds


@dataclass(frozen=True)
class Cost:
    """What a process used. share: of a core; messages: heartbeats that it heard per second."""

    role: str
    share: float
    messages: float


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


async def listen(url: str, folder: Path, role: str, seconds: float) -> None:
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
    await asyncio.sleep(WARM_UP)
    heard, began, used = 0, time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    passed = time.monotonic() - began
    print((time.process_time() - used) / passed, heard / passed, flush=True)
    await bus.close()


async def measure(count: int, roles: list[str], seconds: float) -> list[Cost]:
    """Return what heartbeats of `count` instances cost a process of each role, one after another."""
    me = [sys.executable, "-m", "benchmarks.network.heartbeats"]
    async with NatsServer() as nats:
        there = [nats.url, str(nats.credentials)]
        senders = [
            await asyncio.create_subprocess_exec(*me, "send", *there, role, str(count))
            for role in MIX
            if count
        ]
        try:
            found = []
            for role in roles:
                process = await asyncio.create_subprocess_exec(
                    *me, "listen", *there, role, str(seconds), stdout=subprocess.PIPE
                )
                output, _ = await process.communicate()
                share, messages = map(float, output.split())
                found.append(Cost(role, share, messages))
            nats_share = psutil.Process(nats.pid).cpu_percent(1.0) / 100
            print(f"nats-server, with one listener: {nats_share:.1%} of a core")
            return found
        finally:
            for sender in senders:
                sender.terminate()
            for sender in senders:
                await sender.wait()


def main() -> None:
    if sys.argv[1:2] == ["send"]:
        url, folder, role, count = sys.argv[2:]
        uvloop.run(send(url, Path(folder), role, int(count)))
        return
    if sys.argv[1:2] == ["listen"]:
        url, folder, role, seconds = sys.argv[2:]
        uvloop.run(listen(url, Path(folder), role, float(seconds)))
        return
    parser = argparse.ArgumentParser(prog="heartbeats", description=__doc__)
    parser.add_argument("--instances", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--role", action="append", choices=ROLES, help="measured; repeatable")
    args = parser.parse_args()
    for count in (0, args.instances):
        print(f"{count} instances")
        for cost in asyncio.run(measure(count, args.role or list(ROLES), args.seconds)):
            print(f"{cost.role:10} {cost.share:6.2%} of a core, {cost.messages:6.0f} heartbeats/s")


if __name__ == "__main__":
    main()
