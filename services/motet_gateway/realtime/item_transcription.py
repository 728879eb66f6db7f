"""Transcribe the audio of user items, and store the text in the conversation.

Transcription runs concurrently, at most once per item; a response that needs the text waits for
it. Where live captions exist, only their last words remain to wait for.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from motet_gateway.context import GatewayContext
from motet_gateway.openai.requests import random_seed
from motet_media.audio import SAMPLE_BYTES, duration_ms
from motet_pipelines.voice.captions import Captions
from motet_pipelines.voice.retranscription import continued
from motet_pipelines.voice.transcribe import NO_AUDIO, TranscriptionOutcome
from motet_pipelines.voice.voice import transcribe_turn
from motet_shared.errors import MotetError
from motet_shared.messages import Transcribe

from .audio_settings import Transcription, listener
from .channel import Channel
from .conversation import Conversation, Stored
from .transcription_events import TranscriptionEvents


@dataclass(frozen=True, slots=True)
class HeardPart:
    """Audio of one content part, its transcription settings, and its live captions if any."""

    pcm: bytes
    rate: int
    shown: Transcription | None  # None: the client gets no events
    captions: Captions | None = None

    @property
    def seconds(self) -> float:
        return duration_ms(len(self.pcm), self.rate) / 1000


class ItemTranscription:
    """Transcribe the items of one session."""

    def __init__(self, service: GatewayContext, channel: Channel, conversation: Conversation):
        self._service, self._channel, self._conversation = service, channel, conversation
        self._tasks: dict[str, asyncio.Task[str]] = {}
        self._open: dict[str, TranscriptionEvents] = {}  # by id of open items

    def follow(self, item_id: str, captions: Captions) -> None:
        """Send the words of an item that is not committed yet."""
        transcript = self._open[item_id] = TranscriptionEvents(
            self._channel, item_id, 0, shown=True
        )
        transcript.follow(captions)

    async def forget(self, item_id: str) -> None:
        """Discard the transcription of an item that will never be committed."""
        if (transcript := self._open.pop(item_id, None)) is not None:
            await transcript.close()

    async def commit(self, item_id: str, heard: HeardPart) -> Stored:
        """Append a user item with this audio, announce it, and start its transcription."""
        item = spoken_item(item_id)
        before = self._conversation.insert(item)
        event = self._channel.event
        await self._channel.send(
            event("input_audio_buffer.committed", previous_item_id=before, item_id=item_id),
            event("conversation.item.added", previous_item_id=before, item=item),
            event("conversation.item.done", previous_item_id=before, item=item),
        )
        self.begin(item, 0, heard)
        return item

    def begin(self, item: Stored, index: int, heard: HeardPart) -> None:
        """Transcribe the audio of one content part of `item`; empty audio needs no model."""
        if heard.captions is not None or len(heard.pcm) >= SAMPLE_BYTES:
            task = self._tasks[_key(item, index)] = asyncio.create_task(
                self._transcribe(item, index, heard), name="transcribe"
            )
            task.add_done_callback(_seen)
        else:
            item["content"][index]["transcript"] = ""

    async def wait(self, items: list[Stored]) -> None:
        """Wait until the words of all these items are known. Raises each error only once."""
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
        for item_id in list(self._open):
            await self.forget(item_id)

    async def _transcribe(self, item: Stored, index: int, heard: HeardPart) -> str:
        transcript = self._open.pop(item["id"], None)
        if transcript is None:
            transcript = TranscriptionEvents(
                self._channel, item["id"], index, shown=heard.shown is not None
            )
        try:
            text = await self._text(item["id"], heard, transcript)
            self._conversation.understand(item, index, text)
            self._tasks.pop(_key(item, index), None)
            await transcript.complete(text, heard.seconds)
            return text
        except MotetError as error:
            await transcript.fail(error)
            raise
        finally:
            await transcript.close()
            if heard.captions is not None:
                await heard.captions.close()

    async def _text(self, item_id: str, heard: HeardPart, transcript: TranscriptionEvents) -> str:
        """Return the live text, or the whole audio's; it begins with what was already sent."""
        text = None if heard.captions is None else await self._live(heard.captions)
        if text is None:
            told = transcript.told
            text = await self._understood(item_id, heard, None if told else transcript)
        transcript.add(continued(transcript.told, text))
        return transcript.told.strip() or text

    async def _live(self, captions: Captions) -> str | None:
        """Return the live captions' final text; None if they failed or timed out."""
        try:
            return await asyncio.wait_for(captions.settled(), self._service.config.request_timeout)
        except (MotetError, TimeoutError):
            return None

    async def _understood(
        self, item_id: str, heard: HeardPart, transcript: TranscriptionEvents | None
    ) -> str:
        service, settings = self._service, heard.shown or Transcription()
        request = Transcribe(
            model=listener(service.bus.directory, heard.shown),
            audio=NO_AUDIO,
            language=settings.language or "",
            prompt=settings.prompt or "",
            seed=random_seed() & 0xFFFFFFFF,
            request_id=item_id,
        )
        return await transcribe_turn(
            service.bus,
            await service.uploads(),
            heard.pcm[: len(heard.pcm) - len(heard.pcm) % SAMPLE_BYTES],
            heard.rate,
            request,
            TranscriptionOutcome(),
            on_text=(lambda piece: None) if transcript is None else transcript.add,
            deadline=service.config.request_timeout,
            patience=service.config.patience,
        )


def spoken_item(item_id: str) -> Stored:
    """Return a user item whose words are not known yet."""
    content = [{"type": "input_audio", "transcript": None}]
    base = {"id": item_id, "object": "realtime.item", "type": "message", "status": "completed"}
    return {**base, "role": "user", "content": content}


def _key(item: Stored, index: int) -> str:
    return f"{item['id']}/{index}"


def _seen(task: asyncio.Task[str]) -> None:
    """Retrieve the exception of a task that no response waits for; the client has its event."""
    if not task.cancelled():
        task.exception()
