"""`converse` as a library: real voice activity on a real nats-server, no gateway in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from motet_pipelines.voice.conversation.converse import converse
from motet_pipelines.voice.conversation.events import (
    AudioCommitted,
    Event,
    Failed,
    ReplyEnded,
    SpeechDelta,
    SpeechStarted,
    SpeechStopped,
    TranscriptCompleted,
)
from motet_pipelines.voice.conversation.inputs import AppendAudio, CancelReply, Input
from motet_pipelines.voice.conversation.settings import (
    ConversationSettings,
    ReplySettings,
    TranscriptionSettings,
    TurnSettings,
)
from motet_shared.blobs.store import BlobStore
from support.media.spoken import say, silence
from support.services.fake_services import MODEL
from support.stages.voice_stage import stage

SETTINGS = ConversationSettings(
    transcription=TranscriptionSettings(),
    turns=TurnSettings(),
    reply=ReplySettings(model=MODEL),
)
PIECE = 9600  # bytes


async def recording(pcm: bytes) -> AsyncIterator[Input]:
    yield CancelReply(tag="early")
    for start in range(0, len(pcm), PIECE):
        yield AppendAudio(pcm[start : start + PIECE])


async def test_a_recording_is_transcribed_and_answered_to_its_end() -> None:
    """The recording ends within the turn: its end is the end of the turn, and of all events."""
    async with stage("asr", "tts", "vad") as made, asyncio.timeout(120):
        service = made.gateway.service
        assert made.asr is not None
        assert service is not None
        made.asr.script = ["hello you"]
        bus = service.bus
        store = BlobStore(bus.instance, 16 << 20)
        await store.start()

        async def stored() -> BlobStore:
            return store

        events: list[Event] = []
        pcm = silence(500) + say("Hello you.") + silence(200)
        try:
            async with aclosing(converse(bus, stored, recording(pcm), SETTINGS)) as batches:
                async for batch in batches:
                    events += batch
        finally:
            await store.close()
    (refused,) = [event for event in events if isinstance(event, Failed)]
    assert refused.tag == "early"
    order = [
        type(event)
        for event in events
        if isinstance(event, SpeechStarted | SpeechStopped | AudioCommitted | ReplyEnded)
    ]
    assert order == [SpeechStarted, SpeechStopped, AudioCommitted, ReplyEnded]
    (transcript,) = [event for event in events if isinstance(event, TranscriptCompleted)]
    assert transcript.text == "hello you"
    (ended,) = [event for event in events if isinstance(event, ReplyEnded)]
    assert (ended.status, ended.error) == ("completed", None)
    spoken = [event for event in events if isinstance(event, SpeechDelta)]
    assert any(event.pcm for event in spoken)
    (item,) = ended.items
    assert "".join(event.words for event in spoken) == item["content"][0]["transcript"] != ""
