"""Measure a realtime session that is shown two pictures a second for an hour, and what it remembers.

`python benchmarks/run.py eyes --minutes 60`. *session*: pocket-chat is shown a frame of the pocket
world every half second and asked about it each time; a frame's latency runs from when it was due to
the end of the answer. Then the client draws one frame, the same each time, as a control of the
machine's speed. The first and the last sixth of the time are compared, and slopes of latency and
memory are fitted over minutes. *policies*: right answers about the newest frame, and about a thing
that has been out of sight for some frames, by what `session.video` retains. The numbers go to
`results/eyes.json`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

from benchmarks.omni.camera import (
    CATEGORIES,
    REMEMBERED,
    asked_scene,
    camera,
    eyes_stack,
    frame_of,
    scene_without,
)
from benchmarks.stack.memory import rollup
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.endurance import LATENCY_HEADER, Endurance
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER

RESULTS = RESULTS_FOLDER / "eyes.json"
PARTS = ("session", "policies")
_WARM_FRAMES = 20  # before the clock starts
_SCENE_FRAMES = 6  # after which something else is seen
_BEFORE, _SHOWN = 8, 2  # frames before a thing is seen, and in which it is
_AGES = (4, 12, 40)  # frames since
MERGED = {"type": "merged", "frames": 2, "groups": 3, "group_size": 4}
POLICIES: tuple[dict[str, Any], ...] = (
    {"type": "window", "frames": 1},
    {"type": "window", "frames": 5},
    {"type": "window", "frames": 14},
    {"type": "stride", "frames": 5},
    MERGED,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define the session's minutes, and the questions per policy and age."""

    parts: tuple[str, ...] = PARTS
    minutes: float = 60.0
    rate: float = 2.0  # frames per second
    questions: int = 100
    threads: int = 1


QUICK = Plan(minutes=0.2, questions=2)


@dataclass
class SessionFindings(Endurance):
    """Hold besides whether the answer to each frame was right, and how many tokens its prompt had.

    control: seconds that the same drawing took behind each answer: how fast the machine was.
    """

    control: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass
class PolicyFindings:
    """Hold a policy, its pictures and tokens in a prompt, and right answers by age in frames."""

    video: dict[str, Any]
    tokens: float = 0.0
    right: dict[int, float] = field(default_factory=dict)


@dataclass
class Findings:
    session: SessionFindings | None = None
    policies: list[PolicyFindings] = field(default_factory=list)


async def measure(plan: Plan) -> Findings:
    findings = Findings()
    async with eyes_stack(plan.threads) as stack:
        if "policies" in plan.parts:
            for video in POLICIES:
                findings.policies.append(await _policy(stack.port, video, plan))
        if "session" in plan.parts:
            findings.session = await _session(stack.port, stack.pids, plan)
    return findings


# ------------------------------------------------------------------------------------------------------------- session
async def _session(port: int, pids: dict[str, int], plan: Plan) -> SessionFindings:
    findings = SessionFindings()
    watching = asyncio.create_task(findings.watch_memory(lambda: _memory(pids)))
    try:
        await _look(port, plan, findings)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return findings


async def _look(port: int, plan: Plan, findings: SessionFindings) -> None:
    rng = Random(0)
    async with camera(port, MERGED) as eyes:
        scene, question = asked_scene(CATEGORIES, rng)
        control = scene
        for _ in range(_WARM_FRAMES):
            await eyes.show(frame_of(scene, rng))
            await eyes.ask(question.text)
        start = monotonic()
        for number in range(int(plan.minutes * 60 * plan.rate)):
            if number % _SCENE_FRAMES == 0:
                scene, question = asked_scene(CATEGORIES, rng)
            frame = frame_of(scene, rng)
            due = start + number / plan.rate
            await asyncio.sleep(max(0.0, due - monotonic()))
            await eyes.show(frame)
            answer = await eyes.ask(question.text)
            findings.minutes.append((due - start) / 60)
            findings.latencies.append(monotonic() - due)
            findings.right.append(answer.text == question.answer)
            findings.tokens.append(answer.input_tokens)
            begun = monotonic()
            frame_of(control, Random(0))
            findings.control.append(monotonic() - begun)


def _memory(pids: dict[str, int]) -> dict[str, float]:
    """Return the MiB of processes that no file has, shared memory divided among those that share it.

    Pages of files are left out: what others load of the same libraries changes a process's share of them.
    """
    sizes = {name: rollup(pid) for name, pid in pids.items()}
    return {name: (of["Pss_Anon"] + of["Pss_Shmem"]) / (1 << 20) for name, of in sizes.items()}


# ------------------------------------------------------------------------------------------------------------ policies
async def _policy(port: int, video: dict[str, Any], plan: Plan) -> PolicyFindings:
    found = PolicyFindings(video)
    tokens: list[int] = []
    for age in (0, *_AGES):
        right = 0
        for number in range(plan.questions):
            rng = Random(f"{age}/{number}")
            async with camera(port, video) as eyes:
                question, seen = await _episode(eyes, age, rng)
                answer = await eyes.ask(question)
            right += answer.text == seen
            tokens.append(answer.input_tokens)
        found.right[age] = right / plan.questions
    found.tokens = statistics.fmean(tokens)
    return found


async def _episode(eyes: Any, age: int, rng: Random) -> tuple[str, str]:
    """Show frames of which some have a thing that is asked about `age` frames later."""
    categories, shapes = (REMEMBERED, 1) if age else (CATEGORIES, 0)
    scene, question = asked_scene(categories, rng, shapes=shapes)
    kinds = {str(thing.kind.shape) for thing in scene.things}
    before = scene_without(kinds if age else set(), rng)
    since = scene_without(kinds, rng) if age else scene
    for shown, count in ((before, _BEFORE), (scene, _SHOWN), (since, age)):
        for _ in range(count):
            await eyes.show(frame_of(shown, rng))
    return question.text, question.answer


# ------------------------------------------------------------------------------------------------------------- telling
def targets(findings: Findings, plan: Plan) -> list[Target]:
    """Return the targets that this run can judge: those of an hour, if it lasted as long."""
    return [] if findings.session is None else findings.session.targets(plan.minutes, "frame")


def report(findings: Findings, plan: Plan) -> str:
    parts = []
    if findings.policies:
        header = ["policy", "", "prompt tokens", *(f"{age} frames ago" for age in (0, *_AGES))]
        rows = [
            [
                f"`{found.video['type']}`",
                ", ".join(f"{k} {v}" for k, v in found.video.items() if k != "type"),
                f"{found.tokens:.0f}",
                *(f"{100 * share:.0f} %" for share in found.right.values()),
            ]
            for found in findings.policies
        ]
        parts.append("Right answers about what was seen last\n\n" + table(header, rows))
    if findings.session is not None:
        parts += _told(findings.session, plan.minutes)
    if found_targets := targets(findings, plan):
        parts.append(targets_table(found_targets))
    return "\n\n".join(parts)


def _told(session: SessionFindings, total: float) -> list[str]:
    right = 100 * statistics.fmean(session.right)
    control = Endurance(minutes=session.minutes, latencies=session.control)
    rows = [
        of.latency_row(share, total, what)
        for of, what in ((session, "frame"), (control, "control"))
        for share in (0.5, 0.99)
    ]
    return [
        f"{len(session.latencies)} frames, {right:.1f} % answered right, "
        f"{min(session.tokens)} to {max(session.tokens)} tokens in a prompt.",
        table(LATENCY_HEADER, rows),
        session.memory_table(total),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "twelve seconds, two questions of a kind", RESULTS, "eyes")
    parser.add_argument("--minutes", type=float, help="of the session (default: 60)")
    parser.add_argument("--questions", type=int, help="per policy and age (default: 100)")
    parser.add_argument("--only", dest="parts", choices=PARTS, nargs="+", help="parts to run")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK), conditions()
    findings = asyncio.run(measure(plan))
    print(f"{load_line(before)}\n\n{report(findings, plan)}", flush=True)
    found = targets(findings, plan)
    write(args.file, before, plan, findings, found)
    if args.check and not all(target.met for target in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
