"""Measure how long WebSocket sessions pause when the gateway under them is killed.

`python benchmarks/run.py session_pauses --help`. Behind a descriptor store, written sessions receive a
reply at a steady pace, around a fake engine; the gateway gets SIGKILL while they do. Either another
gateway of the host takes over, or one is started then: a new interpreter, which takes longer than the
fork that `motet up` has ready. A pause is the longest time without an event from 0.1 s before the kill
on. The numbers go to `results/session_pauses.json`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic

import websockets

from benchmarks.stack.fake_engine import MODEL
from benchmarks.stack.stack import Stack, motet_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_shared.quantiles import quantile

RESULTS = RESULTS_FOLDER / "session_pauses.json"
RATE = 40.0  # steps of the engine per second
_BEFORE = 0.1  # seconds before the kill that belong to a pause
_RUNNING = 0.5  # seconds between the first text of the last session and the kill
_TWO, _ONE = "another gateway takes over", "a gateway is started"
_MOST = {_TWO: 1.0, _ONE: 5.0}  # seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured: `rounds` kills, each under `sessions` sessions of their own."""

    sessions: int = 16
    rounds: int = 6
    tokens: int = 240  # of a reply


QUICK = Plan(sessions=2, rounds=1, tokens=120)


@dataclass
class Findings:
    """Hold the pauses in seconds by what follows the kill, and how many replies were not whole."""

    pauses: dict[str, list[float]] = field(default_factory=dict)
    broken: int = 0


class Session:
    """Receive one reply once `go` is set; `times` of its events."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self.times: list[float] = []
        self.open, self.go = asyncio.Event(), asyncio.Event()
        self.running = asyncio.Event()  # set by the first text
        self.is_whole = False

    async def run(self, port: int) -> None:
        url = f"ws://127.0.0.1:{port}/v1/realtime?model={MODEL}"
        async with websockets.connect(url, compression=None, proxy=None) as socket:
            content = [{"type": "input_text", "text": "abc def ghi"}]
            item = {"type": "message", "role": "user", "content": content}
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            self.open.set()
            await self.go.wait()
            response = {"max_output_tokens": self._plan.tokens, "output_modalities": ["text"]}
            await socket.send(json.dumps({"type": "response.create", "response": response}))
            texts = []
            async for message in socket:
                self.times.append(monotonic())
                event = json.loads(message)
                if event["type"] == "response.output_text.delta":
                    texts.append(event["delta"])
                    self.running.set()
                elif event["type"] == "response.done":
                    (told,) = event["response"]["output"]
                    self.is_whole = told["content"][0]["text"] == "".join(texts)
                    return

    def pause(self, killed: float) -> float:
        times = [time for time in self.times if time >= killed - _BEFORE]
        return max((later - time for time, later in pairwise(times)), default=0.0)


async def measure(plan: Plan) -> Findings:
    findings = Findings()
    async with motet_stack(rate=RATE, keeps=True) as stack:
        name = "gateway"
        for number in range(plan.rounds):
            for what in (_TWO, _ONE):
                fresh = f"gateway-{number}-{'two' if what == _TWO else 'one'}"
                await _round(stack, plan, findings, what, name, fresh)
                name = fresh
    return findings


async def _round(
    stack: Stack, plan: Plan, findings: Findings, what: str, name: str, fresh: str
) -> None:
    """Kill the gateway `name` under new sessions; `fresh` serves them from then on."""
    sessions = [Session(plan) for _ in range(plan.sessions)]
    running = [asyncio.create_task(session.run(stack.port)) for session in sessions]
    await asyncio.gather(*(session.open.wait() for session in sessions))
    if what == _TWO:
        await _start(stack, fresh)
    for session in sessions:
        session.go.set()
    await asyncio.gather(*(session.running.wait() for session in sessions))
    await asyncio.sleep(_RUNNING)
    killed = await stack.kill(name)
    if what == _ONE:
        await _start(stack, fresh)
    ended = await asyncio.gather(*running, return_exceptions=True)
    findings.broken += sum(
        isinstance(one, BaseException) or not session.is_whole
        for one, session in zip(ended, sessions, strict=True)
    )
    findings.pauses.setdefault(what, []).extend(session.pause(killed) for session in sessions)
    await stack.until_ready("/health/ready")


async def _start(stack: Stack, name: str) -> None:
    """Start a gateway behind the descriptor store; return once it takes connections."""
    path = stack.folder / "front.sock"
    flags = ("--port", str(stack.port), "--session-keep", "0", "--descriptor-store", str(path))
    await stack.start("motet_gateway", name, *flags)
    await stack.until_ready("/metrics/stack", f'"{name}"')


# ------------------------------------------------------------------------------------------------------------- telling
def targets(findings: Findings) -> list[Target]:
    """Return the targets that this run can judge."""
    pauses = [
        Target(f"pause p99, {what}", quantile(found, 0.99), _MOST[what], "s")
        for what, found in findings.pauses.items()
    ]
    return [*pauses, Target("replies that were not whole", findings.broken, 0, "")]


def report(findings: Findings) -> str:
    rows = [
        [
            what,
            str(len(found)),
            *(f"{quantile(found, share):.3f}" for share in (0.5, 0.99)),
            f"{max(found):.3f}",
        ]
        for what, found in findings.pauses.items()
    ]
    header = ["after SIGKILL of the gateway", "sessions", "pause p50, s", "p99, s", "longest, s"]
    return "\n\n".join([table(header, rows), targets_table(targets(findings))])


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "two sessions, one kill of each kind", RESULTS, "session_pauses")
    parser.add_argument("--sessions", type=int, help="sessions at a time")
    parser.add_argument("--rounds", type=int, help="kills of each kind")
    args = parser.parse_args(argv)
    plan = planned(args, Plan(), QUICK, ("sessions", "rounds"))
    before = conditions()
    findings = asyncio.run(measure(plan))
    print(f"{load_line(before)}\n")
    print(report(findings), flush=True)
    write(args.file, before, plan, findings, targets(findings))


if __name__ == "__main__":
    main()
