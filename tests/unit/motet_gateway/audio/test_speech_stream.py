"""Spoken texts in memory: clients that do not read, limits of tenants, drains, changed keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motet_gateway.audio.speech_stream.events import SessionConfig
from motet_gateway.audio.speech_stream.texts import (
    MOST_UTTERANCES,
    InputBufferFull,
    Settings,
    Texts,
)
from motet_gateway.audio.voice_store import VoiceStore
from motet_shared.errors import BadRequest
from motet_shared.testing import memory_bus, running, settle
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.clients.gateway_client import Http, Socket
from support.media.sound_files import float_wav, tone
from support.services.memory_documents import MemoryDocuments
from support.stages.tenants_stage import ACME, OTHER, Limited, bearer, document, limited
from support.stages.tts_stage import MODEL, TEXT, config

PATH = "/v1/audio/speech/stream"
PCM: dict[str, Any] = {"model": MODEL, "response_format": "pcm", "stream_audio": True, "seed": 5}


class Booth:
    """Hold a gateway of two tenants and a speech model."""

    def __init__(self, here: Limited, tts: Tts):
        self.here, self.tts = here, tts

    @asynccontextmanager
    async def writing(self, key: str = ACME, **fields: Any) -> AsyncIterator[Socket]:
        socket = Socket(self.here.made.app, query={}, path=PATH, headers=bearer(key))
        socket.send("session.config", **{**PCM, **fields})
        yield socket
        if not socket.task.done():
            await socket.leave()

    async def post(self, key: str = ACME, **fields: Any) -> bytes:
        asked = {"model": MODEL, "input": TEXT, "response_format": "pcm", "seed": 5, **fields}
        http = await self.here.ask(key, "/v1/audio/speech", **asked).done()
        assert http.status == 200, http.body
        return http.body


@asynccontextmanager
async def booth(tmp_path: Path, limits: str = "", **settings: Any) -> AsyncIterator[Booth]:
    folder = tts_checkpoints.pocket_tts(tmp_path / "model", sample=True, threshold=0.2)
    async with limited(tmp_path, limits, **settings) as here, AsyncExitStack() as stack:
        service = here.made.service
        service.voices = VoiceStore(MemoryDocuments(), service.stored)
        bus = await memory_bus(here.made.hub, "tts")
        stack.push_async_callback(bus.close)
        tts = await stack.enter_async_context(running(Tts(config(folder), bus)))
        await settle()
        yield Booth(here, tts)
        await service.close()


async def spoken(socket: Socket, text: str) -> Any:
    socket.send("input.text", text=text)
    socket.send("input.done")
    return (await socket.until("session.done"))[-1]


async def test_a_client_that_does_not_read_gets_no_credit(tmp_path: Path) -> None:
    async with booth(tmp_path) as here, here.writing() as socket:
        socket.send("input.text", text=TEXT * 100)
        await socket.until("audio.done")
        socket.reading.clear()
        engine = here.tts.sessions.thread.engine
        before = 0
        async with asyncio.timeout(30):
            while engine.samples != before:
                before = engine.samples
                await asyncio.sleep(0.3)
        socket.reading.set()
        async with asyncio.timeout(30):
            while engine.samples == before:
                await socket.receive()
        assert len(socket.sound) > 0


async def test_a_tenants_own_voice_speaks(tmp_path: Path) -> None:
    async with booth(tmp_path) as here:
        edge = "edge"
        fields = {"name": "Ada", "text": "no one knows", "consent": "true"}
        parts = [
            f'--{edge}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        ]
        head = 'Content-Disposition: form-data; name="audio_sample"; filename="a.wav"'
        sound = float_wav(tone(1.5, 24_000, 220.0), 24_000)
        body = "".join(parts).encode() + f"--{edge}\r\n{head}\r\n\r\n".encode() + sound
        headers = {**bearer(), "content-type": f"multipart/form-data; boundary={edge}"}
        end = f"\r\n--{edge}--\r\n".encode()
        made = await Http(
            here.here.made.app, "/v1/audio/voices", body + end, headers=headers
        ).done()
        voice = made.json()["id"]
        whole = await here.post(voice=voice)
        assert whole != await here.post()
        async with here.writing(voice=voice) as socket:
            assert not (await spoken(socket, TEXT))["error"]
            assert socket.sound == whole
        async with here.writing(OTHER, voice=voice) as socket:
            assert (await socket.expect("error"))["error"]["code"] == "not_found"


async def test_the_audio_that_was_made_is_charged(tmp_path: Path) -> None:
    async with booth(tmp_path, "audio_seconds_per_hour = 600") as here, here.writing() as socket:
        bucket = here.here.tenant().audio.bucket
        assert bucket is not None
        full = bucket.level
        await spoken(socket, TEXT)
        assert full - bucket.level == pytest.approx(len(socket.sound) / 48_000 * 1e6, abs=1000)
        await socket.leave()


async def test_a_tenant_without_seconds_left_is_refused_sentence_by_sentence(
    tmp_path: Path,
) -> None:
    async with booth(tmp_path, "audio_seconds_per_hour = 2") as here, here.writing() as socket:
        socket.send("input.text", text="It is so. " * 400)
        found = await socket.until("session.done")
        errors = [event["error"] for event in found if event["type"] == "error"]
        assert [error["code"] for error in errors] == ["rate_limit_exceeded"]
        assert found[-1]["error"]
        assert found[-1]["total_sentences"] > 1
        assert here.here.made.service.limits.active == 0


async def test_requests_and_sockets_are_limited(tmp_path: Path) -> None:
    limits = "requests_per_minute = 3\nconcurrent_sockets = 1"
    async with booth(tmp_path, limits) as here, here.writing() as socket:
        for _ in range(2):  # the connection was the first request
            assert not (await spoken(socket, "It is small."))["error"]
        second = Socket(here.here.made.app, query={}, path=PATH, headers=bearer())
        assert (await second.expect("error"))["error"]["code"] == "rate_limit_exceeded"
        await asyncio.wait_for(second.task, 5)
        socket.send("input.text", text="It is small. And")
        found = await socket.until("session.done")
        assert found[0]["error"]["code"] == "rate_limit_exceeded"


async def test_a_query_parameter_is_refused_by_name(tmp_path: Path) -> None:
    async with booth(tmp_path) as here:
        socket = Socket(here.here.made.app, query={"voice": "anna"}, path=PATH, headers=bearer())
        assert (await socket.expect("error"))["error"]["param"] == "voice"
        await asyncio.wait_for(socket.task, 5)


async def test_a_drain_ends_the_open_text_and_takes_no_other(tmp_path: Path) -> None:
    async with booth(tmp_path) as here, here.writing() as socket, here.writing() as idle:
        service = here.here.made.service
        socket.send("input.text", text="It is small. And")
        await socket.until("audio.done")
        service.limits.draining = True
        drains = [asyncio.create_task(session.drain()) for session in service.sessions]
        socket.send("input.text", text=" so on.")
        socket.send("input.done")
        assert not (await socket.until("session.done"))[-1]["error"]
        await asyncio.wait_for(asyncio.gather(*drains), 5)
        assert (socket.closed, idle.closed) == (1012, 1012)
        await asyncio.wait_for(asyncio.gather(socket.task, idle.task), 5)


async def test_a_key_that_is_no_longer_accepted_ends_the_session(tmp_path: Path) -> None:
    async with booth(tmp_path) as here, here.writing() as socket:
        socket.send("input.text", text=TEXT * 100)
        await socket.until("audio.start")
        here.here.path.write_text(document("", keys=()))
        tenants_file = here.here.made.service.tenants_file
        assert tenants_file is not None
        tenants_file.read()
        await asyncio.wait_for(socket.task, 10)
        assert socket.closed == 3000
        assert here.here.made.service.limits.active == 0


async def test_silence_in_the_middle_of_a_text_ends_it(tmp_path: Path) -> None:
    async with booth(tmp_path, request_timeout=0.5) as here, here.writing() as socket:
        socket.send("input.text", text="And")
        found = await socket.until("session.done")
        assert found[0]["error"]["code"] == "deadline_exceeded"
        assert here.here.made.service.limits.active == 0


# ----------------------------------------------------------------------------------------- the queue
SETTINGS = Settings(SessionConfig(), MODEL)


async def test_utterances_are_taken_in_order_and_bounded() -> None:
    texts = Texts()
    for _ in range(MOST_UTTERANCES):
        texts.end(SETTINGS)
    with pytest.raises(InputBufferFull):
        texts.end(SETTINGS)
    with pytest.raises(InputBufferFull):
        texts.write("more", SETTINGS)
    taken = [await texts.take() for _ in range(MOST_UTTERANCES)]
    assert [one.index for one in taken if one is not None] == list(range(MOST_UTTERANCES))
    assert not texts.is_idle


async def test_nothing_follows_a_close() -> None:
    texts = Texts()
    texts.write("one", SETTINGS)
    texts.close()
    first = await texts.take()
    assert first is not None
    assert [piece async for piece in first.pieces(1.0)] == ["one"]
    with pytest.raises(BadRequest):
        texts.write("two", SETTINGS)
    assert await texts.take() is None
    assert texts.is_idle
