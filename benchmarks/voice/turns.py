"""Measure voice-to-voice latency: spoken questions to the stack of `motet up` through /v1/realtime.

A client sends sound as a microphone does, twenty milliseconds at a time in real time, including
silence, and plays what it receives. A turn's clock starts when the last sample of its speech has
been sent.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import websockets

from benchmarks.stack.stack import Stack, environment
from benchmarks.support.measures import Target, table
from benchmarks.support.paths import MODELS, ROOT
from benchmarks.voice.speech import RATE, questions, spoken
from motet_shared.quantiles import quantile
from motet_shared.testing import free_port

CHUNK = RATE // 50  # samples
AUDIBLE = 330  # of 32768: 1 % of full scale
TURN_SECONDS = 60.0
PAUSE_SECONDS = 0.4  # between a reply and the next question
LONG = "Count to twenty."  # its reply is still generated when it is interrupted
STAGES = ("speech ends", "transcript", "first text", "first audio", "audible")
_EVENTS = {
    "input_audio_buffer.speech_stopped": "speech ends",
    "conversation.item.input_audio_transcription.completed": "transcript",
    "response.content_part.added": "first text",
    "response.output_audio.delta": "first audio",
}


@dataclass(frozen=True, kw_only=True)
class TurnsPlan:
    """Define the turns.

    asr, tts: folders or names of models; empty: the bundled ones. silence_ms: silence that ends a
    turn.
    """

    turns: int = 50
    interruptions: int = 20
    silence_ms: int = 200
    llm: str = "pocket-chat"
    asr: str = ""
    tts: str = ""


@dataclass
class Turn:
    """Hold milliseconds from the end of speech by stage, the recognized text, and the reply."""

    question: str
    stages: dict[str, float] = field(default_factory=dict)
    transcript: str = ""
    reply: str = ""


@dataclass(frozen=True)
class Interruption:
    """Hold milliseconds from a barge-in to its detection, and from there to the reply's end."""

    detected: float
    stopped: float


@dataclass
class TurnsFindings:
    turns: list[Turn] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    too_late: int = 0  # interruptions of an answer that was complete
    missing: str = ""


def run_turns(plan: TurnsPlan) -> TurnsFindings:
    missing = [
        name
        for name, given in (("pocket-asr", plan.asr), ("pocket-tts", plan.tts))
        if not _there(name, given)
    ]
    if missing:
        flags = " ".join(f"--{name.removeprefix('pocket-')} FOLDER" for name in missing)
        return TurnsFindings(missing=f"{' and '.join(missing)} are not in models/: give {flags}")
    return asyncio.run(_conversation(plan))


def _there(name: str, given: str) -> bool:
    return bool(given) or (MODELS / name / "model.safetensors").is_file()


async def _conversation(plan: TurnsPlan) -> TurnsFindings:
    async with _stack(plan) as stack:
        spoken_questions = questions(plan.turns + 1)
        async with _session(plan, stack.port) as client:
            turns = [await client.ask(question) for question in spoken_questions]
        async with _session(plan, stack.port, interrupt_on="speech") as client:
            await client.ask(spoken_questions[0])
            tries = [
                await client.interrupt(LONG, spoken_questions[number + 1])
                for number in range(plan.interruptions)
            ]
        # The first turn warms the stack up.
        return TurnsFindings(
            turns[1:], [one for one in tries if one], sum(one is None for one in tries)
        )


@contextlib.asynccontextmanager
async def _stack(plan: TurnsPlan) -> AsyncIterator[Stack]:
    """Start `motet up` as a process group of its own."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        env = environment()
        env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT / 'cli'}"
        stack = Stack(Path(name), free_port(), env)
        argv = [
            sys.executable,
            "-m",
            "motet_cli",
            "up",
            "--port",
            str(stack.port),
            "--llm",
            plan.llm,
        ]
        argv += ["--draw", "none", "--embed", "none"]
        for flag, given in (("--asr", plan.asr), ("--tts", plan.tts)):
            argv += [flag, given] if given else []
        try:
            await stack.spawn("up", argv)
            await stack.until_ready("/health/ready", '"missing":[]')
            yield stack
        finally:
            await stack.stop()


@contextlib.asynccontextmanager
async def _session(plan: TurnsPlan, port: int, **detection_fields: Any) -> AsyncIterator[Client]:
    url = f"ws://127.0.0.1:{port}/v1/realtime?model={plan.llm}"
    detection = {"type": "server_vad", "silence_duration_ms": plan.silence_ms, **detection_fields}
    listening = {"transcription": {"language": "en"}, "turn_detection": detection}
    session = {"type": "realtime", "output_modalities": ["audio"], "audio": {"input": listening}}
    async with websockets.connect(url, proxy=None, max_size=None) as socket:
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        client = Client(socket)
        microphone = asyncio.create_task(client.microphone())
        try:
            yield client
        finally:
            microphone.cancel()
            await asyncio.gather(microphone, return_exceptions=True)


class Client:
    """Send a continuous microphone signal and play replies."""

    def __init__(self, socket: websockets.ClientConnection):
        self._socket = socket
        self._queued = b""  # PCM still to be sent
        self._ended = asyncio.Event()
        self._end = 0.0

    async def microphone(self) -> None:
        """Send a chunk when it is due: speech if some is queued, else silence."""
        due = time.perf_counter()
        while True:
            chunk, self._queued = self._queued[: 2 * CHUNK], self._queued[2 * CHUNK :]
            due = max(due + CHUNK / RATE, time.perf_counter() - 1.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            audio = base64.b64encode(chunk.ljust(2 * CHUNK, b"\0")).decode()
            await self._socket.send(
                json.dumps({"type": "input_audio_buffer.append", "audio": audio})
            )
            if chunk and not self._queued:
                self._end = time.perf_counter() - (1 - len(chunk) / (2 * CHUNK)) * CHUNK / RATE
                self._ended.set()

    async def ask(self, question: str) -> Turn:
        """Speak a question and listen to the whole reply. Raises RuntimeError for an error event."""
        turn, loudspeaker = Turn(question), Loudspeaker()
        moments: dict[str, float] = {}
        await asyncio.sleep(PAUSE_SECONDS)
        self._ended.clear()
        self._queued = spoken(question)
        async with asyncio.timeout(TURN_SECONDS):
            async for event in self._events():
                kind, now = event["type"], time.perf_counter()
                if (stage := _EVENTS.get(kind)) and self._ended.is_set():
                    moments.setdefault(stage, now)
                if kind == "response.output_audio.delta":
                    loudspeaker.play(base64.b64decode(event["delta"]), now)
                elif kind == "conversation.item.input_audio_transcription.completed":
                    turn.transcript += event["transcript"]
                elif kind == "response.output_audio_transcript.done":
                    turn.reply = event["transcript"]
                elif kind == "error":
                    raise RuntimeError(f"{question!r}: {event['error']}")
                elif kind == "response.done" and event["response"]["status"] == "completed":
                    break
        if loudspeaker.audible:
            moments["audible"] = loudspeaker.audible
        turn.stages = {stage: (moment - self._end) * 1e3 for stage, moment in moments.items()}
        return turn

    async def interrupt(self, question: str, other: str) -> Interruption | None:
        """Ask, and barge in once the reply sounds; None if the reply was complete by then."""
        began = detected = stopped = 0.0
        await asyncio.sleep(PAUSE_SECONDS)
        self._queued = spoken(question)
        async with asyncio.timeout(TURN_SECONDS):
            async for event in self._events():
                kind, now = event["type"], time.perf_counter()
                if kind == "response.output_audio.delta" and not began:
                    began, self._queued = now, spoken(other)
                elif kind == "input_audio_buffer.speech_started" and began:
                    detected = detected or now
                elif kind == "response.done" and stopped:
                    break  # the reply to the second question
                elif kind == "response.done":
                    stopped, cancelled = now, event["response"]["status"] == "cancelled"
        return (
            Interruption((detected - began) * 1e3, (stopped - detected) * 1e3)
            if cancelled
            else None
        )

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            yield json.loads(await self._socket.recv())


class Loudspeaker:
    """Play audio as soon as it arrives.

    audible: time of the first loud sample; 0 before it.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self.audible = 0.0

    def play(self, pcm: bytes, now: float) -> None:
        begin = max(now, self._until)
        samples = np.frombuffer(pcm, "<i2")
        loud = np.flatnonzero(np.abs(samples.astype(np.int32)) >= AUDIBLE)
        if not self.audible and len(loud):
            self.audible = begin + float(loud[0]) / RATE
        self._until = begin + len(samples) / RATE


# ------------------------------------------------------------------------------------------------------------- telling
def turns_report(findings: TurnsFindings, plan: TurnsPlan) -> str:
    if findings.missing:
        return f"* not measured: {findings.missing}"
    rows, before = [], [0.0] * len(findings.turns)
    for stage in STAGES:
        at = [turn.stages.get(stage, float("nan")) for turn in findings.turns]
        own = [moment - earlier for moment, earlier in zip(at, before, strict=True)]
        cells = [f"{quantile(values, share):.0f}" for values in (at, own) for share in (0.5, 0.95)]
        rows.append([stage, "", *cells])
        before = at
    silent = sum("audible" not in turn.stages for turn in findings.turns)
    header = [
        "stage",
        "",
        "since the end of speech p50 ms",
        "p95 ms",
        "of this stage p50 ms",
        "p95 ms",
    ]
    note = f"{len(findings.turns)} spoken turns, {plan.silence_ms} ms of silence end a turn"
    note += f"; {silent} had no audible reply" if silent else ""
    return f"{note}:\n\n{table(header, rows)}\n\n{_interruptions_report(findings)}"


def _interruptions_report(findings: TurnsFindings) -> str:
    late = (
        f"; {findings.too_late} more came after the end of the reply" if findings.too_late else ""
    )
    note = f"{len(findings.interruptions)} replies were interrupted{late}"
    if not findings.interruptions:
        return note
    spans = {
        "barge-in detected, after its first sample": [
            one.detected for one in findings.interruptions
        ],
        "reply stopped, after detection": [one.stopped for one in findings.interruptions],
    }
    rows = [
        [what, "", *(f"{quantile(times, share):.0f}" for share in (0.5, 0.95))]
        for what, times in spans.items()
    ]
    return f"{note}:\n\n{table(['', '', 'p50 ms', 'p95 ms'], rows)}"


def turns_targets(findings: TurnsFindings) -> list[Target]:
    """Return the targets; a turn without audible reply counts as infinite."""
    times = [turn.stages.get("audible", float("inf")) for turn in findings.turns]
    if not times:
        return []
    stops = [one.stopped for one in findings.interruptions]
    barge_in = (
        [Target("reply stops after detection, p95", quantile(stops, 0.95), 150, "ms")]
        if stops
        else []
    )
    return [
        Target("voice to voice, p50", quantile(times, 0.5), 700, "ms"),
        Target("voice to voice, p95", quantile(times, 0.95), 1200, "ms"),
        *barge_in,
    ]
