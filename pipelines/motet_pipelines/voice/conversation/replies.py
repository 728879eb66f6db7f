"""Start and cancel the replies of a conversation, on request or after a user's turn.

One reply at a time writes the conversation; out-of-band ones run beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from motet_pipelines.voice.services import SpeechServices
from motet_shared.errors import BadRequest
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import NO_EPOCH, Epoch

from .admission import Admission
from .conversation_state import RepliesState
from .events import Drained, EventSink, Failed, ReplyStarted
from .floor import Floor
from .frames import Frames, with_pictures
from .history import History, Item, chat_messages, new_id
from .inputs import CreateReply, GivenItem
from .item_transcription import ItemTranscription, PartAudio
from .reply import Clock, Reply
from .reply_items import ReplyItems
from .settings import ConversationLimits, ReplySettings
from .spoken_words import SpokenWords
from .user_sound import SOUND, is_heard

MAX_REPLIES = 8  # at a time, out-of-band ones included


class ActiveReply(BadRequest):
    code = "conversation_already_has_active_response"


class NothingToCancel(BadRequest):
    """Refuse to cancel a reply that does not run.

    Clients that cancel just as a reply ends ignore this code, or the first words of its message.
    """

    code = "response_cancel_not_active"


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """Hold what all replies of a conversation share, besides its state."""

    bus: Bus
    admission: Admission
    limits: ConversationLimits
    playback_clock: Clock
    conversation_id: str  # of the epochs


class Replies:
    """Keep the replies of one conversation. `settings`: those of replies without their own."""

    def __init__(
        self,
        context: ReplyContext,
        settings: ReplySettings | None,
        floor: Floor,
        history: History,
        frames: Frames,
        transcription: ItemTranscription,
        events: EventSink,
    ):
        self.settings = settings
        self.spoken: dict[str, SpokenWords] = {}  # by item id
        self._context, self._floor = context, floor
        self._history, self._transcription, self._events = history, transcription, events
        self._frames = frames
        self._running: dict[str, Reply] = {}
        self._writer: Reply | None = None  # the reply that writes the conversation
        self._turn: asyncio.Task[None] | None = None  # answers the last turn
        self._asked: list[Item] = []  # turns whose words are not known yet
        self._unanswered = False  # the user spoke since the last reply began
        self._epoch = 0
        self._begun = 0  # replies
        self._draining: asyncio.Task[None] | None = None

    @property
    def is_quiet(self) -> bool:
        """Return True if no reply runs or waits, and none is waited for."""
        return not self._tasks() and self._draining is None

    def state(self) -> RepliesState:
        spoken = {item_id: words.state() for item_id, words in self.spoken.items()}
        return RepliesState(self._begun, self._epoch, self._unanswered, spoken)

    def restore(self, state: RepliesState) -> None:
        self._begun, self._epoch, self._unanswered = state.begun, state.epoch, state.unanswered
        self.spoken.update((item_id, SpokenWords(one)) for item_id, one in state.spoken.items())

    # ----------------------------------------------------------------------------------- on request
    def create(self, request: CreateReply) -> None:
        """Start a reply.

        Raises ActiveReply while another one writes the conversation, PayloadTooLarge if that is
        full, BadRequest without anything to reply to, and what the admission raises.
        """
        if request.in_conversation and self._writer is not None:
            message = (
                f"response {self._writer.id} is in progress; cancel it or wait for response.done"
            )
            raise ActiveReply(message)
        if request.in_conversation:
            self._history.check_room("response")
        if len(self._running) >= MAX_REPLIES:
            raise BadRequest(
                f"{len(self._running)} responses run already; at most {MAX_REPLIES} can"
            )
        if (settings := request.settings or self.settings) is None:
            raise BadRequest("the conversation is only transcribed; give settings of a reply")
        items = self._items(request.context, settings)
        messages = chat_messages(settings.instructions, items)
        if request.context is None:
            messages = with_pictures(messages, self._frames.pictures())
        if not messages:
            raise BadRequest(
                "there is nothing to respond to; create an item or give instructions",
                param="response",
            )
        self._start(request, settings, items, messages)

    def cancel(self, reply_id: str | None) -> None:
        """Cancel a reply, by default the one that writes. Raises NothingToCancel without it."""
        found = self._running.get(reply_id) if reply_id else self._writer
        if found is None:
            which = f"response {reply_id!r}" if reply_id else "no response"
            raise NothingToCancel(
                f"Cancellation failed: {which} is in progress", param="response_id"
            )
        found.cancel("client_cancelled")

    def _items(
        self, context: Sequence[GivenItem | str] | None, settings: ReplySettings
    ) -> list[Item]:
        """Return the items that a reply sees; the audio of given ones is transcribed or heard."""
        if context is None:
            return self._history.shown()
        items = []
        for given in context:
            if isinstance(given, str):
                items.append(self._history.get(given))
                continue
            items.append(given.item)
            for part, pcm in given.audio.items():
                self._context.admission.receive_audio(len(pcm), given.rate)
                heard = is_heard(self._context.bus.directory, settings)
                audio = PartAudio(pcm, given.rate, None, heard=heard)
                audio.keep(given.item, part)
                self._transcription.begin(given.item, part, audio)
        return items

    def _start(
        self,
        request: CreateReply,
        settings: ReplySettings,
        items: list[Item],
        messages: list[dict[str, Any]],
    ) -> None:
        context = self._context
        account = context.admission.admit_reply(settings, messages)
        self._begun += 1
        reply_id = new_id("resp", str(self._begun))
        started = ReplyStarted(reply_id, settings, request.in_conversation, request.metadata)
        history = self._history if request.in_conversation else None

        seen = self._frames.as_of_now(f"{reply_id} frames") if request.context is None else None

        async def transcribed() -> list[dict[str, Any]]:
            pictures = [] if seen is None else await seen
            await self._transcription.wait(items)
            return with_pictures(chat_messages(settings.instructions, items), pictures)

        reply = Reply(
            context.bus,
            context.limits,
            started,
            transcribed,
            ReplyItems(started.reply_id, history, self.spoken),
            account,
            SpeechServices.find(context.bus.directory, coming=True, model=settings.model),
            self._next_epoch() if request.in_conversation else NO_EPOCH,
            self._events,
            context.playback_clock,
            self._history.keep_turns if request.context is None else lambda turns: None,
        )
        self._running[reply.id] = reply
        if request.in_conversation:
            self._set_writer(reply)
            self._unanswered = False
            if request.context is None:  # it waits for the words of all turns, and answers them
                self._asked.clear()
                self._drop_turn()
        reply.task = asyncio.create_task(self._run(reply), name="reply")
        reply.task.add_done_callback(lambda _: account.release())

    def _next_epoch(self) -> Epoch:
        """Return the epoch of a reply that writes the conversation; earlier epochs are stale."""
        self._epoch += 1
        return Epoch(self._context.conversation_id, self._epoch)

    async def _run(self, reply: Reply) -> None:
        try:
            await reply.run()
        finally:
            self._running.pop(reply.id, None)
            if self._writer is reply:
                self._set_writer(None)
                self._floor.end_reply(reply.playing_ms)

    def _set_writer(self, reply: Reply | None) -> None:
        self._writer = reply
        self._floor.replying = reply is not None

    # ---------------------------------------------------------------------------------- after turns
    def barge_in(self) -> None:
        """Cancel the reply because the user speaks, in every service that works on it."""
        if self._writer is not None:
            self._writer.cancel("turn_detected")

    def answer(self, item: Item, *, even_if_empty: bool = False) -> None:
        """Answer a turn as soon as its words are known; one without words only on demand."""
        if self.settings is None:
            return
        self._drop_turn()
        self._asked.append(item)
        self._unanswered |= even_if_empty
        self._turn = asyncio.create_task(self._answer(), name="turn")
        self._floor.answering = True
        self._turn.add_done_callback(self._end_answer)

    def _drop_turn(self) -> None:
        """Cancel the task that answers a turn, unless it is the current one."""
        if self._turn is not None and self._turn is not asyncio.current_task():
            self._turn.cancel()

    def _end_answer(self, task: asyncio.Task[None]) -> None:
        if task is self._turn:
            self._floor.answering = False

    async def _answer(self) -> None:
        """Answer the turns since the last reply; if the user goes on, with those that follow.

        A turn whose transcription failed is reported, and the others are answered.
        """
        try:
            await self._transcription.wait([*self._asked])
        except Exception as error:
            await self._events.emit(Failed(error))
        try:
            self._unanswered |= any(
                part.get("transcript") or SOUND in part
                for item in self._asked
                for part in item["content"]
            )
            self._asked.clear()
            if self._writer is not None and self._writer.task is not None:
                # It was interrupted and closes, or may finish first.
                await asyncio.wait([self._writer.task])
            if self._unanswered and not self._floor.user_speaks and self._draining is None:
                self.create(CreateReply())
        except Exception as error:
            await self._events.emit(Failed(error))

    # ------------------------------------------------------------------------------------- shutdown
    def drain(self) -> None:
        """Answer no more turns, and report when all running replies have ended."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        await self.finish()
        await self._events.emit(Drained())

    async def finish(self) -> None:
        """Wait until the last turn is answered and all replies have ended."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)

    async def close(self) -> None:
        tasks = self._tasks()
        if self._draining is not None:
            tasks.append(self._draining)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        tasks = [reply.task for reply in self._running.values()] + [self._turn]
        return [task for task in tasks if task is not None and not task.done()]
