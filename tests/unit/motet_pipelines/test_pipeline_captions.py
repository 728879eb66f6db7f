"""Words while they are spoken: what was told stays, whoever hears it again, and nothing is said twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_pipelines.voice.audio_buffer import AudioBuffer
from motet_pipelines.voice.captions import Captions
from motet_pipelines.voice.retranscription import continued
from motet_shared.errors import Unavailable
from motet_shared.messages import Listen
from motet_shared.testing import MemoryHub, die, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from support.media.coded_speech import ASR_MODEL, RATE, CodedAsr, cough, quiet, say

WORDS = "show me the red circle please"
TEXTS = st.lists(st.sampled_from("a b c ab ca".split()), max_size=6)


@dataclass
class World:
    """A speaker, and recognizers that come and go."""

    bus: Bus
    hub: MemoryHub
    stack: AsyncExitStack
    asr: list[CodedAsr] = field(default_factory=list)
    sound: AudioBuffer = field(default_factory=lambda: AudioBuffer(RATE))
    told: list[tuple[str, str]] = field(default_factory=list)

    async def start(self) -> CodedAsr:
        asr = CodedAsr(await memory_bus(self.hub, "asr"))
        await self.stack.enter_async_context(running(asr))
        await settle()
        self.asr.append(asr)
        return asr

    def captions(self, start: float = 0.0, patience: float = 2.0) -> Captions:
        captions = Captions(
            self.bus,
            Listen(model=ASR_MODEL, sample_rate=RATE),
            self.sound,
            start,
            patience=patience,
        )
        captions.on_change(lambda: self.told.append((captions.stable, captions.tail)))
        return captions

    async def say(self, captions: Captions, pcm: bytes, piece: int = 4800) -> None:
        """Some of it at a time, and each time as much is heard as is due."""
        for at in range(0, len(pcm), piece):
            await self.sound.append(pcm[at : at + piece])
            captions.reach(self.sound.now)
            await settle(60)

    @property
    def serving(self) -> CodedAsr:
        return next(asr for asr in self.asr if asr.bus.calls.active)

    def check(self) -> None:
        """What was stable only ever grew."""
        for (before, _), (after, _) in zip(self.told, self.told[1:], strict=False):
            assert after.startswith(before)


@asynccontextmanager
async def world(recognizers: int = 1) -> AsyncIterator[World]:
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        bus = await memory_bus(hub, "gateway")
        stack.push_async_callback(bus.close)
        made = World(bus, hub, stack)
        for _ in range(recognizers):
            await made.start()
        yield made
        made.check()


async def test_words_come_while_they_are_spoken_and_the_last_ones_at_the_pause() -> None:
    async with world() as made:
        captions = made.captions()
        await made.say(captions, say(WORDS))
        assert (captions.stable, captions.tail) == ("show me the red circle", " please")
        captions.pause()
        assert await captions.settled() == WORDS
        captions.finish()
        assert await captions.settled() == WORDS
        assert len({stable for stable, _ in made.told}) > 4
        await settle()
        assert not made.asr[0].bus.calls.active


async def test_a_speaker_who_goes_on_is_heard_again() -> None:
    async with world() as made:
        captions = made.captions()
        await made.say(captions, say("show me the"))
        for more in ("red circle", "please"):
            captions.pause()
            await captions.settled()
            captions.resume()
            await made.say(captions, quiet(300) + say(more))
        captions.finish()
        assert await captions.settled() == WORDS
        assert len(made.asr[0].listens) == 3


async def test_what_sounded_like_an_end_may_be_understood_otherwise() -> None:
    async with world() as made:
        captions = made.captions()
        await made.say(captions, say("show me the."))
        captions.pause()
        assert await captions.settled() == "show me the."
        assert captions.stable == "show me"
        captions.resume()
        made.asr[0].deaf = {"the.": "the"}
        await made.say(captions, say("circle."))
        captions.finish()
        assert await captions.settled() == "show me the circle."


async def test_a_long_turn_is_not_heard_from_its_beginning_again() -> None:
    async with world() as made:
        captions = made.captions()
        words = " ".join(str(number) for number in range(120))
        await made.say(captions, say(words), 48000)
        captions.pause()
        assert await captions.settled() == words
        captions.resume()
        await made.say(captions, say("and more"))
        assert made.asr[0].heard == say("and more")
        captions.finish()
        assert await captions.settled() == f"{words} and more"


async def test_a_pause_that_ends_before_it_was_understood_is_none() -> None:
    async with world() as made:
        captions = made.captions()
        await made.say(captions, say("show me"))
        made.asr[0].go_on.clear()
        captions.pause()
        await settle()
        captions.resume()
        captions.finish()
        waiting = asyncio.create_task(captions.settled())
        await settle()
        made.asr[0].go_on.set()
        assert await asyncio.wait_for(waiting, 10) == "show me"


async def test_no_more_is_heard_than_the_turn_has() -> None:
    async with world() as made:
        captions = made.captions(start=400.0)
        await made.sound.append(say("not you") + say("yes you") + say("nor you"))
        captions.reach(800.0)
        captions.finish()
        made.sound.forget(made.sound.now)
        assert await captions.settled() == "yes you"
        assert made.asr[0].heard == say("yes you")


@pytest.mark.parametrize("after", range(7))
async def test_another_recognizer_goes_on_wherever_one_dies(after: int) -> None:
    async with world(2) as made:
        captions, words = made.captions(), WORDS.split()
        await made.say(captions, say(" ".join(words[:after])) + cough(20))
        die(made.serving.bus)
        await made.say(captions, say(" ".join(words[after:])))
        captions.finish()
        assert await asyncio.wait_for(captions.settled(), 20) == WORDS


async def test_what_was_told_stays_whatever_another_one_hears() -> None:
    async with world() as made:
        captions = made.captions()
        await made.say(captions, say("show me the red"))
        assert captions.stable == "show me the"
        (await made.start()).deaf = {"show": "so", "the": "a", "red": "Red", "circle": "Circle."}
        die(made.asr[0].bus)
        await made.say(captions, say("circle"))
        captions.finish()
        assert await asyncio.wait_for(captions.settled(), 20) == "show me the Red Circle."


async def test_without_a_recognizer_the_end_is_an_error() -> None:
    async with world() as made:
        captions = made.captions(patience=0.1)
        await made.say(captions, say("show me"))
        die(made.asr[0].bus)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(captions.settled(), 20)
        assert captions.failed
        assert captions.stable == "show"


async def test_nobody_listens_any_more_when_it_is_closed() -> None:
    async with world() as made:
        captions = made.captions()
        await made.say(captions, say("show me"))
        await captions.close()
        await settle()
        assert not made.asr[0].bus.calls.active


@given(TEXTS, TEXTS)
def test_the_same_beginning_is_left_out(told: list[str], more: list[str]) -> None:
    before, whole = " ".join(told), " ".join(told + more)
    assert before + continued(before, whole) == whole
    assert continued(whole, before) == ""


@pytest.mark.parametrize(
    ("told", "text", "rest"),
    [
        ("", " Two red", "Two red"),
        ("Two red", " two red circles", " circles"),
        ("show me the", "so me a red circle", " red circle"),
        ("show me the", "me the red circle", " red circle"),
        ("I want", "Well I want that", " that"),
        ("show me the red", "sow", ""),
        ("三つ", "三つの円", "の円"),
    ],
)
def test_another_hearing_goes_on_where_the_first_one_ended(told: str, text: str, rest: str) -> None:
    assert continued(told, text) == rest


@pytest.mark.timeout(20)
@pytest.mark.parametrize("dropped", [0, 3])
def test_a_long_transcription_is_continued_at_its_end(dropped: int) -> None:
    """The second one has other punctuation, and fewer words of the beginning; only the ends are aligned."""
    words = [f"word{n * n % 9973}" for n in range(6000)]
    known = ", ".join(words[:5980])
    told = " ".join(words[dropped:])
    assert continued(known, told) == " " + " ".join(words[5980:])
