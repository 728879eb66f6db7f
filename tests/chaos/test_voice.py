"""Kill -9 of what hears, thinks and speaks, in the middle of a spoken turn: nobody can tell afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from chaos.spoken_stack import SpokenStack, spoken_stack
from motet_pipelines.voice.conversation import item_transcription, reply
from motet_shared.wire.stream import Stream
from support.clients.realtime_client import TRANSCRIPTION, Client, kinds, one, sound
from support.media.spoken import say, silence

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

SAID = "Two red circles and a blue square. Then a green star, and seven small yellow triangles, one above the other."
TOKENS = 200
FRAME_MS = 32  # in which voice activity is noticed


@dataclass(frozen=True)
class Turn:
    """What a client has of one spoken turn."""

    order: list[str]
    start_ms: int
    end_ms: int
    transcript: str
    text: str
    pcm: bytes
    usage: dict[str, Any]

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> Turn:
        done = one(events, "response.done")["response"]
        assert done["status"] == "incomplete", done["status_details"]  # it ends with its tokens
        captions = [
            event["delta"]
            for event in events
            if event["type"] == "response.output_audio_transcript.delta"
        ]
        text = done["output"][0]["content"][0]["transcript"]
        assert "".join(captions) == text
        usage = dict(done["usage"])
        del usage["input_token_details"]  # what a prefix cache happened to hold
        return cls(
            [kind for kind in kinds(events, heard=False) if "delta" not in kind],
            one(events, "input_audio_buffer.speech_started")["audio_start_ms"],
            one(events, "input_audio_buffer.speech_stopped")["audio_end_ms"],
            one(events, f"{TRANSCRIPTION}.completed")["transcript"],
            text,
            sound(events),
            usage,
        )


Strike = Callable[[SpokenStack], Awaitable[object]]


async def turn(stack: SpokenStack, *strikes: Strike) -> Turn:
    """One spoken turn in a session of its own, in which processes are killed."""
    spoken = silence(500) + say(SAID) + silence(900)
    half = len(spoken) // 4 * 2
    settings = {"transcription": {"language": "en"}}
    async with (
        stack.talk(audio={"input": settings}, max_output_tokens=TOKENS) as client,
        asyncio.TaskGroup() as tasks,
    ):
        blows = [tasks.create_task(_blow(strike, stack)) for strike in strikes]
        await client.audio(spoken[:half])
        await client.until("input_audio_buffer.speech_started")
        if vad in strikes:
            await blows[strikes.index(vad)]
        await client.audio(spoken[half:])
        await all_of_it(client)
        await asyncio.gather(*blows)
    assert len(stack.killed) + len(stack.dark) == len(strikes)
    await stack.idle()
    return Turn.of(client.events)


async def _blow(strike: Strike, stack: SpokenStack) -> None:
    await strike(stack)


async def all_of_it(client: Client) -> None:
    """Transcription runs beside the response: either may be complete first."""
    due = {f"{TRANSCRIPTION}.completed", "rate_limits.updated"}
    while due := due - {event["type"] for event in client.events}:
        await client.until(*due)


def in_the_middle(items: int) -> Callable[[Stream], bool]:
    return lambda stream: stream.received >= items


async def vad(stack: SpokenStack) -> object:
    return await stack.kill("vad", in_the_middle(1))


async def asr(stack: SpokenStack) -> object:
    return await stack.kill("asr", in_the_middle(2))


async def decode(stack: SpokenStack) -> object:
    return await stack.kill("decode", in_the_middle(20))


async def tts(stack: SpokenStack) -> object:
    return await stack.kill("tts", in_the_middle(3))


def queued(role: str) -> Strike:
    """Before anything has come of it: it waits, its sound is read, its prompt is prefilled."""

    async def strike(stack: SpokenStack) -> object:
        return await stack.kill(role, lambda stream: stream.received == 0)

    return strike


def sent_away(role: str, items: int) -> Strike:
    async def strike(stack: SpokenStack) -> object:
        return await stack.send_away(role, in_the_middle(items))

    return strike


def darkened(role: str, items: int) -> Strike:
    """The whole site at which a role serves: all other services there are lost with it."""

    async def strike(stack: SpokenStack) -> object:
        return await stack.darken(role, in_the_middle(items))

    return strike


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SpokenStack]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (reply, item_transcription):
            patch.setattr(module, "new_seed", lambda name: 7)
        async with spoken_stack(tmp_path_factory.mktemp("spoken")) as stack:
            await stack.all_ready()
            yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(whole_stack: SpokenStack) -> Turn:
    return await turn(whole_stack)


@pytest_asyncio.fixture(loop_scope="module")
async def stack(whole_stack: SpokenStack) -> AsyncIterator[SpokenStack]:
    """Two of each are ready, before and after."""
    await whole_stack.restore()
    yield whole_stack


async def test_a_turn_twice_the_same(stack: SpokenStack, undisturbed: Turn) -> None:
    """The yardstick of all tests here."""
    assert await turn(stack) == undisturbed
    assert undisturbed.transcript
    assert undisturbed.text.count("\n") > 3, "the reply has several sentences"
    assert len(undisturbed.pcm) > 9_600


@pytest.mark.parametrize("strike", [asr, decode, tts])
async def test_a_turn_through_a_killed_service_is_the_same(
    strike: Strike, stack: SpokenStack, undisturbed: Turn
) -> None:
    assert await turn(stack, strike) == undisturbed


@pytest.mark.parametrize("role", ["asr", "decode", "tts"])
async def test_a_turn_through_a_service_that_is_killed_before_it_said_anything(
    role: str, stack: SpokenStack, undisturbed: Turn
) -> None:
    assert await turn(stack, queued(role)) == undisturbed


@pytest.mark.parametrize(("role", "items"), [("asr", 2), ("decode", 20), ("tts", 3)])
async def test_a_turn_through_a_service_that_is_sent_away(
    role: str, items: int, stack: SpokenStack, undisturbed: Turn
) -> None:
    """Drained, as by a restart or with fewer instances."""
    assert await turn(stack, sent_away(role, items)) == undisturbed


async def test_a_turn_is_heard_to_its_end_by_another_ear(
    stack: SpokenStack, undisturbed: Turn
) -> None:
    """It hears in frames that begin elsewhere, so the edge it finds may lie a frame away."""
    heard = await turn(stack, vad)
    assert heard.start_ms == undisturbed.start_ms
    assert heard.end_ms == pytest.approx(undisturbed.end_ms, abs=2 * FRAME_MS)
    assert (heard.order, heard.text, heard.pcm) == (
        undisturbed.order,
        undisturbed.text,
        undisturbed.pcm,
    )
    assert heard.transcript


async def test_all_of_them_in_one_turn(stack: SpokenStack, undisturbed: Turn) -> None:
    survived = await turn(stack, vad, asr, decode, tts)
    assert (survived.order, survived.text, survived.pcm) == (
        undisturbed.order,
        undisturbed.text,
        undisturbed.pcm,
    )
    assert survived.usage["output_token_details"] == undisturbed.usage["output_token_details"]
    assert survived.transcript


@pytest.mark.parametrize(("role", "items"), [("asr", 2), ("tts", 3)])
async def test_a_turn_whose_site_goes_dark_goes_on_at_another(
    role: str, items: int, stack: SpokenStack, undisturbed: Turn
) -> None:
    """What hears, thinks and speaks there is lost at once, while it hears and while it speaks."""
    survived = await turn(stack, darkened(role, items))
    assert (survived.order, survived.text, survived.pcm) == (
        undisturbed.order,
        undisturbed.text,
        undisturbed.pcm,
    )
    assert survived.transcript
