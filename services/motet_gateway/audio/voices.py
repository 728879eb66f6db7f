"""Serve /v1/audio/voices: voices of the models, and those that tenants make of recordings."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from motet_gateway.context import GatewayContext
from motet_gateway.files.store import new_id
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.multipart import Form, read_form
from motet_gateway.tenancy.tenant import SECOND
from motet_gateway.tenancy.usage import settled
from motet_media.audio import SAMPLE_BYTES
from motet_media.pool import decoding
from motet_media.sound_file import Samples, claimed_seconds, read_audio
from motet_pipelines.voice.speak import RATE, ClonedVoice
from motet_shared.errors import BadRequest, Unavailable
from motet_shared.wire.instances import served

from .voice_store import StoredVoice, VoiceStore

NO_STORE = "voices are not stored here; the server needs JetStream (motet up --store FOLDER)"
SAMPLE, WORDS, CONSENT, NAME = "audio_sample", "text", "consent", "name"
SECONDS = (1.0, 30.0)  # shortest and longest recording
LONGEST_NAME, LONGEST_WORDS = 64, 1000  # characters
PREFIX = "voice_"


def voices_of(service: GatewayContext) -> VoiceStore:
    """Return the store of voices; raises Unavailable without one."""
    if service.voices is None:
        raise Unavailable(NO_STORE)
    return service.voices


async def create_voice(service: GatewayContext, http: Exchange) -> None:
    """Store the recording of a voice, to speak with it by its id."""
    store, owner = voices_of(service), http.tenant.owner
    service.check_open()
    await store.check_count(owner)
    form = await read_form(http, service.config.max_upload, files=(SAMPLE,))
    sound, name, words = _given(form)
    pcm = await _decoded(http, sound)
    voice = StoredVoice(
        id=new_id(PREFIX), name=name, words=words, bytes=len(pcm), created_at=int(time.time())
    )
    await store.write(owner, voice, pcm)
    await http.reply(200, msgspec.json.encode(voice.as_dict()))


async def list_voices(service: GatewayContext, http: Exchange) -> None:
    """Answer the voices of all speech models, and then those of the tenant."""
    cards = served(service.bus.directory, "tts").values()
    voices: list[dict[str, Any]] = [
        {"id": voice, "object": "audio.voice", "model": card.name}
        for card in cards
        for voice in card.voices
    ]
    if service.voices is not None:
        voices += [voice.as_dict() for voice in await service.voices.all(http.tenant.owner)]
    await http.reply(200, msgspec.json.encode({"object": "list", "data": voices}))


async def delete_voice(service: GatewayContext, http: Exchange) -> None:
    """Delete a voice of the tenant, with its recording."""
    store, owner = voices_of(service), http.tenant.owner
    voice = await store.get(owner, http.scope["path_params"]["voice_id"])
    await store.delete(owner, voice)
    answer = {"id": voice.id, "object": "audio.voice", "deleted": True}
    await http.reply(200, msgspec.json.encode(answer))


async def cloned_voice(
    service: GatewayContext, owner: str, model: str, voice: str, param: str = "voice"
) -> ClonedVoice | None:
    """Return the recording that a voice id of the tenant stands for; None for a model's voice.

    `param` names the voice in errors. Raises BadRequest if the model imitates no voices, NotFound
    if the tenant has no such voice.
    """
    if not voice.startswith(PREFIX):
        return None
    card = served(service.bus.directory, "tts").get(model)
    if card is not None and voice in card.voices:
        return None
    if card is not None and not card.clones:
        raise BadRequest(
            f"`{param}`: {model!r} imitates no voices; choose one of {', '.join(card.voices)}",
            param=param,
        )
    store = voices_of(service)
    stored = await store.get(owner, voice)
    return ClonedVoice(await service.uploads(), await store.sample(owner, stored), stored.words)


def _given(form: Form) -> tuple[bytes, str, str]:
    """Return sound, name and words of a form. Raises BadRequest that names the wrong field."""
    values: dict[str, str] = {}
    for field, entries in form.fields.items():
        if field not in (NAME, WORDS, CONSENT):
            raise BadRequest(
                f"`{field}` is unknown; give {NAME}, {WORDS}, {CONSENT} and {SAMPLE}", param=field
            )
        if len(entries) > 1:
            raise BadRequest(f"`{field}` is given {len(entries)} times; give it once", param=field)
        values[field] = entries[0]
    if values.get(CONSENT) != "true":
        raise BadRequest(
            f"`{CONSENT}` is {values.get(CONSENT)!r}; send true if the speaker agrees to this use",
            param=CONSENT,
        )
    name = _text(values, NAME, LONGEST_NAME)
    words = _text(values, WORDS, LONGEST_WORDS)
    if not (sounds := form.files.get(SAMPLE)):
        raise BadRequest(f"`{SAMPLE}` is required; send it as a file", param=SAMPLE)
    return sounds[0], name, words


def _text(values: dict[str, str], field: str, longest: int) -> str:
    text = values.get(field, "").strip()
    if not 0 < len(text) <= longest:
        raise BadRequest(f"`{field}` has {len(text)} characters; give 1 to {longest}", param=field)
    return text


async def _decoded(http: Exchange, sound: bytes) -> bytes:
    """Return a recording as PCM at `RATE`, decoded at the tenant's expense.

    Raises BadRequest if it is no sound, too short or too long.
    """
    async with http.while_connected():
        claimed = await decoding(claimed_seconds, sound)
        expected = int(min(max(claimed, SECONDS[0]), SECONDS[1]) * SECOND)
        samples: Samples = np.zeros(0, np.float32)
        with (
            await http.tenant.take(audio=expected) as ticket,
            settled(ticket.audio, expected, lambda: len(samples) * SECOND // RATE),
        ):
            try:
                samples = await decoding(read_audio, sound, SECONDS[1], RATE)
            except BadRequest as error:
                raise BadRequest(f"`{SAMPLE}`: {error.message}", param=SAMPLE) from None
    if len(samples) < SECONDS[0] * RATE:
        raise BadRequest(
            f"`{SAMPLE}` lasts {len(samples) / RATE:.1f} s; give {SECONDS[0]:g} to {SECONDS[1]:g} s",
            param=SAMPLE,
        )
    pcm = np.clip(np.rint(samples * 32767), -32768, 32767).astype("<i2").tobytes()
    assert len(pcm) == SAMPLE_BYTES * len(samples)
    return pcm
