"""What tenants may hear, say, draw and embed: charged as it comes, exactly in the end, whatever fails or leaves."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import InternalError
from motet_shared.testing import memory_bus, running, settle
from support.checkpoints.asr_checkpoints import noise, wav
from support.clients.gateway_client import Http, Socket, session
from support.services.drawing_services import BRUSH, VECTORS, Embedder, FakeDiffusion
from support.services.fake_services import tool_call, words
from support.services.voice_services import (
    ASR_MODEL,
    VOICE,
    WORD_MS,
    ScriptedAsr,
    ScriptedTts,
    tone,
)
from support.stages.tenants_stage import ACME, Limited, bearer, limited, refused


class Studio(Limited):
    """With all services that are not for text."""

    asr: ScriptedAsr
    tts: ScriptedTts
    brush: FakeDiffusion

    def used(self, kind: str) -> float:
        """Of the limit of 100: pictures, or seconds of sound."""
        allowance = getattr(self.tenant(), kind)
        scale = 1_000_000 if kind == "audio" else 1
        return 100 - float(allowance.bucket.level) / scale


@asynccontextmanager
async def studio(tmp_path: Path, images: int = 100) -> AsyncIterator[Studio]:
    limits = f"images_per_hour = {images}\naudio_seconds_per_hour = 100\n"
    limits += "tokens_per_minute = 100\nconcurrent_streams = 20"
    async with limited(tmp_path, limits) as here, AsyncExitStack() as stack:
        made = Studio(here.made, here.now, here.path)
        hub = here.made.hub
        made.asr, made.tts = (
            ScriptedAsr(await memory_bus(hub, "asr")),
            ScriptedTts(await memory_bus(hub, "tts")),
        )
        made.brush = FakeDiffusion(await memory_bus(hub, "diffusion"))
        for actor in (
            made.asr,
            made.tts,
            made.brush,
            Embedder(None, await memory_bus(hub, "embedding")),
        ):
            await stack.enter_async_context(running(actor))
        await settle()
        yield made
        await settle(200)
        assert made.tenant().streams.open == made.tenant().sockets.open == 0, (
            "nothing is left behind"
        )
        await here.made.service.close()


def spend(here: Studio, kind: str, amount: int) -> None:
    tenant = here.tenant()
    tenant.spend(getattr(tenant, kind), amount * (1_000_000 if kind == "audio" else 1))


# --------------------------------------------------------------------------------------------------------------- speech
def say(here: Studio, text: str = "one two three", **fields: Any) -> Http:
    return here.ask(
        path="/v1/audio/speech", model=VOICE, input=text, response_format="pcm", **fields
    )


@pytest.mark.parametrize("fields", [{}, {"stream_format": "sse"}])
async def test_speech_costs_what_it_lasts(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with studio(tmp_path) as here:
        assert (await say(here, **fields).done()).status == 200
        assert here.used("audio") == pytest.approx(3 * WORD_MS / 1000)
        spend(here, "audio", 99)
        error = await refused(http := say(here))
        assert "100 audio seconds per hour" in error["message"]
        assert int(http.headers["retry-after"]) == pytest.approx(36 * 0.6, abs=1), (
            "100 in 3600 s: one in 36"
        )


async def test_speech_that_its_client_leaves_costs_what_was_made(tmp_path: Path) -> None:
    async with studio(tmp_path) as here:
        here.tts.pace = 60
        http = say(here)
        await settle(100)
        http.leave()
        await http.done()
        assert here.used("audio") == pytest.approx(WORD_MS / 1000)


# ----------------------------------------------------------------------------------------------------------------- ears
def hear(
    here: Studio, seconds: float, path: str = "/v1/audio/transcriptions", **fields: str
) -> Http:
    edge = "edge"
    parts = [f'--{edge}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in
             {"model": ASR_MODEL, **fields}.items()]  # fmt: skip
    head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    body = (
        "".join(parts).encode()
        + head.encode()
        + wav(noise(seconds))
        + f"\r\n--{edge}--\r\n".encode()
    )
    headers = {**bearer(), "content-type": f"multipart/form-data; boundary={edge}"}
    return Http(here.made.app, path, body, headers=headers)


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}])
async def test_a_file_costs_what_it_lasts(tmp_path: Path, fields: dict[str, str]) -> None:
    async with studio(tmp_path) as here:
        assert (await hear(here, 2.5, **fields).done()).status == 200
        assert here.used("audio") == pytest.approx(2.5)
        spend(here, "audio", 96)
        assert "3 were requested" in (await refused(hear(here, 2.5)))["message"], (
            "its header says how long it is"
        )
        assert (await hear(here, 1.25, "/v1/audio/translations").done()).status == 200


async def test_a_file_that_cannot_be_heard_costs_nothing_and_one_that_is_left_does(
    tmp_path: Path,
) -> None:
    async with studio(tmp_path) as here:
        here.asr.error = InternalError("a bug")
        assert (await hear(here, 2.5).done()).status == 500
        assert here.used("audio") == 0
        here.asr.error = None
        here.asr.go_on.clear()
        http = hear(here, 2.5)
        async with asyncio.timeout(20):
            while not here.asr.heard[1:]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        http.leave()
        await http.done()
        here.asr.go_on.set()
        assert here.used("audio") == pytest.approx(2.5)


# ------------------------------------------------------------------------------------------------------------- pictures
def paint(here: Studio, **fields: Any) -> Http:
    return here.ask(path="/v1/images/generations", model=BRUSH, prompt="a circle", **fields)


@pytest.mark.parametrize("fields", [{"n": 3}, {"stream": True}])
async def test_pictures_are_counted(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with studio(tmp_path) as here:
        assert (await paint(here, **fields).done()).status == 200
        assert here.used("images") == fields.get("n", 1)
        spend(here, "images", 96)
        assert "images per hour" in (await refused(paint(here, n=5)))["message"]


async def test_pictures_that_fail_cost_nothing_and_those_that_are_left_do(tmp_path: Path) -> None:
    async with studio(tmp_path) as here:
        here.brush.error = InternalError("a bug")
        assert (await paint(here, n=2).done()).status == 500
        assert here.used("images") == 0
        here.brush.go_on.clear()
        http = paint(here, n=2)
        await settle(100)
        http.leave()
        await http.done()
        assert here.used("images") == 2


async def test_more_than_an_hours_worth_at_once_is_a_bad_request(tmp_path: Path) -> None:
    for images in (0, 2):
        async with studio(tmp_path, images) as here:
            http = await paint(here, n=3).done()
            assert (http.status, http.json()["error"]["param"]) == (400, "n")


async def test_pictures_of_a_chat_count_too(tmp_path: Path) -> None:
    async with studio(tmp_path) as here:
        replies = iter([[tool_call(json.dumps({"prompt": "a circle"}))], words("There.")])
        here.made.tokenizer.reply = lambda request: next(replies)
        http = await here.done(tools=[{"type": "image_generation", "model": BRUSH}], max_tokens=20)
        assert http.status == 200, http.body
        assert len(http.json()["choices"][0]["message"]["images"]) == 1
        assert here.used("images") == 1
        assert here.used("tokens") == http.json()["usage"]["total_tokens"]


# ----------------------------------------------------------------------------------------------------------- embeddings
async def test_embeddings_cost_their_tokens(tmp_path: Path) -> None:
    async with studio(tmp_path) as here:
        http = await here.done(path="/v1/embeddings", model=VECTORS, input=["a", "b", "c"])
        assert http.json()["usage"]["total_tokens"] == here.used("tokens") == 15
        error = await refused(here.ask(path="/v1/embeddings", model=VECTORS, input=[[1] * 90]))
        assert error["type"] == "tokens"


# ------------------------------------------------------------------------------------------------------------- sessions
async def append(talk: Socket, milliseconds: int) -> Any:
    talk.send("input_audio_buffer.append", audio=base64.b64encode(tone(milliseconds)).decode())
    await settle(50)
    return (await talk.receive())["error"] if talk.pending() else None


@asynccontextmanager
async def listening(here: Studio) -> AsyncIterator[Socket]:
    async with session(here.made.app, headers=bearer(ACME)) as talk:
        talk.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        await talk.until("session.updated")
        yield talk


async def test_sound_in_is_charged_as_it_comes(tmp_path: Path) -> None:
    async with studio(tmp_path) as here, listening(here) as talk:
        for _ in range(50):
            assert await append(talk, 20) is None
        assert here.used("audio") == pytest.approx(1.0)
        spend(here, "audio", 98)
        assert await append(talk, 500) is None
        error = await append(talk, 600)
        assert error["code"] == "rate_limit_exceeded"
        assert "audio seconds" in error["message"]
        assert here.used("audio") == pytest.approx(99.5), "what is refused is not charged"
        talk.send("input_audio_buffer.append", audio="no base64!")
        assert (await talk.receive())["type"] == "error"
        here.now.wait(3600)
        assert await append(talk, 500) is None


async def test_sound_in_items_is_charged_too(tmp_path: Path) -> None:
    async with studio(tmp_path) as here, listening(here) as talk:
        content = [{"type": "input_audio", "audio": base64.b64encode(tone(400)).decode()}]
        item = {"type": "message", "role": "user", "content": content}
        talk.send("conversation.item.create", item=item)
        await talk.until("conversation.item.done")
        assert here.used("audio") == pytest.approx(0.4)
        talk.send(
            "response.create",
            response={"conversation": "none", "input": [item], "output_modalities": ["text"]},
        )
        await talk.until("rate_limits.updated")
        assert here.used("audio") == pytest.approx(0.8)


async def test_spoken_replies_are_charged_as_they_are_made(tmp_path: Path) -> None:
    async with studio(tmp_path) as here, listening(here) as talk:
        here.made.tokenizer.reply = lambda request: words("One two three.")
        talk.say("hello")
        talk.send("response.create", response={"max_output_tokens": 20})
        await talk.until("rate_limits.updated")
        assert here.used("audio") == pytest.approx(3 * WORD_MS / 1000)
        spend(here, "audio", 99)
        talk.send("response.create", response={"max_output_tokens": 20})
        error = (await talk.until("error", "response.done"))[-1]
        assert error["error"]["code"] == "rate_limit_exceeded"
