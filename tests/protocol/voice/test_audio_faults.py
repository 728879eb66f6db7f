"""Sound that is silent, noisy, broken, mislabelled or endless: the right text, or an error that says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from motet_media.audio import wav_header
from support.checkpoints.asr_checkpoints import RATE, noise, tiny_whisper, wav
from support.media.sound_files import (
    EXACT,
    LOSSY,
    claiming,
    encoded,
    float_wav,
    hours_of_wav,
    picture,
)
from support.media.spoken import mixed, say
from support.stages.asr_stage import Service, serving

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SOUND = noise(5.0, 4)
MEMORY = 400 << 20  # bytes that a file may take; four hours are 920 MB


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with serving(
        tiny_whisper(tmp_path_factory.mktemp("whisper")), max_upload=24 << 20
    ) as service:
        yield service


async def heard(service: Service, data: bytes, **label: Any) -> dict[str, Any]:
    reply = await service.post(file=data, response_format="verbose_json", **label)
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


def refused(reply: httpx.Response) -> str:
    """The message of an error that names the file."""
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (
        "file",
        "invalid_request_error",
        "invalid_request",
    )
    return str(error["message"])


async def test_silence_is_no_words(service: Service) -> None:
    document = await heard(service, wav(np.zeros(7 * RATE)))
    assert (document["text"], document["segments"], document["duration"]) == ("", [], 7.0)
    for form, text in (("text", "\n"), ("srt", ""), ("vtt", "WEBVTT\n\n")):
        assert (await service.post(file=wav(np.zeros(RATE)), response_format=form)).text == text


async def test_noise_and_clipping_are_heard_like_other_sounds(service: Service) -> None:
    hiss = np.random.default_rng(1).uniform(-1, 1, 3 * RATE)
    for sound in (hiss, SOUND * 100, np.ones(3 * RATE), np.sign(hiss)):
        document = await heard(service, wav(sound))
        assert document["duration"] == len(sound) / RATE
        assert all(
            0 <= part["start"] <= part["end"] <= document["duration"]
            for part in document["segments"]
        )
        assert document["text"] == "".join(part["text"] for part in document["segments"]).strip()


async def test_floats_beyond_full_scale_harm_nobody(service: Service) -> None:
    """A window whose features overflow would be no numbers for the whole batch."""
    whole = await heard(service, wav(SOUND))
    too_loud = float_wav(np.sign(SOUND) * np.float32(3e38))
    loud, usual = await asyncio.gather(service.post(file=too_loud), heard(service, wav(SOUND)))
    assert "reach 3e+38 where full scale is 1; divide them by that" in refused(loud)
    assert usual["text"] == whole["text"]
    as_integers = await heard(service, float_wav(SOUND * 32768))  # a common mistake, and harmless
    assert (as_integers["duration"], bool(as_integers["text"])) == (5.0, True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_what_is_no_number_is_refused(service: Service, value: float) -> None:
    sound = SOUND.copy()
    sound[-1] = value
    message = refused(await service.post(file=float_wav(sound)))
    assert "NaN or infinite" in message


@pytest.mark.parametrize("kind", [*EXACT, *LOSSY])
async def test_what_breaks_off_is_heard_as_far_as_it_goes(service: Service, kind: str) -> None:
    data = encoded(SOUND, *(EXACT | LOSSY)[kind])
    if kind == "m4a":  # its table of contents is at the end
        assert "cannot be read as sound" in refused(await service.post(file=data[: len(data) // 2]))
        return
    whole, half = await heard(service, data), await heard(service, data[: len(data) // 2])
    assert whole["duration"] == pytest.approx(5.0, abs=0.15)
    assert half["duration"] == pytest.approx(2.5, abs=0.6)


async def test_the_label_does_not_matter_the_content_does(service: Service) -> None:
    data = encoded(SOUND, *LOSSY["mp3"])
    texts = {
        (await heard(service, data, name=name, kind=kind))["text"]
        for name, kind in (
            ("sound.mp3", "audio/mpeg"),
            ("sound.wav", "audio/wav"),
            ("x", "image/png"),
            ('ü".txt', ""),
        )
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        wav_header(RATE, 0),
        wav(SOUND)[:30],
        b"a letter to a friend\n" * 100,
        picture(),
        claiming(wav(SOUND), 0),
        claiming(wav(SOUND), 2**31),
        claiming(wav(SOUND), 999),
    ],
    ids=[
        "empty",
        "no-samples",
        "half-a-header",
        "a-letter",
        "a-film",
        "rate-0",
        "rate-2e9",
        "rate-999",
    ],
)
async def test_what_is_no_sound_is_refused(service: Service, data: bytes) -> None:
    assert refused(await service.post(file=data, name="sound.wav", kind="audio/wav"))


async def test_torn_samples_are_left_out(service: Service) -> None:
    whole = await heard(service, wav(SOUND))
    assert (await heard(service, wav(SOUND) + b"\x55"))["text"] == whole["text"]
    assert (await heard(service, wav(SOUND)[:-1]))["duration"] == pytest.approx(5.0, abs=0.001)


async def test_five_hours_are_refused_by_name_and_in_bounded_memory(service: Service) -> None:
    before = peak(service)
    message = refused(await service.post(file=hours_of_wav(5.0), timeout=100))
    assert "longer than 14400 s (max_audio); send it in parts" in message
    assert peak(service) - before < MEMORY
    assert (await heard(service, wav(SOUND)))["duration"] == 5.0


def peak(service: Service) -> int:
    """The most memory that the recognizer has had so far, bytes."""
    status = Path(f"/proc/{service.recognizers[0].pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


async def test_sound_in_sound(service: Service) -> None:
    """Speech in loud noise, and two who speak at once: not what they say, but that nothing breaks."""
    voices = mixed(say("Two red circles.", RATE), say("A blue square is left of the star.", RATE))
    assert (await heard(service, wav_header(RATE, len(voices)) + voices))["duration"] > 1.0
