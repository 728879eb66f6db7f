"""Measure spoken replies of an omni model by number of sessions, with each stage scaled alone.

`python benchmarks/run.py omni --help`. A stack of real processes serves a random Qwen2.5-Omni whose
stages each compute enough to count: thinker, talker and code2wav. Sessions are chats with sound, all
at once, each one reply after another. First with one process of each stage, then with two of one
stage at a time. Sound is played as it comes: a pause is when the next sample is not there in time.
The numbers go to `results/omni.json`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from benchmarks.stack.stack import Stack, nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from motet_shared.quantiles import quantile

sys.path.append(str(ROOT / "tests"))

RESULTS = RESULTS_FOLDER / "omni.json"
MODEL, VOICE = "omni", "Ethan"
STAGES = {
    "thinker": "decode",
    "talker": "decode",
    "code2wav": "tts",
}  # with the roles of their processes
RATE = 24_000  # Hz
REPLY_SECONDS = 300.0
DOCTOR_SECONDS = 10.0
# A code is 20 ms of sound, as of the released checkpoints; the other sizes are about a tenth of theirs.
SIZES: dict[str, dict[str, Any]] = {
    "thinker": {"intermediate_size": 4096, "max_position_embeddings": 1024},
    "talker": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "max_position_embeddings": 512,
    },
    "dit": {"hidden_size": 64, "num_hidden_layers": 4},
    "vocoder": {
        "upsample_initial_channel": 128,
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
    },
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define the numbers of sessions, and how many replies each of them has."""

    sessions: tuple[int, ...] = (1, 2, 4)
    replies: int = 3
    tokens: int = 160  # of a reply's text
    scaled: tuple[str, ...] = ("", *STAGES)  # stages of which there are two; "" for none
    threads: int = 1


QUICK = Plan(sessions=(1, 2), replies=1, tokens=24, scaled=("", "talker"))


@dataclass
class Spoken:
    """Hold one reply: seconds from its request, and seconds of sound and of its pauses."""

    first_text: float
    first_audio: float
    last_audio: float
    sound: float
    pauses: list[float] = field(default_factory=list)

    @property
    def real_time_factor(self) -> float:
        """Return the seconds from the request to the last sample by those of sound."""
        return self.last_audio / self.sound if self.sound else float("inf")


@dataclass
class Run:
    """Hold the replies of some sessions at once, and the stage that the doctor names, if any."""

    scaled: str
    sessions: int
    replies: list[Spoken] = field(default_factory=list)
    lost: int = 0  # replies whose sound ended early
    limiting: str = ""

    @property
    def rate(self) -> float:
        """Return the seconds of sound per second of all sessions together."""
        rates = [one.sound / one.last_audio for one in self.replies]
        return statistics.mean(rates) * self.sessions if rates else 0.0


class Playback:
    """Play sound as it comes, from the first sample on."""

    def __init__(self) -> None:
        self.ends = 0.0  # when what has come will have been played
        self.seconds = 0.0
        self.pauses: list[float] = []

    def play(self, data: bytes, now: float) -> None:
        if self.seconds and now > self.ends:
            self.pauses.append(now - self.ends)
        length = len(data) / 2 / RATE
        self.ends = max(self.ends, now) + length
        self.seconds += length


async def measure(plan: Plan) -> list[Run]:
    runs = []
    async with nats_stack(OMP_NUM_THREADS=str(plan.threads)) as (stack, _):
        folder = stack.folder / MODEL
        await asyncio.to_thread(_write_checkpoint, folder)
        await _begin(stack, folder, plan)
        await _sessions(stack.port, plan, 1)  # warms all stages up
        for scaled in plan.scaled:
            second = _instance(scaled, 2) if scaled else ""
            if scaled:
                await _start(stack, folder, scaled, second, plan)
            for sessions in plan.sessions:
                run = await _sessions(stack.port, plan, sessions)
                run.scaled = scaled
                runs.append(run)
            if scaled:
                await stack.kill(second)
                await _until_gone(stack, second)
    return runs


def _write_checkpoint(folder: Path) -> None:
    from support.families import omni  # behind the path, and it takes seconds

    omni.write(folder, endless=True, sizes=SIZES)


# --------------------------------------------------------------------------------------------------------------- stack
def _instance(stage: str, number: int) -> str:
    return f"{STAGES[stage]}-{stage}-{number}"


async def _begin(stack: Stack, folder: Path, plan: Plan) -> None:
    for stage in STAGES:
        await _spawn(stack, folder, stage, _instance(stage, 1), plan)
    await stack.start("motet_tokenizer", "tokenizer-1", "--model", str(folder))
    await stack.start("motet_gateway", "gateway-1", "--port", str(stack.port))
    await stack.until_ready("/health/ready", seconds=REPLY_SECONDS)
    await _until_ready(stack, [_instance(stage, 1) for stage in STAGES])


async def _start(stack: Stack, folder: Path, stage: str, name: str, plan: Plan) -> None:
    await _spawn(stack, folder, stage, name, plan)
    await _until_ready(stack, [name])


async def _spawn(stack: Stack, folder: Path, stage: str, name: str, plan: Plan) -> None:
    shared = ["--model", str(folder), "--threads", str(plan.threads)]
    talker = f"{MODEL}-talker"
    if stage == "code2wav":
        args = [*shared, "--name", MODEL, "--language-model", talker]
        await stack.start("motet_tts", name, *args)
    elif stage == "talker":
        args = ["--role", "decode", *shared, "--name", talker, "--stage", "talker"]
        await stack.start("motet_llm", name, *args)
    else:
        await stack.start("motet_llm", name, "--role", "decode", *shared, "--name", MODEL)


async def _instances(stack: Stack) -> dict[str, str]:
    async with httpx.AsyncClient(trust_env=False, timeout=REPLY_SECONDS) as http:
        found = (await http.get(f"http://127.0.0.1:{stack.port}/metrics/stack")).json()
    return {one["instance"]: one["state"] for one in found["instances"]}


async def _until_ready(stack: Stack, names: Sequence[str]) -> None:
    async with asyncio.timeout(REPLY_SECONDS):
        while True:
            found = await _instances(stack)
            if all(found.get(name) == "ready" for name in names):
                return
            await asyncio.sleep(0.2)


async def _until_gone(stack: Stack, name: str) -> None:
    async with asyncio.timeout(REPLY_SECONDS):
        while True:
            if name not in await _instances(stack):
                return
            await asyncio.sleep(0.2)


# ------------------------------------------------------------------------------------------------------------ sessions
async def _sessions(port: int, plan: Plan, sessions: int) -> Run:
    run = Run("", sessions)
    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=REPLY_SECONDS) as http:
        asking = asyncio.create_task(_limiting(http))
        await asyncio.gather(*(_session(http, plan, run, number) for number in range(sessions)))
        run.limiting = await asking
    return run


async def _limiting(http: httpx.AsyncClient) -> str:
    """Return the stage that the doctor names in the middle of the run."""
    await asyncio.sleep(DOCTOR_SECONDS / 2)
    found = (await http.get("/metrics/doctor", params={"window": DOCTOR_SECONDS / 2})).json()
    named = [one for one in found["findings"] if one["name"] == "stage_limits"]
    stage = named[0]["resource"].split()[0] if named else ""
    return "thinker" if stage == "decode" else stage


async def _session(http: httpx.AsyncClient, plan: Plan, run: Run, number: int) -> None:
    for reply in range(plan.replies):
        spoken = await _reply(http, plan, 100 * number + reply)
        if spoken is None:
            run.lost += 1
        else:
            run.replies.append(spoken)


async def _reply(http: httpx.AsyncClient, plan: Plan, seed: int) -> Spoken | None:
    """Return a reply; None if its sound ended early."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me of number {seed}."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": VOICE, "format": "pcm16"},
        "temperature": 0,
        "seed": seed,
        "max_tokens": plan.tokens,
        "ignore_eos": True,
        "stream": True,
    }
    start, playback = monotonic(), Playback()
    texts, sounds = [], []
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            audio = _audio(json.loads(line[6:]))
            now = monotonic()
            if "error" in audio:
                return None
            if audio.get("transcript"):
                texts.append(now - start)
            if audio.get("data"):
                sounds.append(now - start)
                playback.play(base64.b64decode(audio["data"]), now)
    if not sounds:
        return None
    return Spoken(texts[0], sounds[0], sounds[-1], playback.seconds, playback.pauses)


def _audio(chunk: dict[str, Any]) -> dict[str, Any]:
    """Return `delta.audio` of a chunk. Raises RuntimeError for an error."""
    if "error" in chunk:
        raise RuntimeError(f"a reply failed: {chunk['error']}")
    choices = chunk["choices"]
    return (choices[0]["delta"].get("audio") or {}) if choices else {}


# ------------------------------------------------------------------------------------------------------------- telling
def report(runs: Sequence[Run]) -> str:
    header = [
        "two of",
        "doctor names",
        "sessions",
        "first text, ms",
        "first audio p50, ms",
        "p99, ms",
    ]
    header += [
        "real-time factor p50",
        "p99",
        "sound, s/s",
        "pauses per reply",
        "longest pause, ms",
        "lost",
    ]
    return table(header, [_row(run) for run in runs])


def _row(run: Run) -> list[str]:
    replies = run.replies
    if not replies:
        return [
            run.scaled or "–",
            run.limiting or "–",
            str(run.sessions),
            *["–"] * 8,
            str(run.lost),
        ]
    factors = [one.real_time_factor for one in replies]
    firsts = [one.first_audio * 1e3 for one in replies]
    pauses = [pause for one in replies for pause in one.pauses]
    return [
        run.scaled or "–",
        run.limiting or "–",
        str(run.sessions),
        f"{statistics.median(one.first_text for one in replies) * 1e3:.0f}",
        f"{quantile(firsts, 0.5):.0f}",
        f"{quantile(firsts, 0.99):.0f}",
        f"{quantile(factors, 0.5):.2f}",
        f"{quantile(factors, 0.99):.2f}",
        f"{run.rate:.2f}",
        f"{len(pauses) / len(replies):.1f}",
        f"{max(pauses, default=0.0) * 1e3:.0f}",
        str(run.lost),
    ]


def targets(runs: Sequence[Run]) -> list[Target]:
    """Return the goals: no reply is lost, and a second process of the limiting stage pays."""
    goals = [Target("replies whose sound ended early", sum(run.lost for run in runs), 0, "replies")]
    most = max(run.sessions for run in runs)
    rates = {run.scaled: run.rate for run in runs if run.sessions == most and run.rate}
    if {"", "code2wav"} <= rates.keys():
        gain = rates["code2wav"] / rates[""]
        what = f"{most} sessions: sound/s with two code2wav / one"
        goals.append(Target(what, gain, 1.3, "times", most=False))
    return goals


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "one reply of one and of two sessions", RESULTS, "omni")
    parser.add_argument("--sessions", type=int, nargs="+", help="sessions at a time")
    parser.add_argument("--replies", type=int, help="replies of each session (default: 3)")
    parser.add_argument("--threads", type=int, help="of each process (default: 1)")
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK, ("sessions", "replies", "threads")), conditions()
    runs = asyncio.run(measure(plan))
    found = targets(runs)
    print(f"{load_line(before)}\n\n{report(runs)}\n\n{targets_table(found)}", flush=True)
    write(args.file, before, plan, {"runs": runs}, found)


if __name__ == "__main__":
    main()
