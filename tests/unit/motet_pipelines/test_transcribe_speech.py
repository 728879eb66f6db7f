"""Files whose speech a voice activity service has found: cut there, and not heard where nobody speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet_asr.config import AsrConfig
from motet_asr.service import Asr
from motet_pipelines.voice.transcribe import NO_AUDIO, TranscriptionOutcome, transcribe
from motet_shared.errors import BadRequest
from motet_shared.messages import FindSpeech, Segment, Transcribe
from motet_shared.testing import die, memory_bus, running, settle
from support.checkpoints.asr_checkpoints import RATE, noise, tiny_whisper, wav
from support.media.spoken import say
from support.running.refusals import refuses
from support.services.file_world import FileWorld, file_world

MODEL = "ears"


class World(FileWorld):
    asr: Asr

    @property
    def encoded(self) -> int:
        """Windows that were heard so far."""
        return self.asr.recognizer.thread.engine.counts.encoded

    async def hear(
        self, sound: Any, hearing: TranscriptionOutcome | None = None, **fields: Any
    ) -> list[Segment]:
        request = Transcribe(model=MODEL, audio=NO_AUDIO, language="en", **fields)
        find = None if fields else FindSpeech(audio=NO_AUDIO)
        segments = transcribe(
            self.bus, self.store, wav(sound), request, hearing, speech=find, deadline=60.0
        )
        async with aclosing(segments):
            return [segment async for segment in segments]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    async with file_world(World, 16 << 20) as made:
        config = AsrConfig(model=str(folder), name=MODEL, fallback=False, threads=1)
        made.asr = Asr(config, await memory_bus(made.hub, "asr"))
        await made.stack.enter_async_context(running(made.asr))
        await settle()
        yield made


def sentence() -> Any:
    return (
        np.frombuffer(say("Two red circles and a blue square.", RATE), "<i2").astype(np.float32)
        / 32768
    )


def scattered() -> Any:
    """Two sentences in a noise that is as loud as many a voice."""
    hiss = noise(30.0, 3) * 0.1
    for at in (4.0, 20.0):
        spoken = sentence()
        hiss[int(at * RATE) :][: len(spoken)] += spoken
    return hiss.astype(np.float32)


async def test_only_what_is_speech_is_heard(world: World) -> None:
    sound = scattered()
    await world.hear(sound)
    by_level = world.encoded
    await world.start_vad()
    hearing = TranscriptionOutcome()
    segments = await world.hear(sound, hearing)
    assert hearing.duration == pytest.approx(30.0)
    assert 0 < world.encoded - by_level < by_level / 2
    for segment in segments:
        assert 3.0 < segment.seek < 8.0 or 19.0 < segment.seek < 24.0, "no window begins elsewhere"
    await world.hear((noise(20.0) * 0.1).astype(np.float32))
    assert world.encoded - by_level < by_level / 2, "noise alone is not heard"


async def test_the_spans_of_a_request_are_those_that_count(world: World) -> None:
    sound = noise(12.0).astype(np.float32)
    segments = await world.hear(sound, speech=[(5.0, 6.0)])
    assert {segment.window for segment in segments} == {1}
    assert all(4.5 < segment.start <= segment.end < 6.5 for segment in segments)
    assert await world.hear(sound, speech=[]) == []
    with refuses(BadRequest, "speech"):
        await world.hear(sound, speech=[(6.0, 5.0)])


async def test_without_anybody_who_listens_the_level_decides(world: World) -> None:
    due = await world.hear(scattered())
    vad = await world.start_vad()
    die(vad.bus)
    assert [one.text for one in await world.hear(scattered())] == [one.text for one in due]
