"""Turns: silence or the words end them, and what says nothing during a reply is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from motet_pipelines.voice.audio_buffer import AudioBuffer
from motet_pipelines.voice.backchannels import words_that_count
from motet_pipelines.voice.captions import Captions
from motet_pipelines.voice.end_of_turn import LONGEST_MS, SHORTEST_MS, UNSURE, end_pause_ms
from motet_pipelines.voice.turns import Started, TurnPolicy, turns
from motet_shared.messages import Listen
from motet_shared.testing import MemoryHub, die, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from support.media.coded_speech import (
    ASR_MODEL,
    FRAME_MS,
    RATE,
    CodedAsr,
    CodedVad,
    cough,
    quiet,
    say,
)

END = quiet(1200)


@dataclass
class World:
    """Somebody who speaks, those who listen, and what is told: ("start", ms, "") and ("end", ms, text)."""

    bus: Bus
    hub: MemoryHub
    stack: AsyncExitStack
    live: bool = True
    vad: list[CodedVad] = field(default_factory=list)
    asr: list[CodedAsr] = field(default_factory=list)
    sound: AudioBuffer = field(default_factory=lambda: AudioBuffer(RATE))
    replying: bool = False
    told: list[tuple[str, float, str]] = field(default_factory=list)

    async def start(self, role: str) -> CodedVad | CodedAsr:
        bus = await memory_bus(self.hub, role)
        actor = CodedVad(bus) if role == "vad" else CodedAsr(bus)
        await self.stack.enter_async_context(running(actor))
        await settle()
        (self.vad if isinstance(actor, CodedVad) else self.asr).append(actor)  # type: ignore[arg-type]
        return actor

    def caption(self, start: float) -> Captions | None:
        request = Listen(model=ASR_MODEL, sample_rate=RATE)
        return Captions(self.bus, request, self.sound, start, patience=0.2) if self.live else None

    async def listen(self, policy: TurnPolicy) -> None:
        events = turns(
            self.bus, self.sound, policy, self.caption, lambda ms: self.replying, patience=2.0
        )
        async with aclosing(events) as told:
            async for event in told:
                if isinstance(event, Started):
                    self.told.append(("start", event.turn.start, ""))
                else:
                    captions = event.turn.release()
                    self.told.append(
                        ("end", event.ms, "" if captions is None else await captions.settled())
                    )

    async def say(self, *parts: bytes) -> None:
        """A tenth of a second at a time, each heard before the next."""
        pcm = b"".join(parts)
        for at in range(0, len(pcm), 4800):
            await self.sound.append(pcm[at : at + 4800])
            await settle(80)
            await asyncio.sleep(0)

    async def until(self, count: int) -> list[tuple[str, float, str]]:
        async with asyncio.timeout(20):
            while len(self.told) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await settle(80)
        return self.told


@asynccontextmanager
async def world(policy: TurnPolicy, *, live: bool = True) -> AsyncIterator[World]:
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        bus = await memory_bus(hub, "gateway")
        stack.push_async_callback(bus.close)
        made = World(bus, hub, stack, live)
        for role in ("vad", "asr"):
            await made.start(role)
        task = asyncio.create_task(made.listen(policy))
        try:
            yield made
        finally:
            made.sound.end()
            await asyncio.wait_for(task, 20)


SERVER = TurnPolicy(silence=500, padding=0)


async def test_silence_ends_a_turn_and_a_shorter_one_is_part_of_it() -> None:
    async with world(SERVER) as made:
        await made.say(
            quiet(320), say("show me"), quiet(320), say("the circle"), END, say("now"), END
        )
        assert await made.until(4) == [
            ("start", 320, ""),
            ("end", 320 + 400 + 320 + 400 + 500, "show me the circle"),
            ("start", 2624, ""),
            ("end", 2848 + 500, "now"),
        ]


async def test_words_are_there_before_the_silence_is_over() -> None:
    async with world(SERVER) as made:
        await made.say(say("show me"), quiet(300))
        assert not [kind for kind, _, _ in made.told if kind == "end"]
        assert made.asr[0].heard
        assert not made.asr[0].bus.calls.active, "its last word is said, in the pause"
        await made.say(END)
        assert (await made.until(2))[1][2] == "show me"


@pytest.mark.parametrize("eagerness", ["low", "medium", "high", "auto"])
async def test_the_words_decide_when_a_turn_ends(eagerness: str) -> None:
    async with world(TurnPolicy(eagerness=eagerness, padding=0)) as made:
        made.vad[0].finished = {"show me the": 0.0, "show me the circle": 1.0}
        long, short = LONGEST_MS[eagerness], SHORTEST_MS[eagerness]
        await made.say(say("show me the"), quiet(long - 640))
        assert [kind for kind, _, _ in made.told] == ["start"]
        await made.say(say("circle"), quiet(short + 320))
        [start, end] = await made.until(2)
        assert (start, end[2]) == (("start", 0, ""), "show me the circle")
        assert 0 <= end[1] - (600 + long - 640 + 200 + short) < FRAME_MS
        await made.say(say("show me the"), quiet(long + 320))
        [_, _, start, end] = await made.until(4)
        assert end[1] - start[1] == pytest.approx(600 + long, abs=64)


async def test_without_a_judge_or_words_silence_alone_decides() -> None:
    patience = end_pause_ms(UNSURE, "auto")
    for live in (True, False):
        async with world(TurnPolicy(eagerness="auto", padding=0), live=live) as made:
            await made.say(say("show me the"), quiet(patience + 320))
            [_, end] = await made.until(2)
            assert end[2] == ("show me the" if live else "")
            assert 0 <= end[1] - (600 + patience) < FRAME_MS


async def test_who_goes_on_after_his_turn_was_over_begins_another() -> None:
    async with world(TurnPolicy(eagerness="high", padding=0)) as made:
        made.vad[0].finished = {"stop": 1.0, "now": 1.0}
        await made.say(say("stop"), quiet(480), say("now"), quiet(480))
        assert [(kind, text) for kind, _, text in await made.until(4)] == [
            ("start", ""), ("end", "stop"), ("start", ""), ("end", "now"),
        ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- during a reply
WATCHING = TurnPolicy(silence=500, padding=0, words=True)


@pytest.mark.parametrize(
    "sound", [cough(400), say("mhm"), say("yeah okay"), say("uh-huh") + quiet(300) + say("right")]
)
async def test_a_cough_or_mhm_is_no_turn(sound: bytes) -> None:
    async with world(WATCHING) as made:
        made.replying = True
        await made.say(sound, END)
        assert made.told == []
        made.replying = False
        await made.say(say("and now"), END)
        assert [(kind, text) for kind, _, text in await made.until(2)] == [
            ("start", ""),
            ("end", "and now"),
        ]
        await settle()
        assert not made.asr[0].bus.calls.active


async def test_words_are_a_turn_at_once() -> None:
    async with world(WATCHING) as made:
        made.replying = True
        await made.say(quiet(320), say("yeah but"))
        assert made.told == [], "one word that may still change"
        await made.say(say("wait"))
        assert made.told == [("start", 320, "")]
        await made.say(END)
        assert (await made.until(2))[1][2] == "yeah but wait"


async def test_a_single_word_is_certain_at_its_pause() -> None:
    async with world(WATCHING) as made:
        made.replying = True
        await made.say(say("stop"))
        assert made.told == []
        await made.say(quiet(260))
        assert made.told == [("start", 0, "")]


async def test_an_answer_at_the_end_of_a_reply_is_a_turn() -> None:
    async with world(WATCHING) as made:
        made.replying = True
        await made.say(say("yes"))
        assert made.told == []
        made.replying = False
        await made.say(END)
        assert [(kind, text) for kind, _, text in await made.until(2)] == [
            ("start", ""),
            ("end", "yes"),
        ]


async def test_without_live_words_the_length_of_speech_decides() -> None:
    async with world(
        TurnPolicy(silence=500, padding=0, words=True, interrupt=600), live=False
    ) as made:
        made.replying = True
        await made.say(cough(500), END)
        assert made.told == []
        await made.say(say("stop it please now"))
        assert [kind for kind, _, _ in made.told] == ["start"]


async def test_who_talks_on_is_not_kept_waiting_by_slow_ears() -> None:
    async with world(WATCHING) as made:
        made.replying = True
        made.asr[0].go_on.clear()
        await made.say(say("a b c d e f"))
        assert made.told == []
        await made.say(say("g h i"))
        assert [kind for kind, _, _ in made.told] == ["start"]
        made.asr[0].go_on.set()


async def test_ears_that_die_leave_it_to_the_length_of_speech() -> None:
    async with world(WATCHING) as made:
        made.replying = True
        await made.say(say("mhm"))
        die(made.asr[0].bus)
        await made.say(cough(600))
        async with asyncio.timeout(20):
            while not made.told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert made.told == [("start", 0, "")]
        made.told.clear()
        made.live = False


# ------------------------------------------------------------------------------------------------------------- deaths
async def test_another_recognizer_and_another_detector_take_over_within_a_turn() -> None:
    async with world(SERVER) as made:
        await made.start("vad")
        await made.start("asr")
        await made.say(say("show me"))
        die(next(actor for actor in made.asr if actor.bus.calls.active).bus)
        await made.say(say("the red"), quiet(256))
        die(next(actor for actor in made.vad if actor.bus.calls.active).bus)
        await made.say(say("circle"), END)
        assert [(kind, text) for kind, _, text in await made.until(2)] == [
            ("start", ""), ("end", "show me the red circle"),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("Mhm.", 0),
        ("Uh-huh, yeah… okay!", 0),
        ("I see. Got it, all right", 0),
        ("[cough] (laughs) ♪", 0),
        ("Mm-hmm", 0),
        ("No", 1),
        ("yeah, stop", 1),
        ("I see a circle", 2),
        ("right of the star", 3),
        ("d’accord", 0),
        ("Warte mal", 2),
    ],
)
def test_what_counts_as_a_word(text: str, count: int) -> None:
    assert words_that_count(text) == count
