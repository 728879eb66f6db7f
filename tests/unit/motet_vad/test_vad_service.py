"""The voice activity service on the in-memory bus, with its real model, on speech, on noise, on nothing."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet_shared.errors import BadRequest, ConfigError, UnknownModel
from motet_shared.messages import Detect, SpeechEdge
from motet_shared.testing import memory_buses, running
from motet_shared.wire.bus import Bus
from motet_vad.batcher import Batcher
from motet_vad.config import VadConfig
from motet_vad.model import FRAME, Floats, Silero, StreamState
from motet_vad.service import Vad
from recipes.speech.espeak import Voice
from support.media.spoken import mixed, noise, say, silence
from support.running.refusals import refuses

RATE = 24000
SENTENCES = (
    "Two red circles and a blue square.",
    "Where is the large green star?",
    "Nothing is left of it.",
)


@pytest.fixture
async def world() -> AsyncIterator[tuple[Bus, Vad]]:
    async with (
        memory_buses("gateway", "vad") as (gateway, bus),
        running(Vad(VadConfig(metrics_port=-1), bus)) as actor,
    ):
        yield gateway, actor


async def test_one_that_is_stopped_before_its_model_is_loaded_closes() -> None:
    async with memory_buses("vad") as (bus,):
        await Vad(VadConfig(metrics_port=-1), bus).close()


async def detected(
    bus: Bus, pcm: bytes, *, chunk: int = 960, rate: int = RATE, **fields: Any
) -> list[SpeechEdge]:
    """All edges of a recording, sent in pieces of `chunk` bytes."""
    stream = bus.open("vad", Detect(sample_rate=rate, **fields))

    async def send() -> None:
        for start in range(0, len(pcm), chunk):
            await stream.send(pcm[start : start + chunk])
        await stream.end_input()

    sending = asyncio.create_task(send())
    async with stream:
        found = [body async for body in stream]
    await sending
    assert all(isinstance(body, SpeechEdge) for body in found)
    return found  # type: ignore[return-value]


def conversation(
    pauses: Sequence[float], rate: int = RATE
) -> tuple[bytes, list[tuple[float, float]]]:
    """Sentences with these pauses (ms) before each and after the last, and where each begins and ends (ms)."""
    pcm, turns = b"", []
    for number, pause in enumerate(pauses[:-1]):
        pcm += silence(pause, rate)
        begin = len(pcm) / 2 / rate * 1000
        pcm += say(SENTENCES[number % len(SENTENCES)], rate)
        turns.append((begin, len(pcm) / 2 / rate * 1000))
    return pcm + silence(pauses[-1], rate), turns


def assert_turns(edges: list[SpeechEdge], turns: list[tuple[float, float]]) -> None:
    """Each start and stop near where it is due: a frame or two early, a soft beginning or ending later."""
    assert [e.kind for e in edges] == ["start", "stop"] * len(turns)
    for (begin, end), start, stop in zip(turns, edges[::2], edges[1::2], strict=True):
        assert -100 <= start.speech_ms - begin <= 200, (begin, start)
        assert -250 <= stop.speech_ms - end <= 200, (end, stop)


@pytest.mark.parametrize("rate", [8000, 16000, 24000])
async def test_sentences_between_pauses_are_turns(world: tuple[Bus, Vad], rate: int) -> None:
    gateway, vad = world
    pcm, turns = conversation([900, 1100, 800, 1000], rate)
    edges = await detected(gateway, pcm, rate=rate, silence_duration_ms=500, prefix_padding_ms=300)
    assert_turns(edges, turns)
    before = 0
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        assert start.ms == max(before, start.speech_ms - 300)
        before = stop.ms
        assert stop.ms == stop.speech_ms + 500
        assert 0 <= stop.heard_ms - stop.ms < 64
    vad.check_integrity()


@pytest.mark.parametrize(
    "pcm",
    [
        b"",
        b"\x01",
        silence(3000),
        noise(3000, level=0.0005),
        noise(3000, level=0.02),
        noise(3000, level=0.3),
        np.tile(np.array([32767, -32768], "<i2"), 24000).tobytes(),
        (9000 * np.sin(2 * np.pi * 440 * np.arange(48000) / RATE)).astype("<i2").tobytes(),
    ],
    ids=[
        "empty",
        "half a sample",
        "silence",
        "hiss",
        "noise",
        "loud noise",
        "clipped buzz",
        "tone",
    ],
)
async def test_what_is_no_speech_has_no_edges(world: tuple[Bus, Vad], pcm: bytes) -> None:
    gateway, _ = world
    assert await detected(gateway, pcm) == []


async def test_speech_in_noise_is_heard(world: tuple[Bus, Vad]) -> None:
    gateway, _ = world
    pcm, turns = conversation([900, 1200, 1200])
    assert_turns(await detected(gateway, mixed(pcm, noise(len(pcm) / 48, level=0.01))), turns)


async def test_the_start_is_told_while_somebody_speaks(world: tuple[Bus, Vad]) -> None:
    gateway, _ = world
    speech = say(SENTENCES[0])
    async with gateway.open("vad", Detect(sample_rate=RATE)) as stream, asyncio.timeout(30):
        await stream.send(silence(500) + speech[:24000])
        (start,) = await anext(stream.batches())
        assert isinstance(start, SpeechEdge)
        assert start.kind == "start"
        assert start.heard_ms <= 500 + 250


async def test_however_the_audio_is_cut_the_edges_are_the_same(world: tuple[Bus, Vad]) -> None:
    gateway, _ = world
    pcm, _ = conversation([300, 900, 700])
    whole = await detected(gateway, pcm, chunk=len(pcm))
    assert len(whole) == 4
    assert await detected(gateway, pcm, chunk=333) == whole
    assert await detected(gateway, pcm, chunk=30_001) == whole


async def test_many_sessions_share_passes_and_hear_only_themselves(world: tuple[Bus, Vad]) -> None:
    gateway, vad = world
    voices = [
        Voice(name=name, pitch=pitch)
        for name in ("en-us", "en-gb-scotland+f3")
        for pitch in (40, 60)
    ]
    spoken = [
        silence(200 * n) + say(SENTENCES[n % 3], RATE, voices[n % 4]) + silence(900)
        for n in range(7)
    ]
    recordings = [*spoken, silence(2500)]
    alone = [await detected(gateway, pcm) for pcm in recordings]
    assert [len(edges) for edges in alone] == [2] * 7 + [0]
    before = vad.batcher.counters.passes, vad.batcher.counters.frames
    together = await asyncio.gather(*(detected(gateway, pcm) for pcm in recordings))
    assert list(together) == alone
    passes, frames = (
        vad.batcher.counters.passes - before[0],
        vad.batcher.counters.frames - before[1],
    )
    assert frames > 2 * passes, "sessions that listen at the same time share the forward passes"
    vad.check_integrity()


async def test_a_session_that_leaves_frees_its_place(world: tuple[Bus, Vad]) -> None:
    gateway, vad = world
    async with gateway.open("vad", Detect()) as stream:
        for _ in range(20):
            await stream.send(say(SENTENCES[0])[:30_000])
    async with asyncio.timeout(20):
        while vad.bus.calls.active:  # noqa: ASYNC110  # the cancel is on its way
            await asyncio.sleep(0.01)
    pcm, turns = conversation([500, 900])
    assert_turns(await detected(gateway, pcm), turns)
    vad.check_integrity()


async def test_wrong_requests_are_refused_by_name(world: tuple[Bus, Vad]) -> None:
    gateway, _ = world
    with refuses(BadRequest, "sample_rate"):
        await detected(gateway, b"", rate=44101)
    with refuses(BadRequest, "threshold"):
        await detected(gateway, b"", threshold=7)
    with refuses(UnknownModel, "model"):
        await detected(gateway, b"", model="whisper")


async def test_a_pass_that_fails_ends_the_process(
    world: tuple[Bus, Vad], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, vad = world
    monkeypatch.setattr(Silero, "step", lambda *_: 1 / 0)
    stream = gateway.open("vad", Detect())
    await stream.send(silence(100))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(vad.wait_crashed(), 20)
    await stream.aclose()


async def test_a_stream_in_company_gets_the_probabilities_that_it_gets_alone() -> None:
    model = Silero()
    speech = np.frombuffer(say(SENTENCES[0], 16000), "<i2") / np.float32(32768)
    frames: list[Floats] = list(speech[: len(speech) // FRAME * FRAME].reshape(-1, FRAME))
    memory = StreamState()
    alone = [model.step([frame], [memory])[0] for frame in frames]
    assert max(alone) > 0.9
    batcher = Batcher(model, max_batch=3)
    task = asyncio.create_task(batcher.run())
    backwards: list[Floats] = [frame[::-1].copy() for frame in frames]
    work = [
        batcher.probabilities(StreamState(), f) for f in (frames, backwards, frames, frames[:5], [])
    ]
    found = await asyncio.gather(*work)
    for got, due in zip((found[0], *found[2:]), (alone, alone, alone[:5], []), strict=True):
        assert np.allclose(got, due, atol=1e-4)
    assert batcher.counters.largest_pass == 3
    assert batcher.waiting == 0
    task.cancel()
    batcher.close()


def test_a_wrong_model_file_is_named(tmp_path: Path) -> None:
    with refuses(ConfigError, "model"):
        VadConfig(model=str(tmp_path / "gone.onnx"))
    (tmp_path / "text.onnx").write_text("no network")
    with refuses(ConfigError, "model"):
        Silero(str(tmp_path / "text.onnx"))
