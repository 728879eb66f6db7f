"""Who says what, over HTTP: the official client, a real gateway, real vad and speakers processes, espeak's dialogues.

Only the recognizer is scripted: it says one word per half second of the speech that it is told of, so that the text
shows where each stretch of it was heard.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_media.audio import SAMPLE_BYTES, wav_header
from motet_shared.messages import Recording, Segment, Transcribe, Usage
from motet_shared.process.actor import operation
from motet_shared.testing import NatsServer, running
from motet_shared.wire.call import Call
from recipes.speech.espeak import Voice
from support.media.spoken import say, silence
from support.running.service_process import Process, service_process
from support.services.voice_services import FakeRecognizer
from support.stages.asr_stage import KEY, MODEL, Service

RATE = 16_000
SPEAKERS = Path(__file__).parents[3] / "models" / "pocket-speakers"
ANN = Voice(name="en-us+f3", pitch=61, rate=165)
BOB = Voice(name="en-us+m5", pitch=31, rate=165)
CAT = Voice(name="en-gb-scotland+Storm", pitch=45, rate=165)
LINES = (
    "There are two red circles and a large blue square on the left.",
    "Where is the small green star that you told me about yesterday?",
    "It is above the yellow triangle, next to the orange circle.",
    "Then please remove the triangle and paint the square black.",
    "Nothing is left of it, so we may begin again tomorrow morning.",
)


class Clockwork(FakeRecognizer):
    """A recognizer whose words are times."""

    name = MODEL

    @operation(Transcribe)
    async def transcribe(self, call: Call, request: Transcribe) -> None:
        rate, pcm = await self.sound(request)
        await call.send(Recording(len(pcm) / SAMPLE_BYTES / rate, "en", "english"))
        assert request.speech is not None, "the gateway asks the vad"
        for number, (start, end) in enumerate(_merged(request.speech)):
            count = max(1, round((end - start) / 0.5))
            times = [start + (end - start) * n / count for n in range(count + 1)]
            words = [(f" w{a:.2f}", a, b) for a, b in pairwise(times)]
            text = "".join(word for word, _, _ in words)
            await call.send(
                Segment(number, number, start, end, text, words=words if request.words else [])
            )
        call.finish("stop", Usage(completion_tokens=7))


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Segments of about ten seconds, whoever speaks in them."""
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and end - found[-1][0] < 10:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


@dataclass
class Dialogue:
    """A recording, and who speaks when."""

    pcm: bytes = b""
    turns: list[tuple[str, float, float]] = field(default_factory=list)

    def say(self, who: str, voice: Voice, text: str) -> None:
        self.pcm += silence(450, RATE)
        start = self.seconds
        self.pcm += say(text, RATE, voice)
        self.turns.append((who, start, self.seconds))

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / RATE

    @property
    def wav(self) -> bytes:
        return wav_header(RATE, len(self.pcm)) + self.pcm

    def share(self, segments: list[Any], names: dict[str, str]) -> float:
        """The share of the speech that was given to whom it belongs."""
        right = sum(
            max(0.0, min(segment.end, end) - max(segment.start, start))
            for segment in segments
            for who, start, end in self.turns
            if names.get(segment.speaker) == who
        )
        return right / sum(end - start for _, start, end in self.turns)


def dialogue(*voices: tuple[str, Voice], rounds: int = 2) -> Dialogue:
    made = Dialogue()
    for number in range(rounds * len(voices)):
        made.say(*voices[number % len(voices)], LINES[number % len(LINES)])
    made.pcm += silence(700, RATE)
    return made


@dataclass
class Stage(Service):
    speakers: list[Process] = field(default_factory=list)


@asynccontextmanager
async def stage(speakers: int = 1) -> AsyncIterator[Stage]:
    async with NatsServer() as nats, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running(Clockwork(None, await nats.bus("asr"))))
        await stack.enter_async_context(service_process(nats, "motet_vad"))
        argv = ("motet_speakers", "--model", str(SPEAKERS))
        telling = [
            await stack.enter_async_context(service_process(nats, *argv)) for _ in range(speakers)
        ]
        bus = await nats.bus("gateway")
        gateway = Gateway(
            GatewayConfig(port=0, api_key=KEY, drain_timeout=5.0, max_upload=8 << 20), bus
        )
        await stack.enter_async_context(running(gateway))
        wanted = {"asr": 1, "vad": 1, "speakers": speakers}
        await bus.directory.wait_for(
            lambda d: all(len(d.ready(role)) == count for role, count in wanted.items()), 60
        )
        yield Stage(gateway, [], telling)


@pytest.fixture(scope="module")
def talk() -> Dialogue:
    return dialogue(("Ann", ANN), ("Bob", BOB))


async def ask(client: openai.AsyncOpenAI, sound: bytes, **options: Any) -> Any:
    file = ("talk.wav", sound)
    return await client.audio.transcriptions.create(
        model=MODEL, file=file, response_format="diarized_json", chunking_strategy="auto", **options
    )


@pytest.mark.long
async def test_the_official_client_is_told_who_says_what(talk: Dialogue) -> None:
    async with stage() as service, service.client() as client:
        whole = await ask(client, talk.wav)
        assert whole.task == "transcribe"
        assert whole.duration == pytest.approx(talk.seconds, abs=0.1)
        assert "".join(segment.text for segment in whole.segments).strip() == whole.text
        assert {segment.speaker for segment in whole.segments} == {"A", "B"}
        assert all(segment.type == "transcript.text.segment" for segment in whole.segments)
        assert talk.share(whole.segments, {"A": "Ann", "B": "Bob"}) > 0.8
        await _streamed(client, talk, whole)
        await _known(client, talk)
        await _three(client)
        await _from_the_terminal(service, talk, whole)
        await _refused(service, talk)


async def _streamed(client: openai.AsyncOpenAI, talk: Dialogue, whole: Any) -> None:
    events = [event async for event in await ask(client, talk.wav, stream=True)]
    segments = [event for event in events if event.type == "transcript.text.segment"]
    deltas = [event for event in events if event.type == "transcript.text.delta"]
    assert [event.segment_id for event in deltas] == [segment.id for segment in segments]
    assert [(one.speaker, one.text, one.start) for one in segments] == [
        (one.speaker, one.text, one.start) for one in whole.segments
    ]
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == "".join(event.delta for event in deltas)


async def _known(client: openai.AsyncOpenAI, talk: Dialogue) -> None:
    """Bob has a name, Ann has not; somebody who never speaks is never named."""
    sounds = [base64.b64encode(_reference(voice)).decode() for voice in (BOB, CAT)]
    told = await ask(
        client,
        talk.wav,
        known_speaker_names=["Bob", "Cat"],
        known_speaker_references=[f"data:audio/wav;base64,{sound}" for sound in sounds],
    )
    assert {segment.speaker for segment in told.segments} == {"A", "Bob"}
    assert talk.share(told.segments, {"A": "Ann", "Bob": "Bob"}) > 0.8


def _reference(voice: Voice) -> bytes:
    pcm = say("I have never said any of this before, and I shall not say it again.", RATE, voice)
    return wav_header(RATE, len(pcm)) + pcm


async def _three(client: openai.AsyncOpenAI) -> None:
    talk = dialogue(("Ann", ANN), ("Bob", BOB), ("Cat", CAT))
    whole = await ask(client, talk.wav)
    assert talk.share(whole.segments, {"A": "Ann", "B": "Bob", "C": "Cat"}) > 0.75


async def _from_the_terminal(service: Stage, talk: Dialogue, whole: Any) -> None:
    """`motet listen --speakers`: a line per turn."""

    def listen(path: Path) -> subprocess.CompletedProcess[str]:
        argv = [
            sys.executable,
            "-m",
            "motet_cli",
            "listen",
            "--url",
            service.url,
            "--speakers",
            str(path),
        ]
        env = {**os.environ, "MOTET_API_KEY": KEY, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            argv, capture_output=True, text=True, env=env, timeout=60, check=False
        )

    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"motet-{os.getpid()}.wav"
    path.write_bytes(talk.wav)
    try:
        heard = await asyncio.to_thread(listen, path)
    finally:
        path.unlink()
    assert heard.returncode == 0, heard.stderr
    lines = heard.stdout.splitlines()
    assert [line[:3] for line in lines[:2]] == ["A: ", "B: "]
    assert " ".join(line[3:] for line in lines) == whole.text


async def _refused(service: Stage, talk: Dialogue) -> None:
    sound = "data:audio/wav;base64," + base64.b64encode(_reference(ANN)[:40_000]).decode()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names"),
        (
            {"known_speaker_names[]": "Ann", "known_speaker_references[]": "a sound"},
            "known_speaker_references",
        ),
        (
            {"known_speaker_names[]": "Ann", "known_speaker_references[]": sound},
            "known_speaker_references",
        ),
        ({"chunking_strategy": '{"type": "server_vad", "threshold": 7}'}, "chunking_strategy"),
        (
            {"chunking_strategy[type]": "server_vad", "chunking_strategy[speed]": "9"},
            "chunking_strategy",
        ),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
    ]
    for fields, param in wrong:
        reply = await service.post(file=talk.wav, response_format="diarized_json", **fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    reply = await service.post("translations", file=talk.wav, response_format="diarized_json")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")
    accepted: dict[str, Any] = {
        "chunking_strategy[type]": "server_vad",
        "chunking_strategy[silence_duration_ms]": "300",
    }
    reply = await service.post(file=talk.wav, **accepted)
    assert reply.status_code == 200, reply.text
    [victim] = service.speakers
    victim.send_signal(signal.SIGTERM)
    await victim.wait()
    await service.gateway.bus.directory.wait_for(lambda d: not d.ready("speakers"), 10)
    reply = await service.post(file=talk.wav, response_format="diarized_json")
    assert reply.status_code == 503
    assert "motet up --speakers" in reply.json()["error"]["message"]


@pytest.mark.long
async def test_a_speakers_service_that_is_killed_costs_no_label() -> None:
    """A file of minutes, so that the kill falls into the middle of it."""
    short = dialogue(("Ann", ANN), ("Bob", BOB))
    talk = Dialogue(short.pcm * 12, [])
    async with stage(2) as service, service.client() as client:
        whole = await ask(client, talk.wav)
        assert {segment.speaker for segment in whole.segments} == {"A", "B"}
        asking = asyncio.create_task(ask(client, talk.wav))
        directory = service.gateway.bus.directory

        def busy() -> list[Any]:
            return [
                beat for beat in directory.ready("speakers") if directory.outstanding(beat.instance)
            ]

        async with asyncio.timeout(30):
            while not busy():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        os.kill(busy()[0].pid, signal.SIGKILL)
        again = await asking
        told, due = (
            [(one.speaker, one.text) for one in all_of.segments] for all_of in (again, whole)
        )
        assert told == due
        assert sum(process.returncode is None for process in service.speakers) == 1
