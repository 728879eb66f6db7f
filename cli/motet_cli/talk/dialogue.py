"""Run a dialogue: play and print the events of a conversation, and report what was heard."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from motet_cli.talk.options import TalkInput
from motet_cli.talk.playback import Playback
from motet_cli.talk.schedule import Schedule
from motet_cli.talk.transcript import Transcript
from motet_pipelines.voice.conversation import events
from motet_pipelines.voice.conversation.events import Event
from motet_pipelines.voice.conversation.inputs import AppendAudio, TruncateItem
from motet_shared.errors import MotetError

SETTLED = 2.0  # seconds without anything under way after which a recording's dialogue is over


class Dialogue:
    """Handle the events of one conversation, and give it its inputs."""

    def __init__(self, playback: Playback, transcript: Transcript):
        self.failures = 0
        self._playback, self._transcript = playback, transcript
        self._inputs: asyncio.Queue[TalkInput | None] = asyncio.Queue()
        self._begun = asyncio.Event()  # the conversation takes inputs
        self._items: dict[tuple[str, int], str] = {}  # item id by reply and output
        self._dropped: set[str] = set()  # interrupted replies
        self._speaking = False  # the user
        self._awaited = False  # a reply to the last turn
        self._replying: set[str] = set()
        self._shown: set[str] = set()  # items of the user whose transcript is being printed
        self._quiet_since = time.monotonic()
        self._unheard = Schedule()  # words are printed when they have been heard
        self._handlers: dict[type[Event], Callable[[Any], Any]] = {
            events.SpeechStarted: self._speech_started,
            events.SpeechStopped: self._speech_stopped,
            events.TranscriptDelta: self._transcript_delta,
            events.TranscriptCompleted: self._transcript_completed,
            events.TranscriptFailed: self._failed,
            events.ReplyStarted: self._reply_started,
            events.OutputOpened: self._output_opened,
            events.SpeechDelta: self._speech_delta,
            events.ReplyEnded: self._reply_ended,
            events.Failed: self._failed,
        }

    @property
    def over(self) -> bool:
        """Return True if nothing has been said, played or awaited for `SETTLED` seconds."""
        busy = self._speaking or self._awaited or self._replying or self._playback.playing
        if busy:
            self._quiet_since = time.monotonic()
        return time.monotonic() - self._quiet_since >= SETTLED

    # --------------------------------------------------------------------------------------- inputs
    async def hear(self, sound: AsyncGenerator[bytes, None]) -> None:
        """Give the user's sound to the conversation once that begins, and end it with the sound."""
        await self._begun.wait()
        self._playback.begin()
        try:
            async with aclosing(sound):
                async for pcm in sound:
                    self._inputs.put_nowait(AppendAudio(pcm))
        finally:
            self._inputs.put_nowait(None)

    async def inputs(self) -> AsyncIterator[TalkInput]:
        """Yield the inputs of the conversation until the sound has ended."""
        self._begun.set()
        while (given := await self._inputs.get()) is not None:
            yield given

    def finish(self) -> None:
        """Print the end of the line that is open."""
        self._transcript.end_line()

    # --------------------------------------------------------------------------------------- events
    async def follow(self, batches: AsyncGenerator[list[Event], None]) -> None:
        """Handle all events of the conversation."""
        async with aclosing(batches):
            async for batch in batches:
                for event in batch:
                    handler = self._handlers.get(type(event))
                    if handler is not None:
                        await handler(event)

    async def _speech_started(self, event: events.SpeechStarted) -> None:
        self._speaking = True
        await self._interrupt()

    async def _speech_stopped(self, event: events.SpeechStopped) -> None:
        self._speaking, self._awaited = False, True

    async def _transcript_delta(self, event: events.TranscriptDelta) -> None:
        self._shown.add(event.item_id)
        self._transcript.add("you", event.text)

    async def _transcript_completed(self, event: events.TranscriptCompleted) -> None:
        if not event.text.strip():
            self._awaited = False  # a turn without words is not answered
        elif event.item_id not in self._shown:
            self._transcript.add("you", event.text)
        self._transcript.end_line("you")

    async def _reply_started(self, event: events.ReplyStarted) -> None:
        self._awaited = False
        self._replying.add(event.reply_id)

    async def _output_opened(self, event: events.OutputOpened) -> None:
        self._items[event.reply_id, event.index] = event.item["id"]

    async def _speech_delta(self, event: events.SpeechDelta) -> None:
        if event.reply_id in self._dropped:
            return
        if event.pcm:
            await self._playback.play(self._items[event.reply_id, event.index], event.pcm)
        if event.words:
            self._when_heard(self._transcript.add, "model", event.words)

    async def _reply_ended(self, event: events.ReplyEnded) -> None:
        self._replying.discard(event.reply_id)
        if event.error is not None:
            await self._failed(event)
            await self._playback.end()
        elif event.status == "cancelled":
            await self._interrupt()
        else:
            self._when_heard(self._transcript.end_line, "model")
            await self._playback.end()

    async def _failed(
        self, event: events.Failed | events.TranscriptFailed | events.ReplyEnded
    ) -> None:
        self.failures += 1
        self._awaited = False
        self._transcript.end_line()
        message = event.error.message if isinstance(event.error, MotetError) else event.error
        print(f"error: {message}", file=sys.stderr, flush=True)

    def _when_heard(self, act: Callable[..., None], *args: Any) -> None:
        """Act once everything that was played until now has been heard."""
        self._unheard.add(self._playback.remaining, act, *args)

    async def _interrupt(self) -> None:
        """Stop playing, and cut the reply in the conversation to what was heard."""
        self._dropped |= self._replying
        self._unheard.clear()
        stopped = await self._playback.stop()
        if stopped is not None:
            self._transcript.interrupt()
            self._inputs.put_nowait(TruncateItem(*stopped))
