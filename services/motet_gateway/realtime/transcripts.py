"""What was said in the user's items: sound goes to the recognizer, text comes into the conversation.

Transcription runs beside everything else, at most once per item; a response that needs the words waits for them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from motet_pipelines.transcribe import NO_AUDIO, Hearing
from motet_pipelines.voice import understood
from motet_shared.audio import SAMPLE_BYTES, duration_ms
from motet_shared.errors import MotetError
from motet_shared.messages import Transcribe

from ..asgi import ClientGone
from ..problems import Problem
from ..service import Service
from ..wire import fresh_seed
from .audio_settings import Transcription, listener
from .channel import Channel
from .conversation import Conversation, Stored

_KIND = "conversation.item.input_audio_transcription"


class Transcripts:
    """Of one session, by item."""

    def __init__(self, service: Service, channel: Channel, conversation: Conversation):
        self._service, self._channel, self._conversation = service, channel, conversation
        self._tasks: dict[str, asyncio.Task[str]] = {}

    async def commit(self, item_id: str, pcm: bytes, rate: int, shown: Transcription | None) -> Stored:
        """Append a user's item with this sound, tell of it, and have it transcribed; `shown`: with events."""
        item = spoken_item(item_id)
        before = self._conversation.insert(item)
        event = self._channel.event
        await self._channel.send(
            event("input_audio_buffer.committed", previous_item_id=before, item_id=item_id),
            event("conversation.item.added", previous_item_id=before, item=item),
            event("conversation.item.done", previous_item_id=before, item=item),
        )
        self.begin(item, 0, pcm, rate, shown)
        return item

    def begin(self, item: Stored, index: int, pcm: bytes, rate: int, shown: Transcription | None) -> None:
        """Transcribe the sound of one content part of `item`; silence of no length needs no model."""
        if len(pcm) >= SAMPLE_BYTES:
            pcm = pcm[: len(pcm) - len(pcm) % SAMPLE_BYTES]
            work = self._transcribe(item, index, pcm, rate, shown)
            task = self._tasks[_key(item, index)] = asyncio.create_task(work, name="transcribe")
            task.add_done_callback(_seen)
        else:
            item["content"][index]["transcript"] = ""

    async def wait(self, items: list[Stored]) -> None:
        """Until the words of all these items are there. Raises, once, what went wrong with one of them."""
        for item in items:
            for index in range(len(item.get("content") or ())):
                if (task := self._tasks.get(_key(item, index))) is not None:
                    try:
                        await asyncio.shield(task)
                    finally:
                        if task.done():
                            self._tasks.pop(_key(item, index), None)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _transcribe(self, item: Stored, index: int, pcm: bytes, rate: int, shown: Transcription | None) -> str:
        where = {"item_id": item["id"], "content_index": index}
        try:
            text = await self._text(pcm, rate, shown, where)
        except MotetError as error:
            if shown is not None:
                problem = Problem.of(error)
                told = {key: value for key, value in problem.as_dict().items() if value is not None}
                await self._tell(f"{_KIND}.failed", **where, error=told)
            raise
        self._conversation.understand(item, index, text)
        self._tasks.pop(_key(item, index), None)
        if shown is not None:
            usage = {"type": "duration", "seconds": round(duration_ms(len(pcm), rate) / 1000, 3)}
            await self._tell(f"{_KIND}.completed", **where, transcript=text, usage=usage)
        return text

    async def _text(self, pcm: bytes, rate: int, shown: Transcription | None, where: dict[str, Any]) -> str:
        service, settings = self._service, shown or Transcription()
        request = Transcribe(
            model=listener(service.bus.directory, shown),
            audio=NO_AUDIO,
            language=settings.language or "",
            prompt=settings.prompt or "",
            seed=fresh_seed() & 0xFFFFFFFF,
            request_id=str(where["item_id"]),
        )
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        telling = asyncio.create_task(self._tell_pieces(pieces, where))
        try:
            return await understood(
                service.bus,
                await service.uploads(),
                pcm,
                rate,
                request,
                Hearing(),
                told=pieces.put_nowait if shown is not None else lambda text: None,
                deadline=service.config.request_timeout,
                patience=service.config.patience,
            )
        finally:
            pieces.put_nowait(None)
            await telling

    async def _tell_pieces(self, pieces: asyncio.Queue[str | None], where: dict[str, Any]) -> None:
        while (piece := await pieces.get()) is not None:
            await self._tell(f"{_KIND}.delta", **where, delta=piece)

    async def _tell(self, kind: str, **fields: Any) -> None:
        with suppress(ClientGone):  # the session notices by itself
            await self._channel.send(self._channel.event(kind, **fields))


def spoken_item(item_id: str) -> Stored:
    """A user's item whose words are not known yet."""
    content = [{"type": "input_audio", "transcript": None}]
    base = {"id": item_id, "object": "realtime.item", "type": "message", "status": "completed"}
    return {**base, "role": "user", "content": content}


def _key(item: Stored, index: int) -> str:
    return f"{item['id']}/{index}"


def _seen(task: asyncio.Task[str]) -> None:
    """An error that nobody waits for has been told."""
    if not task.cancelled():
        task.exception()
