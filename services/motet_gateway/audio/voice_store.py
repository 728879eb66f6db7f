"""Keep the voices of tenants: a record, and the recording as PCM, until they are deleted."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from msgspec import Struct

from motet_gateway.http.problems import NotFound, QuotaExceeded
from motet_gateway.storage.documents import Documents
from motet_gateway.storage.quota import Stored
from motet_gateway.storage.records import missing, read_record
from motet_media.audio import SAMPLE_BYTES
from motet_pipelines.voice.speak import RATE

SCHEMA = 1  # version of what is stored; increase it with a change that older versions cannot read
MOST = 100  # voices of a tenant
_PARAM = "audio_sample"
_ID = re.compile(r"voice_[0-9a-f]{24}")


class StoredVoice(Struct, kw_only=True, omit_defaults=True):
    """A voice as it is stored.

    words: what is said in its recording, which has so many `bytes`. created_at: Unix seconds.
    """

    version: int = SCHEMA
    id: str
    name: str
    words: str
    bytes: int
    created_at: int

    def as_dict(self) -> dict[str, Any]:
        """Return the voice as clients see it."""
        return {
            "id": self.id,
            "object": "audio.voice",
            "name": self.name,
            "text": self.words,
            "seconds": round(self.bytes / (RATE * SAMPLE_BYTES), 3),
            "created_at": self.created_at,
        }


_record = msgspec.json.Decoder(StoredVoice).decode


class VoiceStore:
    """Keep the voices of all tenants. Every method raises Unavailable if the store is away."""

    def __init__(self, documents: Documents, stored: Stored):
        self.documents, self._stored = documents, stored
        stored.meters.append(documents.used)

    async def check_count(self, owner: str) -> None:
        """Raise QuotaExceeded if the tenant has as many voices as it may have."""
        if len(await self.documents.names(owner, "voices")) >= MOST:
            message = f"this key has stored {MOST} voices, the most allowed; delete some"
            raise QuotaExceeded(message, param=_PARAM)

    async def write(self, owner: str, voice: StoredVoice, pcm: bytes) -> None:
        """Store a voice. Raises QuotaExceeded unless the tenant may store so many bytes."""
        await self._stored.check(owner, len(pcm), _PARAM)
        try:
            await self.documents.put(owner, f"samples.{voice.id}", pcm)
            await self.documents.put(owner, f"voices.{voice.id}", msgspec.json.encode(voice))
        except BaseException:
            await asyncio.shield(self.delete(owner, voice))
            raise

    async def get(self, owner: str, voice_id: str) -> StoredVoice:
        """Return the record of a voice. Raises NotFound if this tenant has none of that id."""
        what = f"voice {voice_id[:80]!r}"
        if not _ID.fullmatch(voice_id):
            raise missing(what)
        return await read_record(
            self.documents, owner, f"voices.{voice_id}", _record, what=what, schema=SCHEMA
        )

    async def sample(self, owner: str, voice: StoredVoice) -> bytes:
        """Return the recording of a voice, PCM at the rate of speech."""
        return await self.documents.get(owner, f"samples.{voice.id}")

    async def all(self, owner: str) -> list[StoredVoice]:
        """Return the voices of a tenant, the oldest first."""
        names = await self.documents.names(owner, "voices")
        found = await asyncio.gather(*(self._if_there(owner, name) for name in names))
        return [voice for voice in found if voice is not None]

    async def _if_there(self, owner: str, name: str) -> StoredVoice | None:
        try:
            return await self.get(owner, name.removeprefix("voices."))
        except NotFound:
            return None

    async def delete(self, owner: str, voice: StoredVoice) -> None:
        """Delete a voice: the record first, so that a voice that is listed has its recording."""
        await self.documents.delete(owner, f"voices.{voice.id}")
        await self.documents.delete(owner, f"samples.{voice.id}")
