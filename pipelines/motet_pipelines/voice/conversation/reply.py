"""Run one reply: a chat request, whose text is spoken while it is generated if it is to be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from motet_pipelines.answers import noted, once
from motet_pipelines.chat.chat import Outcome, chat
from motet_pipelines.voice import speak
from motet_pipelines.voice.own_speech import speak_itself
from motet_pipelines.voice.services import SpeechServices
from motet_pipelines.voice.voice import reply
from motet_shared.errors import ContextTooLong
from motet_shared.messages import (
    Audio,
    Chat,
    Sampling,
    Speak,
    SpeakStates,
    Text,
    ToolCallDelta,
)
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import Epoch

from .admission import ReplyAccount
from .events import Event, EventSink, ReplyEnded, ReplyStarted, Status
from .frames import is_turn
from .history import without_oldest
from .reply_items import ReplyItems
from .retention import retained
from .seeds import new_seed
from .settings import ConversationLimits

_AT_ONCE = 2**14  # characters that are sent without waiting for the caller to read

Clock = Callable[[], float]  # seconds
Drop = Callable[[int], object]
Messages = Callable[[], Awaitable[list[dict[str, Any]]]]


@dataclass(frozen=True, slots=True)
class _End:
    """Describe how a reply ended."""

    status: Status
    reason: str = ""
    error: Exception | None = None


class Reply:
    """Run one reply in a task of its own; `cancel` ends it early with all its closing events.

    messages: returns the chat messages, once the words of the user are known.
    services: the speech services that it can use.
    playback_clock: the time in which the caller plays audio.
    drop: takes the number of turns that later replies still see.
    """

    def __init__(
        self,
        bus: Bus,
        limits: ConversationLimits,
        started: ReplyStarted,
        messages: Messages,
        items: ReplyItems,
        account: ReplyAccount,
        services: SpeechServices,
        epoch: Epoch,
        events: EventSink,
        playback_clock: Clock,
        drop: Drop = lambda turns: None,
    ):
        self._bus, self._limits, self._started = bus, limits, started
        self._messages, self._items, self._account = messages, items, account
        self._services, self._epoch = services, epoch
        self._events, self._clock, self._drop = events, playback_clock, drop
        self._outcome, self._speech = Outcome(), speak.Outcome()
        self._seeds = new_seed(f"{self.id} text"), new_seed(f"{self.id} speech")
        self._playing_since: float | None = None  # of the playback clock, at the first audio
        self._cancelling = False
        self._reason = ""
        self._running = False
        self.task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._started.reply_id

    @property
    def playing_ms(self) -> float:
        """Return for how many more ms a caller that plays what it received hears the reply.

        0 if the reply was cancelled: its caller stops playing.
        """
        if self._playing_since is None or self._reason:
            return 0.0
        whole = self._speech.samples / speak.RATE
        left = max(0.0, whole - (self._clock() - self._playing_since)) * 1000
        return noted(f"{self.id} playing", left)

    def cancel(self, reason: str) -> None:
        """Cancel the reply for `reason`; a second call, or one after the end, does nothing."""
        if not self._cancelling:
            self._cancelling, self._reason = True, reason
            # A reply that has not begun yet checks the flag.
            if self._running and self.task is not None:
                self.task.cancel()

    async def run(self) -> None:
        """Run the reply, from `ReplyStarted` to `ReplyEnded`."""
        await self._events.emit(self._started)
        self._running = True  # from here on `cancel` interrupts; before, it sets a flag
        end = await self._run()
        self._running, self._cancelling = False, True
        self._account.spoke(self._services.speech, self._speech)
        self._account.settle()
        events: list[Event] = []
        self._items.finish("completed" if end.status == "completed" else "incomplete", events)
        self._items.settle(noted(f"{self.id} items", self._items.items))
        chat_end = self._outcome.end
        events.append(
            ReplyEnded(
                reply_id=self.id,
                status=end.status,
                reason=end.reason,
                error=end.error,
                items=self._items.items,
                usage=None if chat_end is None else chat_end.usage,
                speech_usage=self._speech.usage,
            )
        )
        await self._events.emit(*events)

    async def _run(self) -> _End:
        try:
            if not self._cancelling:
                return await self._generate()
        except asyncio.CancelledError:
            if not self._cancelling:
                raise
            _uncancel()
        except Exception as error:
            return _End("failed", error=error)
        return _End("cancelled", self._reason)

    async def _generate(self) -> _End:
        """Generate the reply.

        On ContextTooLong it retries without the oldest turns, if the settings allow that.
        """
        messages, dropped = await self._retained(await self._messages()), 0
        while True:
            try:
                return await self._stream(messages)
            except ContextTooLong:
                dropped = dropped * 2 or 1
                shorter = without_oldest(messages, dropped)
                if not self._started.settings.shorten or shorter is None or not self._items.empty:
                    raise
                messages = shorter

    async def _retained(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages without the turns that the settings drop, now and from now on."""
        retention = self._started.settings.retention
        if retention is None:
            return messages
        request = self._request(messages)
        kept = await once(
            f"{self.id} messages",
            lambda: retained(self._bus, request, retention, self._limits),
        )
        if len(kept) < len(messages):
            self._drop(sum(map(is_turn, kept)))
        return kept

    async def _stream(self, messages: list[dict[str, Any]]) -> _End:
        async with self._account.run(self._request(messages), self._outcome) as request:
            if self._started.settings.speaks:
                await self._speak(request)
            else:
                await self._write(request)
        status = self._outcome.end.status if self._outcome.end is not None else "stop"
        return _End("incomplete", "max_output_tokens") if status == "length" else _End("completed")

    async def _write(self, request: Chat) -> None:
        batches = chat(self._bus, request, self._outcome, sink=self._write_now, **self._options())
        async with aclosing(batches):
            async for batch in batches:
                if events := self._written(batch):
                    await self._events.emit(*events)

    def _written(self, batch: list[Text]) -> list[Event]:
        """Account for a batch, and return its events."""
        self._account.receive(batch)
        events: list[Event] = []
        for item in batch:
            if item.text:
                self._items.text(item.text, events)
            for piece in item.tools or ():
                self._items.tool(piece, events)
        return events

    def _write_now(self, batch: list[Text], record: Callable[[], None]) -> bool:
        """Send the events of plain text at once; return False if the caller has to be waited for."""
        size = sum([len(item.text) for item in batch])
        is_plain = self._items.is_text_open and size <= _AT_ONCE
        if self._cancelling or not (is_plain and self._events.is_free):
            return False
        record()
        if events := self._written(batch):
            self._events.post(*events)
        return True

    async def _speak(self, request: Chat) -> None:
        """Speak the text while it is generated; tool calls follow when all is spoken."""
        calls: list[ToolCallDelta] = []
        async with aclosing(self._spoken(request)) as batches:
            async for batch in batches:
                self._account.receive(batch)
                events: list[Event] = []
                if isinstance(batch[0], Audio):
                    self._items.audio(batch, events)
                    if self._playing_since is None:
                        self._playing_since = noted(f"{self.id} since", self._clock())
                else:
                    for item in batch:
                        if item.text:
                            self._items.write(item.text, events)
                        calls += item.tools or ()
                if events:
                    await self._events.emit(*events)
        events = []
        for piece in calls:
            self._items.tool(piece, events)
        if events:
            await self._events.emit(*events)

    def _spoken(self, request: Chat) -> AsyncGenerator[list[Text] | list[Audio], None]:
        """Return text and audio, of the model itself if it speaks."""
        settings, options = self._started.settings, self._options()
        if self._services.itself:
            states = SpeakStates(
                model=settings.model,
                voice=settings.voice,
                seed=self._seeds[1],
                request_id=request.request_id,
                priority=request.priority,
                tenant=request.tenant,
            )
            stated = msgspec.structs.replace(request, return_states=True)
            return speak_itself(self._bus, stated, states, self._outcome, self._speech, **options)
        return reply(
            self._bus,
            request,
            self._speech_request(),
            self._outcome,
            self._speech,
            cloned=settings.cloned,
            **options,
        )

    def _options(self) -> dict[str, Any]:
        limits = self._limits
        return {
            "deadline": limits.request_timeout,
            "patience": limits.patience,
            "epoch": self._epoch,
        }

    def _request(self, messages: list[dict[str, Any]]) -> Chat:
        settings = self._started.settings
        sampling = Sampling(temperature=settings.temperature, seed=self._seeds[0])
        if settings.max_tokens is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=settings.max_tokens)
        return Chat(
            model=settings.model,
            messages=messages,
            sampling=sampling,
            tools=list(settings.tools),
            tool_choice=settings.tool_choice,
            tool=settings.tool,
            max_tokens=settings.max_tokens,
            request_id=self.id,
            target=settings.target,
        )

    def _speech_request(self) -> Speak:
        settings = self._started.settings
        return Speak(
            model=self._services.speech,
            text="",
            voice=settings.voice,
            speed=settings.speed,
            seed=self._seeds[1],
        )


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
