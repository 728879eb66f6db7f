"""Measure memory and reply times of one gateway process with many open realtime sessions.

`python benchmarks/run.py sockets --help`. NATS, tokenizer and gateway are real processes; the engine is
a fake one that sends a token per step. Most sessions are idle; some send a text regularly and wait
for the reply. Clients are raw WebSockets in processes of their own. The numbers go to
`results/sockets.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

import psutil
import uvloop
import websockets

from benchmarks.stack.fake_engine import MODEL
from benchmarks.stack.stack import Stack, environment, motet_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_shared.quantiles import quantile

RESULTS = RESULTS_FOLDER / "sockets.json"
MOST_BYTES = 1.5e9
OPENED_AT_A_TIME = 50  # per process
CLIENT_SECONDS = 600.0
RATE = 40.0  # steps of the engine per second


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured.

    talking: share of active sessions. every: seconds between two texts of a session. seconds: time
    of the measurement, once all sessions are open. tokens: tokens of a reply.
    """

    sessions: int = 10_000
    processes: int = 2
    talking: float = 0.02  # share of the sessions that talk
    every: float = 10.0  # seconds from one text of a session to its next
    seconds: float = 60.0  # in which they talk, once all are open
    tokens: int = 16  # of a reply


QUICK = Plan(sessions=20, processes=1, talking=0.2, every=0.5, seconds=1.5)


@dataclass
class Findings:
    """Hold bytes of the gateway's resident memory, and seconds from a text to its reply.

    idle_bytes: without sessions. open_bytes: with all sessions before the first text. first, last:
    seconds to the first and the last event of a reply. broken: sessions that were closed by the
    end. gateway_cores: cores used during the measurement.
    """

    idle_bytes: int = 0  # without any session
    open_bytes: int = 0  # with all of them, none of which has talked
    last_bytes: int = 0
    open_seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    broken: int = 0  # sessions that were no longer open at the end
    gateway_cores: float = 0.0  # while they talked


# -------------------------------------------------------------------------------------------------- a client process
async def client(port: int, first: int, count: int, plan: Plan) -> None:
    """Open `count` sessions and print their number; after a line on standard input, send texts.

    Prints the findings as JSON at the end.
    """
    sessions: list[websockets.ClientConnection] = []
    gate = asyncio.Semaphore(OPENED_AT_A_TIME)
    await asyncio.gather(*(_open(port, gate, sessions) for _ in range(count)))
    print(len(sessions), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    found = Findings()
    talking = sessions[: round(count * plan.talking)]
    end = monotonic() + plan.seconds
    await asyncio.gather(
        *(_talk(one, first + n, plan, end, found) for n, one in enumerate(talking))
    )
    found.broken = sum(one.state is not websockets.State.OPEN for one in sessions)
    print(json.dumps(asdict(found)), flush=True)


async def _open(
    port: int, gate: asyncio.Semaphore, sessions: list[websockets.ClientConnection]
) -> None:
    async with gate:
        session = await websockets.connect(
            f"ws://127.0.0.1:{port}/v1/realtime?model={MODEL}",
            compression=None,
            proxy=None,
            ping_interval=None,
        )
        await _until(session, "session.created")
        sessions.append(session)


async def _talk(
    session: websockets.ClientConnection, number: int, plan: Plan, end: float, found: Findings
) -> None:
    """Send one text after another, offset within `every` by the session's number."""
    await asyncio.sleep(plan.every * (number * 0.618 % 1))
    text = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "abc def ghi"}],
    }
    while monotonic() < end:
        sent = monotonic()
        await session.send(json.dumps({"type": "conversation.item.create", "item": text}))
        await session.send(
            json.dumps({"type": "response.create", "response": {"max_output_tokens": plan.tokens}})
        )
        await _until(session, "response.output_text.delta")
        found.first.append(monotonic() - sent)
        await _until(session, "response.done")
        found.last.append(monotonic() - sent)
        await asyncio.sleep(max(sent + plan.every - monotonic(), 0.0))


async def _until(session: websockets.ClientConnection, kind: str) -> dict[str, Any]:
    async with asyncio.timeout(CLIENT_SECONDS):
        async for message in session:
            event: dict[str, Any] = json.loads(message)
            if event["type"] == kind:
                return event
            if event["type"] == "error":
                raise RuntimeError(event["error"]["message"])
    raise RuntimeError(f"the session ended before {kind}")


# ------------------------------------------------------------------------------------------------------------ measuring
async def measure(plan: Plan) -> Findings:
    _allow_files(plan.sessions)
    limits = (
        "--max-sockets",
        "--max-streams",
        "--max-connections",
        "--max-connections-per-address",
    )
    gateway = [
        part for limit in limits for part in (limit, str(plan.sessions + 16))
    ]  # 16 more for health checks
    async with motet_stack(rate=RATE, gateway=gateway) as stack:
        process = psutil.Process(stack.pids["gateway"])
        found = Findings(idle_bytes=process.memory_info().rss)
        began = monotonic()
        clients = [await _start(stack, plan, number) for number in range(plan.processes)]
        try:
            opened = [int(await _line(one)) for one in clients]
            if sum(opened) != plan.sessions:
                raise RuntimeError(f"{sum(opened)} of {plan.sessions} sessions are open")
            found.open_seconds = monotonic() - began
            found.open_bytes = process.memory_info().rss
            spent, since = sum(process.cpu_times()[:2]), monotonic()
            for one in clients:
                assert one.stdin is not None
                one.stdin.write(b"\n")
            for one in clients:
                _add(found, json.loads(await _line(one)))
            found.gateway_cores = (sum(process.cpu_times()[:2]) - spent) / (monotonic() - since)
            found.last_bytes = process.memory_info().rss
        finally:
            for one in clients:
                if one.returncode is None:
                    one.kill()
                await one.wait()
    return found


def _allow_files(sessions: int) -> None:
    """Raise the limit of open files for this process and its children. Raises RuntimeError."""
    needed = sessions + 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RuntimeError(
            f"{needed} open files are needed, {hard} are allowed (ulimit -Hn): give fewer --sessions"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


async def _start(stack: Stack, plan: Plan, number: int) -> asyncio.subprocess.Process:
    share = plan.sessions // plan.processes + (number < plan.sessions % plan.processes)
    task = json.dumps(
        {"port": stack.port, "first": number * share, "count": share, "plan": asdict(plan)}
    )
    pipe = asyncio.subprocess.PIPE
    argv = [sys.executable, "-m", "benchmarks.network.sockets", "--client", task]
    return await asyncio.create_subprocess_exec(
        *argv, env=environment(), stdin=pipe, stdout=pipe, limit=1 << 26
    )


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), CLIENT_SECONDS)
    if not line:
        raise RuntimeError(f"a client ended with {await process.wait()}")
    return line


def _add(found: Findings, result: dict[str, Any]) -> None:
    found.first += result["first"]
    found.last += result["last"]
    found.broken += result["broken"]


# -------------------------------------------------------------------------------------------------------------- telling
def targets(found: Findings, plan: Plan) -> list[Target]:
    most = max(found.open_bytes, found.last_bytes)
    return [
        Target(
            f"memory of a gateway with {plan.sessions:,} sessions",
            most / 1e6,
            MOST_BYTES / 1e6,
            "MB",
        ),
        Target("sessions that broke", found.broken, 0, "sessions"),
    ]


def report(found: Findings, plan: Plan) -> str:
    each = (found.open_bytes - found.idle_bytes) / plan.sessions
    memory = [
        f"{value / 1e6:,.0f}" for value in (found.idle_bytes, found.open_bytes, found.last_bytes)
    ]
    cells = [
        "gateway",
        f"{plan.sessions:,}",
        f"{found.open_seconds:.1f}",
        *memory,
        f"{each / 1e3:.1f}",
    ]
    header = [
        "process",
        "sessions",
        "s to open",
        "MB without",
        "MB open",
        "MB after talking",
        "KB each",
    ]
    times = [
        f"{quantile(values, share) * 1e3:,.0f}"
        for values in (found.first, found.last)
        for share in (0.5, 0.99)
    ]
    replies = ["replies", f"{len(found.last):,}", *times, f"{found.gateway_cores:.2f}"]
    names = [
        "talk",
        "count",
        "first p50, ms",
        "first p99, ms",
        "last p50, ms",
        "last p99, ms",
        "gateway's cores",
    ]
    return "\n\n".join(
        [table(header, [cells]), table(names, [replies]), targets_table(targets(found, plan))]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "twenty sessions", RESULTS)
    parser.add_argument("--sessions", type=int, help="open sessions (default: 10,000)")
    parser.add_argument("--seconds", type=float, help="seconds of the measurement (default: 60)")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.client:
        task = json.loads(args.client)
        uvloop.run(client(task["port"], task["first"], task["count"], Plan(**task["plan"])))
        return
    plan, before = planned(args, Plan(), QUICK), conditions()
    found = asyncio.run(measure(plan))
    print(f"{load_line(before)}\n\n{report(found, plan)}", flush=True)
    write(args.file, before, plan, found, targets(found, plan))


if __name__ == "__main__":
    main()
