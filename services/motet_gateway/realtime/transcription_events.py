"""Send the transcript of one spoken part: `delta`s, then `completed` or `failed`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from motet_gateway.http.asgi import ClientGone
from motet_gateway.http.problems import Problem
from motet_pipelines.voice.captions import Captions
from motet_pipelines.voice.retranscription import continued
from motet_shared.errors import MotetError

from .channel import Channel

_KIND = "conversation.item.input_audio_transcription"


class TranscriptionEvents:
    """Send transcription events if `shown`; the deltas add up to the `completed` text."""

    def __init__(self, channel: Channel, item_id: str, index: int, *, shown: bool):
        self.told = ""
        self._channel, self._shown = channel, shown
        self._where = {"item_id": item_id, "content_index": index}
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send(), name="transcript")

    def add(self, piece: str) -> None:
        """Send the next words."""
        if self._shown and piece:
            self.told += piece
            self._put("delta", delta=piece)

    def follow(self, captions: Captions) -> None:
        """Send the stable text of live captions as it grows."""
        captions.on_change(lambda: self.add(continued(self.told, captions.stable)))
        self.add(captions.stable)

    async def complete(self, text: str, seconds: float) -> None:
        self._put(
            "completed", transcript=text, usage={"type": "duration", "seconds": round(seconds, 3)}
        )
        await self._end()

    async def fail(self, error: MotetError) -> None:
        problem = Problem.of(error).as_dict()
        self._put(
            "failed", error={key: value for key, value in problem.items() if value is not None}
        )
        await self._end()

    async def close(self) -> None:
        """Stop sending; events that are still queued are dropped."""
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)

    def _put(self, step: str, **fields: Any) -> None:
        if self._shown:
            self._events.put_nowait(self._channel.event(f"{_KIND}.{step}", **self._where, **fields))

    async def _end(self) -> None:
        self._events.put_nowait(None)
        await self._sending

    async def _send(self) -> None:
        with suppress(ClientGone):  # the session detects the disconnect by itself
            while (event := await self._events.get()) is not None:
                await self._channel.send(event)
