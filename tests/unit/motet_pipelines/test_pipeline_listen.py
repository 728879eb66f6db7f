"""Sound by its place in time: nothing is lost, torn or mixed up, and what is over is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_pipelines.voice.audio_buffer import LONGEST_PADDING, AudioBuffer
from motet_pipelines.voice.speech_detection import ReportedEdges, listen
from motet_shared.errors import Unavailable
from motet_shared.messages import FEED_SIZE, Detect, ModelCard, SpeechEdge
from motet_shared.process.actor import Actor, operation
from motet_shared.testing import die, memory_bus, memory_buses, settle
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from support.media.coded_speech import CodedVad

RATE = 8000
MS = RATE * 2 // 1000  # bytes


class Loud(Actor):
    """Speech is what is not zero, by the millisecond; keeps what it heard."""

    role = "vad"

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.heard = b""

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="silero-vad", context=0)]

    @operation(Detect)
    async def detect(self, call: Call, request: Detect) -> None:
        speaking, rest, at = False, b"", 0
        async for data in call.received():
            self.heard += data
            rest += data
            while len(rest) >= MS:
                loud, rest, at = any(rest[:MS]), rest[MS:], at + 1
                if loud != speaking:
                    speaking = loud
                    await call.send(SpeechEdge("start" if loud else "stop", at - 1, at - 1, at))
        call.finish("stop")


def quiet(ms: int) -> bytes:
    return bytes(ms * MS)


def loud(ms: int, value: int = 1) -> bytes:
    return bytes([value]) * (ms * MS)


@given(
    st.lists(st.binary(max_size=50), max_size=8),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_what_was_heard_is_found_by_its_time(
    pieces: list[bytes], start: int, length: int, forgotten: int
) -> None:
    async def heard() -> AudioBuffer:
        sound = AudioBuffer(RATE, origin=5)
        for piece in pieces:
            await sound.append(piece)
        return sound

    sound, whole = asyncio.run(heard()), b"".join(pieces)
    whole = whole[: len(whole) // 2 * 2]  # half a sample is none yet
    assert sound.now == pytest.approx(5 + len(whole) / MS)
    sound.forget(5 + forgotten)
    kept_from = min(forgotten * MS, len(whole))
    assert len(sound) == len(whole) - kept_from
    end = (start + length) * MS
    assert (
        sound.between(5 + start, 5 + start + length)
        == whole[max(start * MS, kept_from) : max(end, kept_from)]
    )


async def found(
    bus: Bus, sound: AudioBuffer, count: int
) -> AsyncIterator[tuple[SpeechEdge, bytes]]:
    """Edges, and the sound of each turn as it is when its end is told."""
    start = 0
    async with aclosing(listen(bus, Detect(sample_rate=RATE), sound, patience=1.0)) as edges:
        async for edge in edges:
            if edge.kind == "start":
                sound.hold(start := edge.ms)
            await settle()  # the sound goes on meanwhile
            yield edge, sound.between(start, edge.ms)
            if edge.kind == "stop":
                sound.release(edge.ms)
            count -= 1
            if not count:
                return


async def test_turns_keep_their_sound_and_pauses_are_forgotten() -> None:
    async with memory_buses("gateway", "vad") as (bus, other):
        actor = Loud(other)
        await actor.start()
        await settle()
        sound = AudioBuffer(RATE)

        async def speak() -> None:
            for _ in range(3000):
                await sound.append(quiet(100))
            for value in (1, 2):
                await sound.append(loud(700, value) + quiet(300))

        task, turns = asyncio.create_task(speak()), []
        async for edge, pcm in found(bus, sound, 4):
            turns.append((edge.kind, edge.ms, pcm if edge.kind == "stop" else b""))
        await task
        assert turns == [
            ("start", 300_000, b""),
            ("stop", 300_700, loud(700, 1)),
            ("start", 301_000, b""),
            ("stop", 301_700, loud(700, 2)),
        ]
        feed_ms = FEED_SIZE / 2 / RATE * 1000
        assert sound.begin >= 300_000 - 67 * feed_ms - LONGEST_PADDING > 0, (
            "a long pause is not kept"
        )


class Slow:
    """Take the first pieces of a stream, and the rest once `go_on` is set."""

    def __init__(self, pieces: int) -> None:
        self.data, self.pieces, self.go_on = b"", pieces, asyncio.Event()

    async def send(self, part: bytes) -> None:
        if len(self.data) == self.pieces * FEED_SIZE:
            await self.go_on.wait()
        self.data += part

    async def end_input(self) -> None: ...


async def test_what_is_over_is_dropped_on_demand_as_far_as_it_was_sent() -> None:
    pcm = bytes(range(256)) * (5 * FEED_SIZE // 256)
    sound = AudioBuffer(RATE)
    await sound.append(pcm)
    sound.release(sound.now)
    sound.drop_done()
    assert len(sound) == len(pcm), "the listener that comes begins with it"
    stream: Any = Slow(1)
    sending = asyncio.create_task(sound.send_to(stream))
    await settle()
    sound.hold(1000 + FEED_SIZE / MS)
    sound.drop_done()
    assert len(sound) == 4 * FEED_SIZE
    sound.release(sound.now)
    sound.drop_done()
    assert len(sound) == 3 * FEED_SIZE, "two pieces were sent, of which one is on its way"
    sound.end()
    stream.go_on.set()
    await sending
    assert stream.data == pcm


async def test_another_instance_hears_the_turn_again() -> None:
    async with memory_buses("gateway", "vad") as (bus, first):
        actors = [Loud(first), Loud(await memory_bus(first.control.hub, "vad"))]  # type: ignore[attr-defined]
        for actor in actors:
            await actor.start()
        await settle()
        sound, told = AudioBuffer(RATE), []
        await sound.append(quiet(2000) + loud(500, 7))
        async for edge, pcm in found(bus, sound, 2):
            told.append((edge.kind, edge.ms, pcm))
            if edge.kind == "start":
                die(next(actor for actor in actors if actor.heard).bus)
                await sound.append(loud(500, 8) + quiet(100))
        assert [(kind, ms) for kind, ms, _ in told] == [("start", 2000), ("stop", 3000)]
        assert told[1][2] == loud(500, 7) + loud(500, 8)


async def test_another_instance_hears_turns_again_that_were_told() -> None:
    """Turns that are over and pauses that were told stay told; what the next instance finds new is."""
    async with memory_buses("gateway", "vad") as (bus, first):
        hub = first.control.hub  # type: ignore[attr-defined]
        actors = [CodedVad(first), CodedVad(await memory_bus(hub, "vad"))]
        for actor in actors:
            await actor.start()
        await settle()
        sound, told = AudioBuffer(RATE), []
        request = Detect(
            sample_rate=RATE, prefix_padding_ms=0, silence_duration_ms=640, pause_ms=192
        )
        await sound.append(quiet(320) + loud(320) + quiet(960) + loud(320) + quiet(256))
        async with aclosing(listen(bus, request, sound, patience=1.0)) as edges:
            async for edge in edges:
                if edge.kind != "heard":
                    told.append((edge.kind, edge.speech_ms))
                if (edge.kind, edge.speech_ms) == ("pause", 1920):
                    die(next(actor for actor in actors if actor.bus.calls.active).bus)
                    await sound.append(loud(320) + quiet(960))
                if len(told) == 8:
                    break
        assert told == [
            *[("start", 320), ("pause", 640), ("stop", 640)],
            *[("start", 1600), ("pause", 1920), ("resume", 2176), ("pause", 2496), ("stop", 2496)],
        ]


class Recited(Actor):
    """Tells these edges whatever it hears, and waits."""

    role = "vad"

    def __init__(self, bus: Bus, *edges: SpeechEdge):
        super().__init__(None, bus)
        self.edges = edges

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="silero-vad", context=0)]

    @operation(Detect)
    async def detect(self, call: Call, request: Detect) -> None:
        for edge in self.edges:
            await call.send(edge)
        await asyncio.Event().wait()


async def test_an_end_that_another_instance_finds_a_frame_sooner_is_told() -> None:
    """Nothing comes after it: nobody speaks any more."""
    async with memory_buses("gateway", "vad") as (bus, first):
        start = SpeechEdge("start", 200, 500, 532)
        actor = Recited(first, start, SpeechEdge("heard", 3040, 2600, 3040))
        await actor.start()
        await settle()
        sound, told = AudioBuffer(RATE), []
        await sound.append(quiet(3100))
        async with (
            asyncio.timeout(20),
            aclosing(listen(bus, Detect(sample_rate=RATE), sound)) as edges,
        ):
            async for edge in edges:
                told.append((edge.kind, edge.ms))
                if edge.kind == "heard":
                    die(first)
                    hub = first.control.hub  # type: ignore[attr-defined]
                    other = Recited(
                        await memory_bus(hub, "vad"), start, SpeechEdge("stop", 3010, 2510, 3010)
                    )
                    await other.start()
                if edge.kind == "stop":
                    break
        assert told == [("start", 200), ("heard", 3040), ("stop", 3010)]


def test_the_rest_of_speech_that_is_over_begins_no_other() -> None:
    """An instance that takes over within a pause hears the end of what was said before it."""

    def told(*heard: SpeechEdge) -> list[tuple[str, int]]:
        edges = ReportedEdges()
        for edge in (SpeechEdge("start", 700, 1000, 1100), SpeechEdge("stop", 5000, 4500, 5000)):
            assert edges.take(edge, 0.0) is not None
        edges.restart()
        found = [edges.take(edge, 4000.0) for edge in heard]
        return [(edge.kind, edge.speech_ms) for edge in found if edge is not None]

    begins = SpeechEdge("start", 0, 100, 200)
    later = SpeechEdge("heard", 0, 900, 980)
    assert told(begins, later) == []  # no more sound comes
    assert told(begins, later, SpeechEdge("stop", 1120, 620, 1120)) == []
    over = SpeechEdge("stop", 1000, 500, 1000)
    assert told(begins, over, SpeechEdge("start", 1000, 1300, 1400)) == [("start", 5300)]
    # The end that was reported was none: the speech goes on.
    goes_on = SpeechEdge("heard", 0, 1580, 1600)
    assert told(begins, later, goes_on) == [("start", 5580)]


async def test_patience_ends() -> None:
    async with memory_buses("gateway") as (bus,):
        with pytest.raises(Unavailable):
            async with aclosing(
                listen(bus, Detect(sample_rate=RATE), AudioBuffer(RATE), patience=0.1)
            ) as edges:
                await anext(edges)
