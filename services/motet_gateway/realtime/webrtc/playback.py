"""Play the speech of a session's replies in real time, and know how much of it was heard."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Literal

import msgspec

from motet_media.audio import duration_ms
from motet_pipelines.voice.conversation.events import (
    Event,
    OutputClosed,
    OutputOpened,
    ReplyEnded,
    ReplyStarted,
    SpeechDelta,
)
from motet_pipelines.voice.speak import RATE

Change = Literal["started", "stopped", "cleared"]


@dataclass(slots=True)
class _Message:
    """A spoken message that is being played.

    item_id: None outside of the conversation. closed: all of its sound has come.
    """

    reply_id: str
    index: int
    item_id: str | None
    pcm: bytearray
    played: int = 0  # bytes
    closed: bool = False


class Playback:
    """Play one message after another, a frame at a time.

    changes: what is reported of the output buffer, with the id of the response.
    """

    def __init__(self) -> None:
        self.changes: asyncio.Queue[tuple[Change, str]] = asyncio.Queue()
        self._messages: deque[_Message] = deque()
        self._outside: set[str] = set()  # replies outside of the conversation
        self._running: set[str] = set()  # replies that may still send speech
        self._silenced: set[str] = set()  # running replies of which no more is played
        self._playing: str | None = None  # the reply whose start was reported
        self._silent = asyncio.Event()
        self._silent.set()

    # ------------------------------------------------------------------------------- speech arrives
    def take(self, event: Event) -> Event:
        """Play the speech of an event; return the event without it."""
        if isinstance(event, ReplyStarted):
            self._running.add(event.reply_id)
            if not event.in_conversation:
                self._outside.add(event.reply_id)
        elif isinstance(event, OutputOpened) and event.kind == "speech":
            item_id = None if event.reply_id in self._outside else str(event.item["id"])
            self._messages.append(_Message(event.reply_id, event.index, item_id, bytearray()))
            self._silent.clear()
        elif isinstance(event, SpeechDelta):
            self._append(event)
            return msgspec.structs.replace(event, pcm=b"")
        elif isinstance(event, OutputClosed):
            for message in self._messages_of(event):
                message.closed = True
        elif isinstance(event, ReplyEnded):
            for group in (self._running, self._silenced, self._outside):
                group.discard(event.reply_id)
        return event

    def _append(self, event: SpeechDelta) -> None:
        if event.reply_id in self._silenced:
            return
        for message in self._messages_of(event):
            message.pcm += event.pcm

    def _messages_of(self, event: SpeechDelta | OutputClosed) -> list[_Message]:
        """Return the message of an event, if it is spoken and still to be played."""
        place = event.reply_id, event.index
        return [one for one in self._messages if (one.reply_id, one.index) == place]

    # -------------------------------------------------------------------------------- speech leaves
    def frame(self, size: int) -> bytes:
        """Return the next `size` bytes of PCM at `RATE` Hz; silence follows speech that ends."""
        parts: list[bytes] = []
        missing = size
        while missing and (message := self._current()) is not None:
            self._start(message.reply_id)
            part = bytes(message.pcm[:missing])
            del message.pcm[: len(part)]
            message.played += len(part)
            missing -= len(part)
            parts.append(part)
        return b"".join(parts) + bytes(missing)

    def _current(self) -> _Message | None:
        """Return the message whose sound comes next, without those that were played to the end."""
        while self._messages:
            message = self._messages[0]
            if message.pcm:
                return message
            if self._is_awaited(message):
                return None
            self._messages.popleft()
        self._silent.set()
        self._stop()
        return None

    def _is_awaited(self, message: _Message) -> bool:
        """Return True if more of a played message may come, or the next one of its reply."""
        if message.reply_id not in self._running:
            return False
        may_grow = not message.closed and message.reply_id not in self._silenced
        return may_grow or len(self._messages) == 1

    def _start(self, reply_id: str) -> None:
        if self._playing != reply_id:
            self._stop()
            self._playing = reply_id
            self.changes.put_nowait(("started", reply_id))

    def _stop(self) -> None:
        if self._playing is not None:
            self.changes.put_nowait(("stopped", self._playing))
            self._playing = None

    def clear(self) -> list[tuple[str, int]]:
        """Play no more of what there is; return the items that are cut, with the ms played."""
        cut = [
            (message.item_id, int(duration_ms(message.played, RATE)))
            for message in self._messages
            if message.item_id is not None
            and (message.pcm or (message.reply_id in self._running and not message.closed))
        ]
        replies = [message.reply_id for message in self._messages]
        self._silenced |= self._running.intersection(replies)
        self._messages.clear()
        self._silent.set()
        if cleared := self._playing or next(iter(replies), None):
            self.changes.put_nowait(("cleared", cleared))
        self._playing = None
        return cut

    async def finish(self) -> None:
        """Wait until all was played."""
        await self._silent.wait()
