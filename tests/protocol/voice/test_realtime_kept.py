"""A gateway dies in the middle of spoken turns: real voice activity, words heard live, speech that is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from motet_gateway.http.app import App
from motet_shared.messages import Chat, Complete, Text
from motet_shared.testing import running
from support.clients.realtime_client import TRANSCRIPTION, Client, one, sound
from support.media.spoken import say, silence
from support.services.fake_services import MODEL, words
from support.services.resuming_services import ResumingTts
from support.services.two_lives import Connection, kept_socket
from support.services.voice_services import LiveAsr
from support.stages.voice_stage import Stage, stage

pytestmark = pytest.mark.long

HELLO = say("Two red circles and a blue square.")
HEARD = "two red circles and a blue square"
LONG = "Once upon a time there was a story. " * 30
SHORT = "They are here."


def reply(request: Chat | Complete) -> list[Text]:
    assert isinstance(request, Chat)
    return words(LONG if len(request.messages) == 1 else SHORT)


class Struck(Client):
    """A client whose gateway dies each time when the next of `strikes`, types of events, has come."""

    connection: Connection
    strikes: list[str]

    async def next(self) -> dict[str, Any]:
        event = await super().next()
        if self.strikes and event["type"] == self.strikes[0]:
            self.strikes.pop(0)
            await self.connection.die_and_live()
        return event

    async def speak(self, pcm: bytes) -> None:
        """Five times as fast as people do."""
        for start in range(0, len(pcm), 4800):
            await self.audio(pcm[start : start + 4800])
            await asyncio.sleep(0.02)


@pytest.fixture
async def made() -> AsyncIterator[Stage]:
    """No session is kept here for a client that comes back: a gateway that dies keeps none."""
    async with stage("vad", session_keep=0.0) as made, AsyncExitStack() as stack:
        asr, tts = LiveAsr(await made.nats.bus("asr")), ResumingTts(await made.nats.bus("tts"))
        for actor in (asr, tts):
            await stack.enter_async_context(running(actor))
        await made.gateway.bus.directory.wait_for(lambda d: d.ready("asr") and d.ready("tts"), 20)
        asr.script = [HEARD]
        yield made


@asynccontextmanager
async def talk(made: Stage, *strikes: str) -> AsyncIterator[Struck]:
    assert made.gateway.service is not None
    app = App(made.gateway.service)
    async with kept_socket(app, f"/v1/realtime?model={MODEL}") as (connection, socket):
        client = Struck(socket)
        client.connection, client.strikes = connection, list(strikes)
        await client.until("session.created")
        turns = {"type": "server_vad", "silence_duration_ms": 400}
        audio = {"input": {"turn_detection": turns, "transcription": {}}}
        await client.update(audio=audio)
        yield client
        assert not client.strikes, "a strike did not come"


async def conversation(made: Stage, *strikes: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """Two turns, of which the second interrupts the answer to the first; what was told of them, and all events."""
    made.tokenizer.reply = reply
    async with talk(made, *strikes) as client:
        await client.speak(silence(400) + HELLO + silence(800))
        for _ in range(3):
            await client.until("response.output_audio.delta")
        await client.speak(HELLO + silence(800))
        done: list[dict[str, Any]] = []
        while len(done) < 2:
            done.append((await client.until("response.done"))[-1]["response"])
        heard = f"{TRANSCRIPTION}.completed"
        while sum(event["type"] == heard for event in client.events) < 2:
            await client.until(heard)
        for response in done:
            (item,) = response["output"]
            await client.send("conversation.item.retrieve", item_id=item["id"])
            retrieved = (await client.until("conversation.item.retrieved"))[-1]["item"]
            assert retrieved["content"] == item["content"], "the conversation has what was told"
    events = client.events
    numbers = [int(event["event_id"].rpartition("_")[2]) for event in events]
    assert numbers == list(range(1, len(events) + 1)), "each event once, in one row"
    return done, events


def told(events: list[dict[str, Any]], kind: str, **names: str) -> str:
    return "".join(
        event["delta"]
        for event in events
        if event["type"] == kind and all(event[name] == value for name, value in names.items())
    )


def response_of(event: dict[str, Any]) -> str | None:
    found: str | None = event.get("response_id") or event.get("response", {}).get("id")
    return found


def check(done: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    """Both turns were heard; the first answer was interrupted, the second one is whole."""
    items = [e["item_id"] for e in events if e["type"] == "input_audio_buffer.committed"]
    assert len(items) == 2
    for item_id in items:
        own = [event for event in events if event.get("item_id") == item_id]
        assert told(own, f"{TRANSCRIPTION}.delta").strip() == HEARD
        assert one(own, f"{TRANSCRIPTION}.completed")["transcript"] == HEARD
        one(own, "input_audio_buffer.speech_started")
        one(own, "input_audio_buffer.speech_stopped")
    first, second = done
    assert first["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert second["status"] == "completed"
    for response in done:
        own = [event for event in events if response_of(event) == response["id"]]
        transcript = response["output"][0]["content"][0]["transcript"]
        assert told(own, "response.output_audio_transcript.delta") == transcript
        assert one(own, "response.done") == own[-1], "nothing follows the end"
    assert LONG.startswith(first["output"][0]["content"][0]["transcript"])
    own = [event for event in events if event.get("response_id") == second["id"]]
    pcm = b"".join((word.encode() * 200)[:200] for word in SHORT.split())
    assert sound(own) == pcm


@pytest.mark.parametrize(
    "strikes",
    [
        (),
        ("input_audio_buffer.speech_started",),
        (f"{TRANSCRIPTION}.delta", "input_audio_buffer.committed"),
        ("response.output_audio.delta", "response.output_audio.delta"),
        ("response.created", "response.done", "input_audio_buffer.committed", "response.done"),
    ],
    ids=["undisturbed", "speech", "words", "answer", "everything"],
)
async def test_a_conversation_goes_on(made: Stage, strikes: tuple[str, ...]) -> None:
    check(*await conversation(made, *strikes))
