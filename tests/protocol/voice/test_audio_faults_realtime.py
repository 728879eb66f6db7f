"""Bad sound in a session: heard rightly, or refused with the field, the value and the remedy; the session lives."""

from __future__ import annotations

import base64
import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from support.clients.realtime_client import TRANSCRIPTION, Client, kinds
from support.media.spoken import noise, say, silence
from support.services.voice_services import ScriptedAsr
from support.stages.voice_stage import Stage, stage

HELLO = "Two red circles and a blue square."
LIMIT = 200_000  # bytes of the input buffer: 4.2 s


@pytest.fixture
async def made() -> AsyncIterator[Stage]:
    async with stage("asr", "vad") as made:
        yield made


def ears(made: Stage) -> ScriptedAsr:
    assert made.asr is not None
    return made.asr


def listening(made: Stage, **audio_input: Any) -> AbstractAsyncContextManager[Client]:
    return made.talk(
        output_modalities=["text"], audio={"input": {"transcription": {}, **audio_input}}
    )


def manual(made: Stage) -> AbstractAsyncContextManager[Client]:
    return listening(made, turn_detection=None)


async def append(client: Client, *pieces: bytes) -> None:
    for piece in pieces:
        await client.send("input_audio_buffer.append", audio=base64.b64encode(piece).decode())


async def committed(client: Client) -> str:
    await client.send("input_audio_buffer.commit")
    completed = await client.until(f"{TRANSCRIPTION}.completed")
    return str(completed[-1]["transcript"])


async def test_sound_may_be_cut_within_samples(made: Stage) -> None:
    pcm, pieces, at = say(HELLO), [], 0
    for size in itertools.cycle((1, 3, 4801, 2, 7, 9599)):
        pieces.append(pcm[at : at + size])
        at += size
        if at >= len(pcm):
            break
    async with manual(made) as client:
        await append(client, *pieces)
        await committed(client)
    assert ears(made).heard == [(24_000, pcm)]


async def test_half_a_sample_at_the_end_of_a_turn_does_not_spoil_the_next(made: Stage) -> None:
    """What follows would be read with its bytes swapped: noise, for the rest of the session."""
    pcm = say(HELLO)
    async with manual(made) as client:
        await append(client, pcm, b"\x07")
        await committed(client)
        await append(client, pcm)
        await committed(client)
        await append(client, b"\x07")
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await append(client, pcm)
        await committed(client)
    assert ears(made).heard == [(24_000, pcm)] * 3


async def test_a_turn_is_detected_in_sound_that_is_cut_anywhere(made: Stage) -> None:
    ears(made).script = ["two red circles"]
    pcm = silence(500) + say(HELLO) + silence(900)
    async with listening(made) as client:
        await append(client, *(pcm[start : start + 4801] for start in range(0, len(pcm), 4801)))
        assert (await client.until(f"{TRANSCRIPTION}.completed"))[-1][
            "transcript"
        ] == "two red circles"
    rate, heard = ears(made).heard[0]
    at = pcm.find(heard)
    assert (rate, at % 2) == (24_000, 0)
    assert len(heard) > len(say(HELLO))


async def test_silence_and_noise_are_no_turns_but_may_be_committed(made: Stage) -> None:
    loud = (np.sign(np.random.default_rng(3).normal(size=24_000)) * 32767).astype("<i2").tobytes()
    async with listening(made) as client:
        for sound in (silence(2000), noise(2000), b"\xff\x7f" * 24_000):
            await append(client, sound)
        await client.send("input_audio_buffer.commit")
        events = await client.until("conversation.item.done")
        assert "input_audio_buffer.speech_started" not in kinds(events)
    async with manual(made) as client:
        for sound in (silence(1000), noise(1000), loud):
            await append(client, sound)
            assert await committed(client) == ""
        await client.send("response.create")
        await client.until("response.done")


@pytest.mark.parametrize(
    ("fields", "param", "remedy"),
    [
        ({"audio": "%%%"}, "audio", "base64"),
        ({"audio": "AAA"}, "audio", "base64"),
        ({"audio": 5}, "audio", "str"),
        ({}, "audio", "required"),
    ],
)
async def test_what_is_no_sound_is_refused(
    made: Stage, fields: dict[str, Any], param: str, remedy: str
) -> None:
    async with manual(made) as client:
        await client.send("input_audio_buffer.append", **fields)
        error = await client.refused()
        assert error["type"] == "invalid_request_error"
        assert param in f"{error['param']} {error['message']}"
        assert remedy in error["message"]
        await append(client, say(HELLO))
        await committed(client)
    assert len(ears(made).heard) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ({"type": "audio/pcm", "rate": 16_000}, "16000"),
        ({"type": "audio/pcm", "rate": 0}, "0"),
        ({"type": "audio/mp3"}, "audio/mp3"),
        ("pcm16", "pcm16"),
    ],
)
async def test_a_wrong_rate_or_format_is_refused_by_name(
    made: Stage, setting: Any, value: str
) -> None:
    async with manual(made) as client:
        await client.send(
            "session.update", session={"type": "realtime", "audio": {"input": {"format": setting}}}
        )
        error = await client.refused()
        assert "format" in f"{error['param']} {error['message']}", error
        assert value in error["message"] or "24000" in error["message"], error


async def test_an_empty_or_endless_buffer_is_refused_and_may_be_emptied() -> None:
    async with stage("asr", "vad", max_message=LIMIT) as made, manual(made) as client:
        for piece in (b"", silence(99)):
            await append(client, piece)
            await client.send("input_audio_buffer.commit")
            error = await client.refused()
            assert error["code"] == "input_audio_buffer_commit_empty"
            assert "append at least 100 ms" in error["message"]
        for _ in range(2):
            await append(client, silence(3000), silence(3000))
            error = await client.refused()
            assert (error["code"], error["param"]) == ("payload_too_large", "audio")
            assert str(LIMIT) in error["message"]
            assert "commit or clear it" in error["message"]
            await client.send("input_audio_buffer.clear")
            await client.until("input_audio_buffer.cleared")
        await append(client, say(HELLO))
        await committed(client)
    assert ears(made).heard == [(24_000, say(HELLO))]


@pytest.mark.parametrize(("kind", "done"), [("commit", "committed"), ("clear", "cleared")])
async def test_a_turn_that_fills_the_buffer_makes_room_when_it_is_emptied(
    kind: str, done: str
) -> None:
    spoken = say(HELLO) * 4  # without a pause that ends the turn
    beginning, rest = spoken[:140_000], spoken[140_000:210_000]
    assert len(rest) == 70_000
    async with stage("asr", "vad", max_message=LIMIT) as made, listening(made) as client:
        await append(client, beginning)
        await client.until("input_audio_buffer.speech_started")
        await append(client, rest)
        assert (await client.refused())["code"] == "payload_too_large"
        await client.send(f"input_audio_buffer.{kind}")
        await client.until(f"input_audio_buffer.{done}")
        await append(client, rest)
        await client.send("input_audio_buffer.commit")
        await client.until("input_audio_buffer.committed")


async def test_hours_of_silence_take_no_memory() -> None:
    """Where nobody speaks, only the last moments are kept: far more comes than the buffer may hold."""
    async with stage("asr", "vad", max_message=5 << 20) as made, listening(made) as client:
        ears(made).script = ["two red circles"]
        for _ in range(64):  # 6.1 MB
            await append(client, silence(2000))
        await append(client, silence(500) + say(HELLO) + silence(900))
        events = await client.until(f"{TRANSCRIPTION}.completed", "error")
    assert "error" not in kinds(events), events[-1]
    assert len(ears(made).heard) == 1
