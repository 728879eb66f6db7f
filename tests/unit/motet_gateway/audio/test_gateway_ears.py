"""Spoken sessions whose words are known while they are spoken: captions, turns by meaning, and what interrupts."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from motet_shared.testing import die, memory_bus, running, settle
from support.clients.gateway_client import Socket, World, session, world
from support.media.coded_speech import CodedAsr, CodedVad, cough, quiet, say
from support.services.fake_services import MODEL, words
from support.services.voice_services import WORD_MS, ScriptedTts

TRANSCRIPTION = "conversation.item.input_audio_transcription"
STORY = " ".join(["Once upon a time there was a red circle."] * 3)
SERVER = {"type": "server_vad", "prefix_padding_ms": 0}
END = quiet(800)


@dataclass
class Talk:
    """A client who speaks, and who listens to him."""

    world: World
    socket: Socket
    vad: CodedVad
    asr: list[CodedAsr]
    tts: ScriptedTts
    stack: AsyncExitStack
    events: list[Any] = field(default_factory=list)

    async def more_ears(self) -> None:
        asr = CodedAsr(await memory_bus(self.world.hub, "asr"))
        await self.stack.enter_async_context(running(asr))
        await settle()
        self.asr.append(asr)

    async def set(self, **audio_input: Any) -> Any:
        self.socket.send("session.update", session={"audio": {"input": audio_input}})
        return (await self.until("session.updated", "error"))[-1]

    async def say(self, *parts: bytes) -> None:
        """A tenth of a second at a time, each heard before the next."""
        pcm = b"".join(parts)
        for at in range(0, len(pcm), 4800):
            audio = base64.b64encode(pcm[at : at + 4800]).decode()
            self.socket.send("input_audio_buffer.append", audio=audio)
            await settle(100)

    async def until(self, *kinds: str) -> list[Any]:
        found = await self.socket.until(*kinds)
        self.events += found
        return found

    async def all(self) -> list[Any]:
        """What has come so far."""
        await settle(200)
        while self.socket.pending():
            self.events.append(await self.socket.receive())
        return self.events

    async def reply(self, text: str = STORY, pace: float = 0.02, pause: bytes = END) -> None:
        """Begin a spoken reply, up to its first words."""
        self.world.tokenizer.reply = lambda request: words(text)
        self.tts.pace = pace
        await self.say(say("tell me"), pause)
        await self.until("response.output_audio_transcript.delta")

    @property
    def asked(self) -> list[tuple[str, str]]:
        """What the model was told last."""
        return [
            (message["role"], message["content"])
            for message in self.world.tokenizer.requests[-1].messages
        ]


@asynccontextmanager
async def talking(
    *, live: bool = True, query: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Talk]:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(world(**{"patience": 0.5} | settings))
        vad = CodedVad(await memory_bus(here.hub, "vad"))
        asr = CodedAsr(await memory_bus(here.hub, "asr"), live=live)
        tts = ScriptedTts(await memory_bus(here.hub, "tts"))
        for actor in (vad, asr, tts):
            await stack.enter_async_context(running(actor))
        await settle()
        async with session(here.app, query=query or {"model": MODEL}) as socket:
            talk = Talk(here, socket, vad, [asr], tts, stack)
            await talk.set(turn_detection=SERVER)
            talk.events.clear()
            yield talk
        await settle(200)
        for one in talk.asr:
            assert not one.bus.calls.active, "nobody listens after the session"
        await here.service.close()


def kinds(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("input_audio_buffer.") for event in events]


def deltas(events: list[Any]) -> list[str]:
    return [event["delta"] for event in events if event["type"] == f"{TRANSCRIPTION}.delta"]


# ----------------------------------------------------------------------------------------------------------- settings
async def test_semantic_vad_is_told_with_its_defaults() -> None:
    async with talking() as talk:
        updated = await talk.set(turn_detection={"type": "semantic_vad", "eagerness": "low"})
        assert updated["session"]["audio"]["input"]["turn_detection"] == {
            "type": "semantic_vad",
            "eagerness": "low",
            "create_response": True,
            "interrupt_response": True,
            "interrupt_on": "words",
            "interrupt_after_ms": 500,
        }
        await talk.set(turn_detection={"type": "semantic_vad"})
        assert talk.events[-1]["session"]["audio"]["input"]["turn_detection"]["eagerness"] == "auto"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threshold", 0.5),
        ("silence_duration_ms", 500),
        ("prefix_padding_ms", 300),
        ("idle_timeout_ms", 6000),
        ("eagerness", "eager"),
        ("interrupt_on", "coughs"),
        ("interrupt_after_ms", -1),
    ],
)
async def test_what_does_not_belong_to_semantic_vad_is_refused_by_name(
    name: str, value: Any
) -> None:
    async with talking() as talk:
        refused = await talk.set(turn_detection={"type": "semantic_vad", name: value})
        assert refused["type"] == "error"
        assert refused["error"]["param"] == f"session.audio.input.turn_detection.{name}"


async def test_semantic_vad_ends_a_turn_by_its_words() -> None:
    async with talking() as talk:
        await talk.set(turn_detection={"type": "semantic_vad", "eagerness": "medium"})
        talk.vad.finished = {"show me the": 0.0, "show me the star": 1.0}
        await talk.say(say("show me the"), quiet(3000))
        assert kinds(await talk.all())[1:] == ["speech_started"]
        await talk.say(say("star"), quiet(400))
        stopped = (await talk.until("input_audio_buffer.speech_stopped"))[-1]
        assert stopped["audio_end_ms"] == 600 + 3000 + 200 + 8 + 250, "to the end of a frame"
        await talk.until("response.done")
        assert talk.vad.judged == ["show me the", "show me the star"]
        assert talk.asked == [("user", "show me the star")]


# ----------------------------------------------------------------------------------------------------------- captions
async def test_words_come_while_they_are_spoken() -> None:
    async with talking() as talk:
        await talk.set(
            turn_detection=SERVER,
            transcription={"model": "whisper-1", "language": "en", "prompt": "art"},
        )
        talk.events.clear()
        await talk.say(say("show me the red"))
        early = await talk.all()
        assert deltas(early) == ["show", " me", " the"]
        assert len({event["item_id"] for event in early}) == 1
        await talk.say(say("circle"), END)
        events = await talk.until(f"{TRANSCRIPTION}.completed")
        assert "".join(deltas(talk.events)) == events[-1]["transcript"] == "show me the red circle"
        assert events[-1]["item_id"] == early[0]["item_id"]
        assert events[-1]["usage"]["seconds"] == pytest.approx(1.5, abs=0.05)
        await talk.until("response.created")
    [heard] = talk.asr[0].listens
    assert (heard.language, heard.prompt, heard.sample_rate) == ("en", "art", 24000)
    assert not talk.asr[0].transcribes


async def test_a_reply_knows_the_words_that_nobody_asked_to_see() -> None:
    async with talking() as talk:
        await talk.say(say("show me"), END)
        events = await talk.until("response.done")
        assert not deltas(events)
        assert talk.asked == [("user", "show me")]
        assert not talk.asr[0].transcribes


async def test_ears_that_do_not_hear_live_hear_the_turn_when_it_is_over() -> None:
    async with talking(live=False) as talk:
        await talk.set(turn_detection=SERVER, transcription={})
        await talk.say(say("show me the red"))
        assert not deltas(await talk.all())
        await talk.say(END)
        assert (await talk.until(f"{TRANSCRIPTION}.completed"))[-1][
            "transcript"
        ] == "show me the red"
        assert deltas(talk.events) == ["show", " me", " the", " red"]
    assert not talk.asr[0].listens
    assert len(talk.asr[0].transcribes) == 1


@pytest.mark.parametrize("turn_detection", [SERVER, None])
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_nothing_is_repeated_when_the_ears_die(after: int, turn_detection: Any) -> None:
    text = "show me the red circle"
    async with talking() as talk:
        await talk.more_ears()
        await talk.set(turn_detection=turn_detection, transcription={})
        said = text.split()
        await talk.say(say(" ".join(said[:after])), cough(100))
        die(next(asr for asr in talk.asr if asr.bus.calls.active).bus)
        await talk.say(say(" ".join(said[after:])), END)
        if turn_detection is None:
            talk.socket.send("input_audio_buffer.commit")
            talk.socket.send("response.create")
        await talk.until(f"{TRANSCRIPTION}.completed")
        await talk.until("response.done")
        [completed] = [
            event for event in talk.events if event["type"] == f"{TRANSCRIPTION}.completed"
        ]
        assert "".join(deltas(talk.events)) == completed["transcript"] == text
        assert talk.asked == [("user", text)]
        talk.asr = [asr for asr in talk.asr if asr.bus.control.connected]


async def test_ears_that_stop_hearing_live_hear_the_rest_later() -> None:
    async with talking() as talk:
        talk.asr[0].tires_at = 4
        await talk.set(turn_detection=SERVER, transcription={})
        await talk.say(say("show me the red circle"))
        assert deltas(await talk.all()) == ["show", " me"]
        await talk.say(END)
        assert (await talk.until(f"{TRANSCRIPTION}.completed"))[-1][
            "transcript"
        ] == "show me the red circle"
        assert deltas(talk.events) == ["show", " me", " the red circle"]
        assert len(talk.asr[0].transcribes) == 1


async def test_words_are_told_before_a_client_commits_them() -> None:
    async with talking(query={"intent": "transcription"}) as talk:
        await talk.set(turn_detection=None)
        talk.events.clear()
        await talk.say(say("one two three"), quiet(100))
        assert deltas(await talk.all()) == ["one", " two"]
        talk.socket.send("input_audio_buffer.commit")
        await talk.until(f"{TRANSCRIPTION}.completed")
        assert deltas(talk.events) == ["one", " two", " three"]
        assert len({event["item_id"] for event in talk.events if "item_id" in event}) == 1
        await talk.say(say("no no no"))
        talk.socket.send("input_audio_buffer.clear")
        await talk.until("input_audio_buffer.cleared")
        talk.events.clear()
        await talk.say(say("four five"))
        talk.socket.send("input_audio_buffer.commit")
        assert (await talk.until(f"{TRANSCRIPTION}.completed"))[-1]["transcript"] == "four five"
        assert "".join(deltas(talk.events)) == "four five"
    assert not talk.asr[0].transcribes


async def test_a_client_may_commit_a_turn_that_is_being_spoken() -> None:
    async with talking() as talk:
        await talk.set(turn_detection=SERVER, transcription={})
        await talk.say(say("show me"))
        talk.socket.send("input_audio_buffer.commit")
        assert (await talk.until(f"{TRANSCRIPTION}.completed"))[-1]["transcript"] == "show me"
        await talk.say(END, say("now"), END)
        assert (await talk.until(f"{TRANSCRIPTION}.completed"))[-1]["transcript"] == "now"
        assert kinds(talk.events).count("committed") == 2


async def test_other_rules_in_the_middle_of_a_turn_begin_anew() -> None:
    async with talking() as talk:
        await talk.set(turn_detection=SERVER, transcription={})
        await talk.say(say("show me"))
        await talk.set(turn_detection={**SERVER, "silence_duration_ms": 300})
        await settle()
        assert not talk.asr[0].bus.calls.active
        await talk.say(END, say("the star"), END)
        said = [
            (await talk.until(f"{TRANSCRIPTION}.completed"))[-1]["transcript"] for _ in range(2)
        ]
        assert said == ["show me", "the star"]


async def test_a_turn_that_is_cleared_goes_on_with_what_follows() -> None:
    async with talking() as talk:
        await talk.set(turn_detection=SERVER, transcription={})
        await talk.say(say("not that"))
        talk.socket.send("input_audio_buffer.clear")
        await talk.until("input_audio_buffer.cleared")
        talk.events.clear()
        await talk.say(say("but this"), END)
        assert (await talk.until(f"{TRANSCRIPTION}.completed"))[-1]["transcript"] == "but this"


# ------------------------------------------------------------------------------------------------------ interruptions
@pytest.mark.parametrize("sound", [cough(400), say("mhm"), say("yeah okay")])
async def test_a_cough_or_mhm_does_not_stop_the_reply(sound: bytes) -> None:
    async with talking() as talk:
        await talk.reply()
        talk.events.clear()
        await talk.say(sound, END)
        done = (await talk.until("response.done"))[-1]["response"]
        await talk.say(quiet(300))
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["transcript"] == STORY
        found = kinds(await talk.all())
        assert not {"speech_started", "speech_stopped", "committed"} & set(found)
        assert found.count("response.created") == 0
        assert talk.tts.cancelled == 0
        assert len(talk.world.tokenizer.requests) == 1


async def test_words_stop_the_reply_and_are_the_next_turn() -> None:
    async with talking() as talk:
        await talk.reply()
        talk.world.tokenizer.reply = lambda request: words("Sorry.")
        talk.events.clear()
        await talk.say(say("mhm"))
        assert "speech_started" not in kinds(await talk.all())
        await talk.say(say("stop it"))
        await talk.until("response.done")
        order = [kind for kind in kinds(talk.events) if not kind.endswith(".delta")]
        assert order[:2] == ["speech_started", "response.output_audio.done"]
        done = talk.events[-1]["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
        told = done["output"][0]["content"][0]["transcript"]
        await talk.say(END)
        await talk.until("response.done")
        assert talk.asked == [("user", "tell me"), ("assistant", told), ("user", "mhm stop it")]
        assert talk.tts.cancelled == 1


async def test_any_speech_interrupts_where_it_is_told_to() -> None:
    async with talking() as talk:
        await talk.set(turn_detection={**SERVER, "interrupt_on": "speech"})
        await talk.reply()
        talk.events.clear()
        await talk.say(cough(100))
        await talk.until("response.done")
        assert "speech_started" in kinds(talk.events)
        assert talk.events[-1]["response"]["status"] == "cancelled"


async def test_without_interruption_speech_is_told_at_once_and_the_reply_goes_on() -> None:
    async with talking() as talk:
        await talk.set(turn_detection={**SERVER, "interrupt_response": False})
        await talk.reply(pace=0.0)
        await talk.say(cough(100))
        await talk.until("input_audio_buffer.speech_started")
        await talk.all()
        assert [e["response"]["status"] for e in talk.events if e["type"] == "response.done"] == [
            "completed"
        ]


async def test_a_reply_that_is_only_played_is_not_disturbed_either() -> None:
    async with talking() as talk:
        await talk.reply(pace=0.0)
        await talk.until("rate_limits.updated")
        assert len(STORY.split()) * WORD_MS > 4000
        talk.events.clear()
        await talk.say(say("mhm"), END)
        assert await talk.all() == []
        await talk.say(say("thank you very"), END)
        await talk.until("response.done")
        assert kinds(talk.events)[0] == "speech_started"
        assert talk.asked[-1] == ("user", "thank you very")


async def test_an_answer_after_the_reply_was_played_may_be_short() -> None:
    async with talking() as talk:
        await talk.reply("Do you like it?", pace=0.0)
        await talk.until("rate_limits.updated")
        await talk.say(quiet(5 * WORD_MS))
        await talk.say(say("yeah"), END)
        await talk.until("response.done")
        assert talk.asked[-1] == ("user", "yeah")


async def test_a_client_that_stopped_playing_is_listened_to_at_once() -> None:
    async with talking() as talk:
        await talk.reply(pace=0.0)
        done = next(
            e for e in await talk.until("rate_limits.updated") if e["type"] == "response.done"
        )["response"]
        item_id = done["output"][0]["id"]
        talk.socket.send(
            "conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=WORD_MS
        )
        await talk.until("conversation.item.truncated")
        await talk.say(say("yeah"))
        assert "speech_started" in kinds(await talk.all())


@pytest.mark.parametrize(
    "turn_detection", [SERVER, {"type": "semantic_vad", "eagerness": "medium"}]
)
async def test_without_live_words_half_a_second_of_speech_interrupts(turn_detection: Any) -> None:
    async with talking(live=False) as talk:
        await talk.set(turn_detection=turn_detection)
        await talk.reply(STORY * 3, pause=quiet(1600))
        talk.events.clear()
        await talk.say(cough(400), END)
        assert "speech_started" not in kinds(await talk.all())
        await talk.say(say("stop it now"))
        await talk.until("response.done")
        assert talk.events[-1]["response"]["status"] == "cancelled"


async def test_a_model_that_is_not_here_is_told_once() -> None:
    async with talking() as talk:
        await talk.set(turn_detection=SERVER, transcription={"model": "nobody"})
        await talk.say(say("show me"), END)
        assert "nobody" in (await talk.until(f"{TRANSCRIPTION}.failed"))[-1]["error"]["message"]
