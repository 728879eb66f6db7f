"""The speech recognition actor and its pipeline: files and live streams, cancels, refusals, moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from motet_asr.config import AsrConfig
from motet_asr.engine.request import TimedSegment, TranscriptionOptions, WindowResult, Word
from motet_asr.service import Asr
from motet_asr.transcription.live import LiveTranscription
from motet_pipelines.voice.transcribe import NO_AUDIO, TranscriptionOutcome, transcribe
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, UnknownModel, UnsupportedParameter
from motet_shared.messages import Listen, Partial, Segment, Transcribe
from motet_shared.testing import MemoryHub, die, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from support.checkpoints.asr_checkpoints import RATE, noise, tiny_parakeet, tiny_whisper, wav
from support.checkpoints.recognizers import TINY
from support.running.refusals import refuses

MODEL = "ears"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


class World:
    """A caller, its blobs, and recognizers that come and go."""

    def __init__(
        self, hub: MemoryHub, stack: AsyncExitStack, folder: Path, bus: Bus, store: BlobStore
    ):
        self.hub, self.bus, self.store = hub, bus, store
        self.asr: list[Asr] = []
        self._stack, self._folder = stack, folder

    async def start(self, **options: Any) -> Asr:
        settings: dict[str, Any] = {
            "model": str(self._folder),
            "name": MODEL,
            "fallback": False,
            "threads": 1,
        }
        asr = Asr(AsrConfig(**settings | options), await memory_bus(self.hub, "asr"))
        await self._stack.enter_async_context(running(asr))
        await settle()
        self.asr.append(asr)
        return asr

    async def transcribe(
        self, data: bytes, hearing: TranscriptionOutcome | None = None, **fields: Any
    ) -> list[Segment]:
        asked: dict[str, Any] = {"model": MODEL, "audio": NO_AUDIO, "language": "en"}
        request = Transcribe(**asked | fields)
        async with aclosing(transcribe(self.bus, self.store, data, request, hearing)) as segments:
            return [segment async for segment in segments]

    async def idle(self) -> None:
        """Nothing is left behind, in any recognizer that lives."""
        async with asyncio.timeout(10):
            while any(  # noqa: ASYNC110
                asr.bus.calls.active or asr.recognizer.thread.engine.has_work for asr in self.asr
            ):
                await asyncio.sleep(0.01)
        for asr in self.asr:
            asr.check_integrity()
        self.store.check_integrity()
        assert self.store.stats()["blobs"] == 0


@asynccontextmanager
async def world(folder: Path, *options: dict[str, Any]) -> AsyncIterator[World]:
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        bus = await memory_bus(hub, "gateway")
        stack.push_async_callback(bus.close)
        store = await stack.enter_async_context(BlobStore(bus.instance, 16 << 20))
        made = World(hub, stack, folder, bus, store)
        for settings in options:
            await made.start(**settings)
        yield made
        await made.idle()


async def test_a_long_file_comes_in_segments_in_order(folder: Path) -> None:
    sound = wav(noise(9.0))
    async with world(folder, {}) as made:
        hearing = TranscriptionOutcome()
        segments = await made.transcribe(sound, hearing, words=True)
        assert [segment.id for segment in segments] == list(range(len(segments)))
        assert len({segment.window for segment in segments}) > 3
        assert [segment.start for segment in segments] == sorted(
            segment.start for segment in segments
        )
        assert [segment.window for segment in segments] == sorted(
            segment.window for segment in segments
        )
        assert hearing.duration == pytest.approx(9.0)
        assert (hearing.language, hearing.language_name) == ("en", "english")
        assert hearing.end is not None
        assert hearing.end.usage is not None
        assert hearing.end.usage.completion_tokens > 0
        for segment in segments:
            assert "".join(word for word, _, _ in segment.words) == segment.text
            assert 0 <= segment.start <= segment.end <= 9.0
        again = await made.transcribe(sound, words=False)
        assert "".join(one.text for one in again) == "".join(one.text for one in segments)
        assert not any(one.words for one in again)


async def test_the_language_is_found_once_and_told(folder: Path) -> None:
    async with world(folder, {}) as made:
        hearing = TranscriptionOutcome()
        await made.transcribe(wav(noise(5.0, 3)), hearing, language="")
        assert hearing.language in ("en", "de", "fr", "zh")
        named = await made.transcribe(wav(noise(3.0)), language="German")
        assert [one.text for one in named] == [
            one.text for one in await made.transcribe(wav(noise(3.0)), language="de")
        ]
        english = await made.transcribe(wav(noise(3.0)), language="de", task="translate")
        assert [one.text for one in english] != [one.text for one in named]


async def test_silence_has_no_text(folder: Path) -> None:
    async with world(folder, {}) as made:
        hearing = TranscriptionOutcome()
        assert await made.transcribe(wav(np.zeros(5 * RATE)), hearing) == []
        assert hearing.duration == pytest.approx(5.0)
        assert made.asr[0].recognizer.thread.engine.counts.encoded == 0


async def test_what_cannot_be_heard_is_refused_with_the_cause(folder: Path) -> None:
    async with world(folder, {"max_audio": 4.0}) as made:
        for data in (b"", b"no sound" * 99, wav(noise(5.0))):
            with refuses(BadRequest, "file"):
                await made.transcribe(data)
        with refuses(BadRequest, "language"):
            await made.transcribe(wav(noise(1.0)), language="xx")
        with refuses(BadRequest, "prompt"):
            await made.transcribe(wav(noise(1.0)), prompt="<|startoftranscript|>")
        with refuses(UnknownModel, "model"):
            await made.transcribe(wav(noise(1.0)), model="eyes")


async def test_leaving_early_frees_the_slots(folder: Path) -> None:
    async with world(folder, {"parallel": 8}) as made:
        request = Transcribe(model=MODEL, audio=NO_AUDIO, language="en")
        async with aclosing(
            transcribe(made.bus, made.store, wav(noise(60.0)), request)
        ) as segments:
            async for _ in segments:
                break
        engine = made.asr[0].recognizer.thread.engine
        async with asyncio.timeout(20):
            while engine.stats()["running"] or engine.stats()["waiting"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert engine.counts.encoded < 30


async def test_files_share_the_batch(folder: Path) -> None:
    async with world(folder, {"parallel": 2}) as made:
        sounds = [wav(noise(5.0, seed)) for seed in range(4)]
        alone = [await made.transcribe(sound) for sound in sounds]
        together = await asyncio.gather(*(made.transcribe(sound) for sound in sounds))
        assert [[one.text for one in said] for said in together] == [
            [one.text for one in said] for said in alone
        ]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("after", [0, 1, 4])
async def test_another_recognizer_goes_on_where_one_died(folder: Path, after: int) -> None:
    """Nothing is lost or said twice, whichever window was being heard; one cut in speech needs the one before it."""
    sound = wav(noise(14.0, 5))
    async with world(folder, {"parallel": 2}) as made:
        whole = await made.transcribe(sound)
        await made.start(parallel=2)
        hearing, said = TranscriptionOutcome(), []
        request = Transcribe(model=MODEL, audio=NO_AUDIO, language="en")
        async with aclosing(transcribe(made.bus, made.store, sound, request, hearing)) as segments:
            if after == 0:
                asyncio.get_running_loop().call_later(0.01, _kill, made, hearing)
            async for segment in segments:
                said.append(segment)
                if len(said) == after:
                    _kill(made, hearing)
        assert [(one.id, one.window, one.text) for one in said] == [
            (one.id, one.window, one.text) for one in whole
        ]
        assert hearing.moves == 1 or after == 0


def _kill(made: World, hearing: TranscriptionOutcome) -> None:
    [victim] = [asr for asr in made.asr if asr.bus.instance == hearing.instance]
    made.asr.remove(victim)
    die(victim.bus)


async def test_a_ctc_model_serves_too(tmp_path: Path) -> None:
    async with world(tiny_parakeet(tmp_path), {"window": 2.0}) as made:
        hearing = TranscriptionOutcome()
        segments = await made.transcribe(wav(noise(7.0)), hearing, language="", words=True)
        assert hearing.language == ""
        assert segments
        assert all(0 <= word[1] <= word[2] <= 7.0 for segment in segments for word in segment.words)
        with refuses(BadRequest, "task"):
            await made.transcribe(wav(noise(1.0)), task="translate")


# --------------------------------------------------------------------------------------------------------------- live
async def test_what_is_stable_stays_and_the_end_brings_the_rest(folder: Path) -> None:
    async with world(folder, {"partial_every": 0.2}) as made:
        pcm = (noise(7.0, 2) * 32767).astype("<i2").tobytes()
        partials: list[Partial] = []
        finals: list[Any] = []
        async with made.bus.open(
            "asr", Listen(model=MODEL, sample_rate=RATE, language="en")
        ) as stream:
            feeding = asyncio.create_task(_feed(stream, pcm, pause=0.02))
            async for body in stream:
                if isinstance(body, Partial):
                    partials.append(body)
                else:
                    finals.append(body)
            await feeding
        before = ""
        for partial in partials:
            assert partial.stable.startswith(before)
            before = partial.stable
        [final] = finals
        assert isinstance(final, Segment)
        assert final.text.startswith(before)
        assert len(partials) > 3
        assert final.text


async def test_silence_and_nothing_at_all_end_with_an_empty_segment(folder: Path) -> None:
    async with world(folder, {}) as made:
        for pcm in (b"", bytes(2 * RATE)):
            bodies = await _listen(made, pcm)
            assert isinstance(bodies[-1], Segment)
            assert bodies[-1].text == ""


@dataclass
class Listener:
    """A recognizer that hears a word in everything; `lengths`: of what it heard, in seconds."""

    family: Any = field(default_factory=lambda: SimpleNamespace(window=30.0))
    lengths: list[float] = field(default_factory=list)

    async def transcribe(
        self, audio: Any, options: TranscriptionOptions
    ) -> tuple[WindowResult, list[TimedSegment]]:
        self.lengths.append(len(audio) / RATE)
        return WindowResult(), [TimedSegment(" word", 0.1, 0.5, [], [Word(" word", 0.1, 0.5)])]


@pytest.mark.parametrize(
    ("tail", "heard"), [(np.zeros(RATE // 5), [1.0]), (noise(0.2), [1.0, 1.2])]
)
async def test_the_end_is_heard_again_only_if_something_was_said_there(
    tail: Any, heard: list[float]
) -> None:
    listener: Any = Listener()

    async def pcm() -> AsyncIterator[bytes]:
        yield (noise(1.0) * 32767).astype("<i2").tobytes()
        async with asyncio.timeout(10):
            while not listener.lengths:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await settle()
        yield (tail * 32767).astype("<i2").tobytes()

    words = await LiveTranscription(listener, TranscriptionOptions(), RATE, 0.5, 60.0).run(
        pcm(), lambda stable, tail: None
    )
    assert [word.text for word in words] == [" word"]
    assert listener.lengths == heard


async def test_a_live_stream_is_read_as_it_is_transcribed() -> None:
    """What comes at once waits with its sender, but for two windows."""
    listener: Any = Listener(SimpleNamespace(window=1.0))
    ahead: list[float] = []
    sent = 0

    async def pcm() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(200):
            sent += 1
            ahead.append(sent * 0.1 - live._offset)
            yield (noise(0.1) * 32767).astype("<i2").tobytes()

    live = LiveTranscription(listener, TranscriptionOptions(), RATE, 0.5, 60.0)
    async with asyncio.timeout(30):
        words = await live.run(pcm(), lambda stable, tail: None)
    assert words
    assert sent == 200
    assert live.seconds == pytest.approx(20.0)
    assert max(ahead) < 2.5


async def test_a_live_stream_that_is_left_frees_its_slot(folder: Path) -> None:
    async with world(folder, {"partial_every": 0.1, "max_audio": 3.0}) as made:
        pcm = (noise(2.0) * 32767).astype("<i2").tobytes()
        async with made.bus.open("asr", Listen(model=MODEL, sample_rate=RATE)) as stream:
            await stream.send(pcm)
            async for _ in stream:
                break
        await made.idle()
        with refuses(BadRequest, "audio"):
            await _listen(made, pcm * 3)


@pytest.mark.parametrize("kind", ["nemotron_asr_streaming", "nemotron3_5_asr"])
async def test_a_model_that_streams_hears_each_chunk_once(tmp_path: Path, kind: str) -> None:
    async with world(TINY[kind](tmp_path), {}) as made:
        pcm = (noise(3.0, 4) * 32767).astype("<i2").tobytes()
        bodies = await _listen(made, pcm)
        *partials, final = bodies
        assert isinstance(final, Segment)
        assert final.text.strip()
        assert len(partials) > 5
        assert all(isinstance(partial, Partial) for partial in partials)
        before = ""
        for partial in partials:
            assert partial.stable.startswith(before)
            before = partial.stable
            assert final.text.startswith(partial.stable)
        counts = made.asr[0].recognizer.thread.engine.counts
        assert counts.audio_seconds == pytest.approx(3.0, abs=0.2)
        again = await _listen(made, pcm, words=True)
        assert again[-1].text == final.text
        assert "".join(text for text, _, _ in again[-1].words) == final.text
        starts = [start for _, start, _ in again[-1].words]
        assert starts == sorted(starts)


async def test_a_stream_that_is_left_or_too_long_leaves_nothing(tmp_path: Path) -> None:
    async with world(TINY["nemotron_asr_streaming"](tmp_path), {"max_audio": 3.0}) as made:
        pcm = (noise(2.0, 4) * 32767).astype("<i2").tobytes()
        async with made.bus.open("asr", Listen(model=MODEL, sample_rate=RATE)) as stream:
            await stream.send(pcm)
            async for _ in stream:
                break
        await made.idle()
        with refuses(BadRequest, "audio"):
            await _listen(made, pcm * 3)
        assert isinstance((await _listen(made, b""))[-1], Segment)


async def test_word_times_that_nothing_tells_are_refused_by_name(tmp_path: Path) -> None:
    async with world(TINY["moonshine"](tmp_path), {}) as made:
        with refuses(UnsupportedParameter, "timestamp_granularities"):
            await made.transcribe(wav(noise(1.0)), language="", words=True)
        with refuses(UnsupportedParameter, "timestamp_granularities"):
            await _listen(made, b"", words=True)
        assert await made.transcribe(wav(noise(2.0)), language="") != []


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", ["parakeet_tdt", "canary", "hubert", "qwen3_asr"])
async def test_every_way_of_decoding_survives_leaving_and_death(tmp_path: Path, kind: str) -> None:
    """One family for each engine: what is left frees its place, and another instance goes on."""
    async with world(TINY[kind](tmp_path), {"window": 2.0, "parallel": 2}) as made:
        sound, request = wav(noise(12.0, 5)), Transcribe(model=MODEL, audio=NO_AUDIO, language="de")
        whole = await made.transcribe(sound, language="de")
        async with aclosing(transcribe(made.bus, made.store, sound, request)) as segments:
            async for _ in segments:
                break
        await made.idle()
        await made.start(window=2.0, parallel=2)
        hearing, said = TranscriptionOutcome(), []
        async with aclosing(transcribe(made.bus, made.store, sound, request, hearing)) as segments:
            async for segment in segments:
                said.append(segment)
                if len(said) == 1:
                    _kill(made, hearing)
        assert [(one.id, one.window, one.text) for one in said] == [
            (one.id, one.window, one.text) for one in whole
        ]
        assert hearing.moves == 1


async def _listen(made: World, pcm: bytes, **fields: Any) -> list[Any]:
    request = Listen(model=MODEL, sample_rate=RATE, **fields)
    async with made.bus.open("asr", request) as stream:
        await _feed(stream, pcm)
        return [body async for body in stream]


async def _feed(stream: Any, pcm: bytes, pause: float = 0.0) -> None:
    for start in range(0, len(pcm), RATE // 5):
        await stream.send(pcm[start : start + RATE // 5])
        await asyncio.sleep(pause)
    await stream.end_input()
