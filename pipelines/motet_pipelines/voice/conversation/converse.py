"""Converse: audio and actions of a user in, events of a spoken conversation out.

    settings = ConversationSettings(turns=TurnSettings(), reply=ReplySettings(model="pocket-chat"))
    async with aclosing(converse(bus, store, microphone(), settings)) as batches:
        async for batch in batches:                 # list[Event]: events that belong together
            for event in batch:
                if isinstance(event, SpeechDelta):
                    play(event.pcm)                 # 24 kHz
                elif isinstance(event, SpeechStarted):
                    stop_playing()                  # barge-in: the reply ends by itself

    async def microphone():                         # an async generator of inputs
        while pcm := await record():
            yield AppendAudio(pcm)

Turns are detected, transcribed and answered while the user speaks, listens or barges in. Every
service may die: its work continues at another instance. Leaving the generator early cancels all of
it; `aclosing` makes that prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

from motet_shared.errors import BadRequest
from motet_shared.wire.bus import Bus

from . import inputs as do
from .admission import Admission, Store, Unlimited
from .audio_input import AudioInput
from .conversation_state import ConversationState
from .event_queue import EventQueue
from .events import (
    Configured,
    Event,
    EventSink,
    Failed,
    ItemAdded,
    ItemDeleted,
    ItemRetrieved,
    ItemTruncated,
)
from .floor import Floor
from .frames import Frames
from .history import History, new_id
from .item_transcription import ItemTranscription, PartAudio
from .replies import Replies, ReplyContext
from .reply import Clock
from .settings import ConversationLimits, ConversationSettings

NO_LIMITS = ConversationLimits()


async def converse(
    bus: Bus,
    store: Store,
    inputs: AsyncIterator[do.Input],
    settings: ConversationSettings,
    *,
    admission: Admission | None = None,
    limits: ConversationLimits = NO_LIMITS,
    playback_clock: Clock = time.monotonic,
    conversation_id: str = "",
) -> AsyncGenerator[list[Event], None]:
    """Yield the events of a conversation in batches; the next request says that one is handled.

    A refused input is reported by `Failed`; it changes nothing. When `inputs` end, the open turn
    and the replies are completed, and the generator ends.

    store: returns the blob store for audio that other services read as files.
    playback_clock: the time in which the caller plays audio, in seconds.
    conversation_id: names the conversation in the fence behind cancelled replies (`Epoch`).
    """
    events = EventQueue()
    running = asyncio.create_task(
        run_conversation(
            bus,
            store,
            inputs,
            settings,
            events,
            admission=admission,
            limits=limits,
            playback_clock=playback_clock,
            conversation_id=conversation_id,
        ),
        name="conversation",
    )
    running.add_done_callback(lambda _: events.close())
    try:
        async with aclosing(events.batches()) as batches:
            async for batch in batches:
                yield batch
        await running
    finally:
        events.leave()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def run_conversation(
    bus: Bus,
    store: Store,
    inputs: AsyncIterator[do.Input],
    settings: ConversationSettings,
    events: EventSink,
    *,
    admission: Admission | None = None,
    limits: ConversationLimits = NO_LIMITS,
    playback_clock: Clock = time.monotonic,
    conversation_id: str = "",
    state: ConversationState | None = None,
) -> None:
    """Run a conversation as `converse` does, and give its events to `events` as they occur.

    state: of a conversation with the same settings and id, which goes on here; `inputs.Save` gives it.

    The events of a reply reach `events` in the task that runs the reply, without a queue between
    them. Cancelling this cancels everything that is under way.
    """
    context = ReplyContext(
        bus,
        admission or Unlimited(bus.directory, store),
        limits,
        playback_clock,
        conversation_id or new_id("conv"),
    )
    conversation = _Conversation(context, store, settings, events)
    if state is not None:
        conversation.restore(state)
    try:
        await conversation.handle_all(inputs)
    finally:
        await conversation.close()


class _Conversation:
    """Handle the inputs of one conversation."""

    def __init__(
        self,
        context: ReplyContext,
        store: Store,
        settings: ConversationSettings,
        events: EventSink,
    ):
        self._settings, self._events, self._admission = settings, events, context.admission
        self._floor = floor = Floor()
        self._history = history = History(context.limits.max_bytes)
        self._transcription = transcription = ItemTranscription(
            context.bus, store, context.admission, context.limits, history, events
        )
        self._frames = frames = Frames(settings.video, context.limits.max_bytes)
        self._replies = Replies(
            context, settings.reply, floor, history, frames, transcription, events
        )
        self._audio = AudioInput(context, settings, floor, transcription, self._replies, events)
        self._handlers: dict[type[do.Input], Callable[[Any], Awaitable[None]]] = {
            do.Configure: self._configure,
            do.AddFrames: self._add_frames,
            do.AppendAudio: self._append_audio,
            do.CommitAudio: self._commit_audio,
            do.ClearAudio: self._clear_audio,
            do.AddItem: self._add_item,
            do.RetrieveItem: self._retrieve_item,
            do.DeleteItem: self._delete_item,
            do.TruncateItem: self._truncate_item,
            do.CreateReply: self._create_reply,
            do.CancelReply: self._cancel_reply,
            do.Save: self._save,
            do.Drain: self._drain,
        }

    @property
    def _is_quiet(self) -> bool:
        return all(
            part.is_quiet
            for part in (self._audio, self._replies, self._transcription, self._frames)
        )

    def state(self) -> ConversationState:
        return ConversationState(
            self._history.state(),
            self._frames.state(),
            self._floor.state(),
            self._replies.state(),
            self._audio.state(),
            self._transcription.state(),
        )

    def restore(self, state: ConversationState) -> None:
        self._history.restore(state.history)
        self._frames.restore(state.frames)
        self._floor.restore(state.floor)
        self._replies.restore(state.replies)
        self._audio.restore(state.audio)
        self._transcription.restore(state.failed)

    async def handle_all(self, inputs: AsyncIterator[do.Input]) -> None:
        """Handle the inputs one after another, then complete what is under way."""
        async for given in inputs:
            try:
                await self._handlers[type(given)](given)
            except Exception as error:
                await self._events.emit(Failed(error, given.tag))
        await self._audio.finish()
        await self._transcription.finish()
        await self._replies.finish()

    async def close(self) -> None:
        """Cancel everything that is under way."""
        async with AsyncExitStack() as closing:  # each, whatever happens to the one before
            for part in (self._replies, self._transcription, self._audio):
                closing.push_async_callback(part.close)

    # ---------------------------------------------------------------------------------------- audio
    async def _configure(self, given: do.Configure) -> None:
        self._settings = given.settings
        self._replies.settings = given.settings.reply
        self._frames.configure(given.settings.video)
        await self._audio.configure(given.settings)
        await self._events.emit(Configured())

    async def _append_audio(self, given: do.AppendAudio) -> None:
        await self._audio.append(given.pcm)

    async def _commit_audio(self, given: do.CommitAudio) -> None:
        await self._audio.commit()

    async def _clear_audio(self, given: do.ClearAudio) -> None:
        await self._audio.clear()

    # ---------------------------------------------------------------------------------------- items
    async def _add_frames(self, given: do.AddFrames) -> None:
        for frame in given.frames:
            self._frames.add(frame)
        if given.item is not None:
            await self._events.emit(ItemAdded(given.item, self._history.last_id))

    async def _add_item(self, given: do.AddItem) -> None:
        item, audio, rate = given.given.item, given.given.audio, given.given.rate
        self._history.check_output(item)
        if audio:
            self._admission.receive_audio(sum(map(len, audio.values())), rate)
        heard = self._audio.is_heard
        spoken = {
            part: PartAudio(pcm, rate, self._settings.transcription, heard=heard)
            for part, pcm in audio.items()
        }
        for part, one in spoken.items():
            one.keep(item, part)
        previous = self._history.insert(item, given.after)
        for part, one in spoken.items():
            self._transcription.begin(item, part, one)
        await self._events.emit(ItemAdded(item, previous))

    async def _retrieve_item(self, given: do.RetrieveItem) -> None:
        await self._events.emit(ItemRetrieved(self._history.get(given.item_id)))

    async def _delete_item(self, given: do.DeleteItem) -> None:
        item = self._history.get(given.item_id, "delete")
        self._history.delete(given.item_id)
        self._transcription.forget_errors(item)
        self._replies.spoken.pop(given.item_id, None)
        await self._events.emit(ItemDeleted(given.item_id))

    async def _truncate_item(self, given: do.TruncateItem) -> None:
        item = self._history.get(given.item_id, "truncate")
        if item.get("role") != "assistant":
            raise BadRequest("only messages of the assistant can be truncated", param="item_id")
        spoken = self._replies.spoken.get(given.item_id)
        if spoken is None or given.audio_ms > spoken.ms:
            ms = 0 if spoken is None else round(spoken.ms)
            message = (
                f"item {given.item_id!r} has {ms} ms of audio; it cannot end at {given.audio_ms} ms"
            )
            raise BadRequest(message, param="audio_end_ms")
        spoken.cut(given.audio_ms)
        self._floor.end_reply(0)
        if item["status"] != "in_progress":  # otherwise it is cut when it is closed
            content = [{"type": "output_audio", "transcript": spoken.text}]
            self._history.replace({**item, "content": content})
        await self._events.emit(ItemTruncated(given.item_id, given.audio_ms))

    # -------------------------------------------------------------------------------------- replies
    async def _create_reply(self, given: do.CreateReply) -> None:
        self._replies.create(given)

    async def _cancel_reply(self, given: do.CancelReply) -> None:
        self._replies.cancel(given.reply_id)

    # ---------------------------------------------------------------------------------------- state
    async def _save(self, given: do.Save) -> None:
        if not self._is_quiet:
            return
        await self._audio.rest()
        try:
            if self._is_quiet:
                given.save(self.state())
        finally:
            self._audio.go_on()

    async def _drain(self, given: do.Drain) -> None:
        self._replies.drain()
