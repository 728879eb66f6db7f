"""Files through the voice activity service: the same speech as live, found far faster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from motet_media.audio import wav_header
from motet_media.pool import SIZE
from motet_pipelines.voice.file_speech import find_speech
from motet_pipelines.voice.transcribe import NO_AUDIO
from motet_shared.errors import BadRequest, Unavailable, UnknownModel
from motet_shared.messages import FindSpeech, SpeechSpans
from motet_shared.testing import die
from motet_vad.model import FRAME
from motet_vad.recording import MIN_FRAMES, WARM_UP_FRAMES
from support.media.spoken import mixed, noise, say, silence
from support.running.refusals import refuses
from support.services.file_world import FileWorld, file_world

RATE = 16000
SENTENCES = (
    "Two red circles and a blue square.",
    "Where is the large green star?",
    "Nothing is left of it.",
)


class World(FileWorld):
    async def find(self, data: bytes, patience: float = 5.0, **fields: Any) -> SpeechSpans:
        asked = FindSpeech(audio=NO_AUDIO, **fields)
        return await find_speech(
            self.bus, self.store, data, asked, deadline=60.0, patience=patience
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with file_world(World, 32 << 20) as made:
        yield made


def wav(pcm: bytes) -> bytes:
    return wav_header(RATE, len(pcm)) + pcm


def recording(pauses: list[float]) -> tuple[bytes, list[tuple[float, float]]]:
    """Sentences with these pauses (ms) before each, and where each begins and ends (s)."""
    pcm, turns = b"", []
    for number, pause in enumerate(pauses):
        pcm += silence(pause, RATE)
        begin = len(pcm) / 2 / RATE
        pcm += say(SENTENCES[number % 3], RATE)
        turns.append((begin, len(pcm) / 2 / RATE))
    return pcm + silence(600, RATE), turns


def assert_found(spoken: SpeechSpans, turns: list[tuple[float, float]]) -> None:
    """All speech is in some span, but for its soft edges; the pauses between turns are in none."""
    for begin, end in turns:
        inside = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spoken.spans)
        assert inside > 0.8 * (end - begin), (begin, end, spoken.spans)
    for (_, before), (after, _) in pairwise(turns):
        middle = (before + after) / 2
        assert not any(a <= middle <= b for a, b in spoken.spans)


async def test_the_speech_of_a_file_is_found(world: World) -> None:
    await world.start_vad()
    pcm, turns = recording([900, 1100, 800])
    found = await world.find(wav(pcm))
    assert_found(found, turns)
    assert found.duration == pytest.approx(len(pcm) / 2 / RATE, abs=0.04)
    noisy = await world.find(wav(mixed(pcm, noise(len(pcm) / 32, RATE, level=0.01))))
    assert_found(noisy, turns)


async def test_a_long_file_is_heard_in_parts_side_by_side(world: World) -> None:
    """Two minutes: what is found does not depend on where it was cut, and takes few passes."""
    vad = await world.start_vad()
    pcm, turns = recording([700.0] * 50)
    before = vad.batcher.counters.passes
    found = await world.find(wav(pcm))
    frames, passes = len(pcm) / 2 / 512, vad.batcher.counters.passes - before
    assert frames > 16 * MIN_FRAMES
    assert passes < frames / 16 + WARM_UP_FRAMES + 5
    assert_found(found, turns)
    alone = [
        await world.find(wav(pcm[at : at + 2 * RATE * 10]))
        for at in range(0, 2 * RATE * 40, 2 * RATE * 10)
    ]
    moments = [
        (number * 10 + a, number * 10 + b) for number, one in enumerate(alone) for a, b in one.spans
    ]
    apart = sum(b - a for a, b in moments)
    together = sum(min(b, 40.0) - a for a, b in found.spans if a < 40)
    assert together == pytest.approx(apart, rel=0.05)


@pytest.mark.parametrize(
    "pcm", [silence(9000, RATE), noise(9000, RATE, level=0.02), silence(10, RATE)]
)
async def test_where_nobody_speaks_nothing_is_found(world: World, pcm: bytes) -> None:
    await world.start_vad()
    assert (await world.find(wav(pcm))).spans == []


async def test_padding_and_pauses_are_the_caller_s(world: World) -> None:
    await world.start_vad()
    pcm, _ = recording([900, 300, 1500])
    wide = await world.find(wav(pcm), silence_duration_ms=600, prefix_padding_ms=300)
    assert len(wide.spans) == 2, "a pause of 300 ms does not end speech"
    plain = await world.find(wav(pcm), silence_duration_ms=600)
    assert [round(b - a, 3) for (a, _), (b, _) in zip(wide.spans, plain.spans, strict=True)] == [
        0.3,
        0.3,
    ]


async def test_more_files_than_threads_that_decode_are_heard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_vad.recording.STRETCH_SAMPLES", 2 * FRAME)  # three blocks a file
    await world.start_vad(max_files=6 * SIZE)
    data = wav(silence(3000, RATE))
    async with asyncio.timeout(30):
        found = await asyncio.gather(*(world.find(data) for _ in range(6 * SIZE)))
    assert [one.spans for one in found] == [[]] * (6 * SIZE)


async def test_what_is_wrong_is_named(world: World) -> None:
    await world.start_vad(max_audio=5.0)
    with refuses(BadRequest, "file"):
        await world.find(b"")
    with refuses(BadRequest, "file"):
        await world.find(wav(silence(9000, RATE)))
    with refuses(BadRequest, "threshold"):
        await world.find(wav(silence(900, RATE)), threshold=3.0)
    with refuses(UnknownModel, "model"):
        await world.find(wav(silence(900, RATE)), model="whisper")


async def test_nobody_there_is_told_after_the_patience(world: World) -> None:
    with pytest.raises(Unavailable, match="vad"):
        await world.find(wav(silence(100, RATE)), patience=0.1)


async def test_another_instance_finds_it_when_one_dies(world: World) -> None:
    pcm, turns = recording([900.0] * 12)
    victim = await world.start_vad()
    asking = asyncio.create_task(world.find(wav(pcm)))
    async with asyncio.timeout(10):
        while not victim.batcher.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
    die(victim.bus)
    await world.start_vad()
    assert_found(await asking, turns)
