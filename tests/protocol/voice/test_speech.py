"""From text to sound: the official client, the gateway on a real port, a real nats-server and the real service."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from motet_cli.main import main
from motet_gateway.audio.encoder import FORMATS
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.stages.served_gateway import KEY, Served, served
from support.stages.tts_stage import MODEL, TEXT, config

SEED: Any = {"seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tts_checkpoints.pocket_tts(
        tmp_path_factory.mktemp("tts") / "model", sample=True, threshold=0.2
    )


@dataclass
class Service(Served):
    tts: list[Tts]


@asynccontextmanager
async def serving(folder: Path, count: int = 1, **settings: Any) -> AsyncIterator[Service]:
    async with served("tts", lambda bus: Tts(config(folder, **settings), bus), count) as (
        gateway,
        speakers,
    ):
        yield Service(gateway, speakers)


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[Service]:
    async with serving(folder) as made:
        yield made


async def speech(client: openai.AsyncOpenAI, audio_format: Any = "pcm", **fields: Any) -> bytes:
    """The whole sound."""
    body: dict[str, Any] = {
        "model": MODEL,
        "input": TEXT,
        "voice": "anna",
        "extra_body": SEED,
        **fields,
    }
    return (await client.audio.speech.create(response_format=audio_format, **body)).content


async def test_every_format(service: Service) -> None:
    async with service.client() as client:
        pcm = await speech(client)
        assert len(pcm) > 5_000
        assert pcm == await speech(client)
        audio_format: Any
        for audio_format in FORMATS:
            async with client.audio.speech.with_streaming_response.create(
                model=MODEL, input=TEXT, voice="anna", response_format=audio_format, extra_body=SEED
            ) as reply:
                kind = reply.headers["content-type"]
                parts = [part async for part in reply.iter_bytes()]
            assert kind.startswith("audio/"), audio_format
            assert "content-length" not in reply.headers
            data = b"".join(parts)
            if audio_format == "pcm":
                assert data == pcm
            elif audio_format == "wav":
                assert data[44:] == pcm
            elif audio_format in ("pcmu", "pcma"):
                assert len(data) == pytest.approx(len(pcm) / 6, abs=1)
            assert len(data) > 300


async def test_the_defaults_are_those_of_the_api(service: Service) -> None:
    async with service.client() as client:
        reply = await client.audio.speech.create(model=MODEL, input="Hello there.", voice="alloy")
        assert reply.response.headers["content-type"] == "audio/mpeg"
        assert reply.content[0] == 0xFF  # a frame of MPEG audio, without a tag before it
        slow, fast = [await speech(client, speed=speed) for speed in (0.5, 2.0)]
        assert len(slow) == pytest.approx(4 * len(fast), rel=0.02)


async def test_events(service: Service) -> None:
    async with service.client() as client:
        pcm = await speech(client)
        async with client.audio.speech.with_streaming_response.create(
            model=MODEL,
            input=TEXT,
            voice="anna",
            response_format="pcm",
            stream_format="sse",
            extra_body=SEED,
        ) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = [
                json.loads(line[6:])
                async for line in reply.iter_lines()
                if line.startswith("data: ")
            ]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == pcm
    assert len(deltas) > 4
    assert done["type"] == "speech.audio.done"
    usage = done["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert min(usage["input_tokens"], usage["output_tokens"]) > 0
    assert [word["word"] for word in done["words"]] == TEXT.split()
    assert done["words"][-1]["end"] == pytest.approx(len(pcm) / 48_000, abs=0.002)


async def test_models_and_voices(service: Service) -> None:
    async with service.client() as client:
        models = [model async for model in client.models.list()]
        assert [(model.id, getattr(model, "kind", "")) for model in models] == [(MODEL, "speech")]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        voices: Any = await client.get("/audio/voices", cast_to=object)
        assert [(voice["id"], voice["model"]) for voice in voices["data"]] == [
            ("anna", MODEL),
            ("ben", MODEL),
        ]


async def test_errors_have_openais_shape(service: Service) -> None:
    wrong: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None]] = [
        ({"model": "tts-99"}, openai.NotFoundError, "model"),
        ({"input": ""}, openai.BadRequestError, "input"),
        ({"input": "  "}, openai.BadRequestError, "input"),
        ({"voice": "zoe"}, openai.BadRequestError, "voice"),
        ({"speed": 5}, openai.BadRequestError, "speed"),
        ({"response_format": "midi"}, openai.BadRequestError, "response_format"),
        ({"stream_format": "smoke"}, openai.BadRequestError, "stream_format"),
        ({"instructions": "whisper"}, openai.BadRequestError, "instructions"),
        ({"extra_body": {"pitch": 3}}, openai.BadRequestError, "pitch"),
    ]
    async with service.client() as client, service.client("wrong") as stranger:
        for fields, error, param in wrong:
            with pytest.raises(error) as raised:
                await client.audio.speech.create(
                    **{"model": MODEL, "input": "hi", "voice": "anna", **fields}
                )
            assert raised.value.param == param, fields
        with pytest.raises(openai.AuthenticationError):
            await stranger.audio.speech.create(model=MODEL, input="hi", voice="anna")


async def test_who_hangs_up_stops_the_speech(service: Service) -> None:
    (speaker,) = service.tts
    async with (
        service.client() as client,
        client.audio.speech.with_streaming_response.create(
            model=MODEL, input=TEXT * 100, voice="anna", response_format="pcm"
        ) as reply,
    ):
        async for _ in reply.iter_bytes():
            break
    async with asyncio.timeout(20):
        while speaker.bus.calls.active:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    service.gateway.check_integrity()


async def test_the_sound_goes_on_when_its_instance_dies(folder: Path) -> None:
    async with serving(folder, 2) as service, service.client() as client:
        whole = await speech(client, input=TEXT * 8)
        async with client.audio.speech.with_streaming_response.create(
            model=MODEL, input=TEXT * 8, voice="anna", response_format="pcm", extra_body=SEED
        ) as reply:
            data = b""
            async for part in reply.iter_bytes():
                if not data:
                    victim = next(speaker for speaker in service.tts if speaker.bus.calls.active)
                    await _silence(victim)
                data += part
        assert data == whole


async def _silence(speaker: Tts) -> None:
    """Its connections to NATS are gone, as if its process were."""
    for transport in (speaker.bus.frames, speaker.bus.control):
        await transport.close()


async def test_overload_gets_429(folder: Path) -> None:
    async with serving(folder, max_running=1, max_waiting=0) as service, service.client() as client:
        results = await asyncio.gather(
            *(speech(client, input=TEXT * 5) for _ in range(4)), return_exceptions=True
        )
        assert any(isinstance(result, openai.RateLimitError) for result in results)
        assert any(isinstance(result, bytes) for result in results)


async def test_motet_say(
    service: Service, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    common = ("say", "--url", service.url, "--api-key-file", str(key), "--voice", "ben")

    async def say(*argv: str) -> int:
        return await asyncio.to_thread(main, [*common, *argv])

    for ending in ("mp3", "ogg", "flac", "wav", "pcm"):
        file = tmp_path / f"said.{ending}"
        assert await say("-o", str(file), "Hello", "there.") == 0
        assert file.stat().st_size > 200
    assert (tmp_path / "said.wav").read_bytes()[:4] == b"RIFF"
    assert await say("-o", str(tmp_path / "x.mid"), "hello") == 2
    assert b"names no format" in capsysbinary.readouterr().err
    assert await say("-o", str(tmp_path / "none.wav"), "--model", "nobody", "hello") == 1
    assert not (tmp_path / "none.wav").exists()
    assert b"is no tts model here" in capsysbinary.readouterr().err
