"""One table of names: what clients of OpenAI's API send without asking is the model that is here, everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from motet_gateway.http.problems import WrongModelKind
from motet_gateway.openai.aliases import model_of
from motet_media.audio import wav_header
from motet_shared.errors import Unavailable, UnknownModel
from motet_shared.testing import memory_bus, running, settle
from support.clients.gateway_client import Http, World, world
from support.media.coded_speech import ASR_MODEL, CodedAsr, say
from support.services.fake_services import MODEL
from support.services.voice_services import VOICE, ScriptedTts


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world() as made:
        asr, tts = (
            CodedAsr(await memory_bus(made.hub, "asr")),
            ScriptedTts(await memory_bus(made.hub, "tts")),
        )
        async with running(asr), running(tts):
            await settle()
            yield made
        await made.service.close()


@pytest.mark.parametrize(
    "name", ["", "whisper-1", "gpt-4o-mini-transcribe-2025-12-15", "gpt-4o-transcribe-diarize"]
)
async def test_any_known_recognizer_is_the_one_here(here: World, name: str) -> None:
    assert model_of(here.service.bus.directory, "asr", name) == ASR_MODEL


@pytest.mark.parametrize("name", ["", "tts-1", "tts-1-hd", "gpt-4o-mini-tts"])
async def test_any_known_voice_is_the_one_here(here: World, name: str) -> None:
    assert model_of(here.service.bus.directory, "tts", name) == VOICE


async def test_what_is_no_such_name_is_not_here(here: World) -> None:
    for role, name in (
        ("asr", "whisper-10"),
        ("asr", "nobody"),
        ("chat", "nobody"),
        ("chat", "gpt-9"),
    ):
        with pytest.raises(UnknownModel, match=name):
            model_of(here.service.bus.directory, role, name)


async def test_a_model_of_another_kind_is_said_to_be_one(here: World) -> None:
    for role, name in (
        ("asr", VOICE),
        ("tts", "whisper-1"),
        ("chat", ASR_MODEL),
        ("chat", "tts-1"),
        ("tts", MODEL),
    ):
        with pytest.raises(WrongModelKind, match=name) as caught:
            model_of(here.service.bus.directory, role, name)
        assert (caught.value.code, caught.value.param) == ("wrong_model_kind", "model")


@pytest.mark.parametrize(
    "name", ["gpt-4o", "gpt-4o-mini", "gpt-4.1-nano", "gpt-5.1", "gpt-realtime-mini", "o3-mini"]
)
async def test_any_known_chat_model_is_the_one_here(here: World, name: str) -> None:
    assert model_of(here.service.bus.directory, "chat", name) == MODEL
    assert model_of(here.service.bus.directory, "chat", MODEL) == MODEL


async def test_nobody_can_know_while_nobody_is_there() -> None:
    async with world() as made:
        for name in ("whisper-1", ""):
            with pytest.raises(Unavailable):
                model_of(made.service.bus.directory, "asr", name)


async def test_the_names_work_over_http(here: World) -> None:
    spoken = await here.ask(
        "/v1/audio/speech", model="tts-1", input="hello you", response_format="pcm"
    ).done()
    assert (spoken.status, len(spoken.body)) == (200, 2 * 200 * 48)
    pcm = say("show me the star")
    fields = [
        ('name="model"', b"gpt-4o-transcribe"),
        ('name="file"; filename="a.wav"', wav_header(24000, len(pcm)) + pcm),
    ]
    parts = [
        f"--x\r\ncontent-disposition: form-data; {head}\r\n\r\n".encode() + data
        for head, data in fields
    ]
    body = b"\r\n".join([*parts, b"--x--\r\n"])
    headers = {"content-type": "multipart/form-data; boundary=x", "content-length": str(len(body))}
    heard = await Http(here.app, "/v1/audio/transcriptions", body, "POST", headers).done()
    assert (heard.status, heard.json()["text"]) == (200, "show me the star")
