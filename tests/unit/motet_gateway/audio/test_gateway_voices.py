"""Tenants make voices of recordings and speak with them; each has its own, up to its quota of bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motet_gateway.audio.voice_store import MOST, VoiceStore
from motet_gateway.audio.voices import SECONDS
from motet_shared.testing import memory_bus, running, settle
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import Utterance
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.clients.gateway_client import Http, session
from support.media.sound_files import float_wav, tone
from support.services.memory_documents import MemoryDocuments
from support.stages.tenants_stage import ACME, OTHER, Limited, bearer, limited
from support.stages.tts_stage import MODEL, config

RATE = 24_000  # Hz
FORM = {"name": "Ada", "text": "no one knows", "consent": "true"}
EDGE = "edge"


class Booth:
    """Hold a gateway of two tenants and a speech model."""

    def __init__(self, here: Limited, documents: MemoryDocuments):
        self.here, self.documents = here, documents

    def create(self, sound: bytes, key: str = ACME, **fields: str) -> Http:
        given = {**FORM, **fields}
        parts = [
            f'--{EDGE}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in given.items()
        ]
        head = 'Content-Disposition: form-data; name="audio_sample"; filename="a.wav"'
        body = "".join(parts).encode() + f"--{EDGE}\r\n{head}\r\n\r\n".encode() + sound
        headers = {**bearer(key), "content-type": f"multipart/form-data; boundary={EDGE}"}
        end = f"\r\n--{EDGE}--\r\n".encode()
        return Http(self.here.made.app, "/v1/audio/voices", body + end, headers=headers)

    async def created(self, sound: bytes, key: str = ACME, **fields: str) -> Any:
        http = await self.create(sound, key, **fields).done()
        assert http.status == 200, http.body
        return http.json()

    async def own(self, key: str = ACME) -> list[Any]:
        """Return the voices of a tenant that are not of a model."""
        http = await self.here.made.get("/v1/audio/voices", bearer(key)).done()
        return [voice for voice in http.json()["data"] if "model" not in voice]

    async def speech(self, voice: Any, key: str = ACME, **fields: Any) -> Http:
        asked = {"input": "hello there", "response_format": "pcm", "seed": 3, **fields}
        return await self.here.ask(
            key, "/v1/audio/speech", model=MODEL, voice=voice, **asked
        ).done()

    async def delete(self, voice: str, key: str = ACME) -> Http:
        path = f"/v1/audio/voices/{voice}"
        return await Http(self.here.made.app, path, b"", "DELETE", bearer(key)).done()


@asynccontextmanager
async def booth(
    tmp_path: Path, family: str = "pocket_tts", limits: str = ""
) -> AsyncIterator[Booth]:
    folder = tts_checkpoints.MAKERS[family](tmp_path / "model")
    async with limited(tmp_path, limits) as here, AsyncExitStack() as stack:
        service = here.made.service
        documents = MemoryDocuments()
        service.voices = VoiceStore(documents, service.stored)
        bus = await memory_bus(here.made.hub, "tts")
        stack.push_async_callback(bus.close)
        await stack.enter_async_context(running(Tts(config(folder), bus)))
        await settle()
        yield Booth(here, documents)
        await service.close()


def recording(seconds: float = 1.5, pitch: float = 220.0) -> bytes:
    return float_wav(tone(seconds, RATE, pitch), RATE)


def refused(http: Http, param: str, status: int = 400) -> None:
    assert http.status == status, http.body
    assert http.json()["error"]["param"] == param


async def test_a_voice_is_made_used_listed_and_deleted(tmp_path: Path) -> None:
    async with booth(tmp_path) as here:
        made = await here.created(recording())
        assert made["id"].startswith("voice_")
        assert (made["name"], made["text"], made["seconds"]) == ("Ada", "no one knows", 1.5)
        assert await here.own() == [made]
        plain, cloned = await here.speech("anna"), await here.speech(made["id"])
        assert (plain.status, cloned.status) == (200, 200)
        assert cloned.body
        assert cloned.body != plain.body
        again = await here.speech({"id": made["id"]})
        assert again.body == cloned.body, "the same seed and voice make the same speech"
        other = await here.created(recording(pitch=900.0))
        assert (await here.speech(other["id"])).body != cloned.body
        assert (await here.delete(made["id"])).json()["deleted"]
        assert await here.own() == [other]
        assert (await here.speech(made["id"])).status == 404
        assert (await here.delete(made["id"])).status == 404
        assert all(made["id"] not in name for _, name in here.documents.kept)


async def test_tenants_find_nothing_of_each_other(tmp_path: Path) -> None:
    async with booth(tmp_path) as here:
        made = await here.created(recording())
        assert await here.own(OTHER) == []
        assert (await here.speech(made["id"], OTHER)).status == 404
        assert (await here.delete(made["id"], OTHER)).status == 404
        assert await here.own() == [made]


async def test_what_makes_no_voice_is_refused_by_name(tmp_path: Path) -> None:
    async with booth(tmp_path) as here:
        sound = recording()
        for consent in ("false", "True", "", "yes"):
            refused(await here.create(sound, consent=consent).done(), "consent")
        refused(await here.create(sound, name=" ").done(), "name")
        refused(await here.create(sound, text="").done(), "text")
        refused(await here.create(sound, colour="red").done(), "colour")
        refused(await here.create(b"no sound at all").done(), "audio_sample")
        refused(await here.create(recording(0.4)).done(), "audio_sample")
        refused(await here.create(recording(SECONDS[1] + 1)).done(), "audio_sample")
        assert not here.documents.kept


async def test_models_that_clone_no_voices_refuse_them_by_name(tmp_path: Path) -> None:
    async with booth(tmp_path, "vits") as here:
        made = await here.created(recording())
        refused(await here.speech(made["id"]), "voice")


async def test_recordings_count_against_the_bytes_and_the_seconds_of_a_tenant(
    tmp_path: Path,
) -> None:
    limits = "stored_bytes = 100_000\naudio_seconds_per_hour = 600"
    async with booth(tmp_path, limits=limits) as here:
        bucket = here.here.tenant().audio.bucket
        before = bucket.level
        await here.created(recording(1.5))
        assert before - bucket.level == pytest.approx(1.5e6, rel=0.01)
        http = await here.create(recording(2.0)).done()
        refused(http, "audio_sample", 429)
        assert len(await here.own()) == 1


async def test_a_tenant_has_so_many_voices(tmp_path: Path) -> None:
    async with booth(tmp_path) as here:
        for number in range(MOST):
            here.documents.kept["acme", f"voices.voice_{number:024x}"] = b"{}"
        refused(await here.create(recording()).done(), "audio_sample", 429)


async def test_without_a_store_voices_are_unavailable(tmp_path: Path) -> None:
    async with booth(tmp_path) as here:
        here.here.made.service.voices = None
        assert (await here.create(recording()).done()).status == 503
        assert (await here.speech("voice_" + 24 * "0")).status == 503
        assert await here.own() == []


async def test_sessions_speak_with_a_voice_of_the_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[Any] = []
    add = Engine.add

    def added(engine: Engine, key: Any, utterance: Utterance) -> None:
        samples.append(utterance.sample)
        add(engine, key, utterance)

    monkeypatch.setattr(Engine, "add", added)
    async with booth(tmp_path) as here:
        made = await here.created(recording())
        app = here.here.made.app
        async with session(app, headers=bearer(OTHER)) as socket:
            socket.send("session.update", session=_speaking(made["id"]))
            assert (await socket.expect("error"))["error"]["code"] == "not_found"
        async with session(app, headers=bearer()) as socket:
            socket.send("session.update", session=_speaking(made["id"]))
            updated = await socket.expect("session.updated")
            assert updated["session"]["audio"]["output"]["voice"] == made["id"]
            socket.say("hello you")
            socket.send("response.create")
            events = await socket.until("response.done", "error")
            assert any(event["type"] == "response.output_audio.delta" for event in events)
        assert [sample.words for sample in samples] == [made["text"]] * len(samples)
        assert samples


def _speaking(voice: str) -> dict[str, Any]:
    return {"type": "realtime", "audio": {"output": {"voice": voice}}}
