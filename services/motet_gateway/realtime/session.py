"""Run one realtime session: translate between the client's protocol and a conversation.

A session outlives its socket: `attach` gives it a client, `run` serves that client until it leaves.
The conversation (`motet_pipelines.voice.conversation`) runs in a task of its own; the events of the
client become its inputs, one at a time, and its events become server events. Every refused event
becomes an `error` event that names it, and the socket stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from msgspec import UNSET, MsgspecError

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone, Receive
from motet_gateway.http.json_size import check_json
from motet_gateway.http.problems import Problem
from motet_gateway.http.socket import Socket
from motet_gateway.kept.session import END, KeptSession
from motet_gateway.openai.hints import Ignored
from motet_gateway.operations.targets import target_of
from motet_gateway.tenancy.auth import Caller
from motet_media.audio import duration_ms
from motet_pipelines.voice.conversation import inputs
from motet_pipelines.voice.conversation.conversation_state import ConversationState
from motet_pipelines.voice.conversation.converse import run_conversation
from motet_pipelines.voice.conversation.events import (
    ArgumentsDelta,
    AudioCommitted,
    Drained,
    Event,
    Failed,
    IdleTimeout,
    OutputClosed,
    OutputOpened,
    ReplyEnded,
    ReplyStarted,
    SpeechDelta,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TranscriptCompleted,
    TranscriptDelta,
    TranscriptFailed,
)
from motet_pipelines.voice.conversation.history import new_id
from motet_pipelines.voice.conversation.settings import ConversationLimits
from motet_pipelines.voice.services import SpeechServices
from motet_shared.errors import BadRequest, Unavailable, UnsupportedParameter

from . import events, session_state
from .admission import TenantAdmission
from .audio_settings import check_transcription, with_voice
from .channel import Channel, Connection
from .formats import decode, input_rate
from .pictures import check_pictures
from .prepared_session import PreparedSession
from .refusals import as_refusal
from .server_events import ServerEvents
from .session_settings import Kind, SessionSettings, SettingsState
from .video.frames import check_video, frames_of, is_frame, read_frame

log = logging.getLogger(__name__)

TAKEN_OVER = 4001
_HEAR_WITHIN = 30.0  # seconds
_MOVE_WITHIN = 5.0  # seconds in which the last event of the old socket has to be handled


class Player(Protocol):
    """Describe what plays speech that is not sent as events: the audio track of a call."""

    def take(self, event: Event) -> Event:
        """Play the speech of an event; return the event without it."""

    def clear(self) -> list[tuple[str, int]]:
        """Play no more of what there is; return the items that are cut, with the ms played."""

    async def finish(self) -> None:
        """Wait until all was played."""


@dataclass(slots=True)
class Attachment:
    """A socket of a session, from when it becomes the client's until it is no longer read.

    absent: its client had left when this gateway got the session.
    released: closed for another socket to take the session over, which it did if `taken_over`.
    """

    socket: Connection
    first: bool = False
    absent: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    released: bool = False
    taken_over: bool = False


class Session:
    """Translate between one client and one conversation."""

    def __init__(
        self,
        service: GatewayContext,
        socket: Connection,
        caller: Caller,
        model: str,
        kind: Kind = "realtime",
        prepared: PreparedSession | None = None,
        player: Player | None = None,
        kept: KeptSession | None = None,
    ):
        """Begin a session; with a `player`, it is a call's, and ends with its connection.

        kept: what keeps it beyond the death of this gateway.

        Raises BadRequest for a target that its model does not have.
        """
        self.service = service
        self.caller = caller
        self._kept = kept
        self.channel = Channel(
            socket, service.config.session_memory, service.config.session_keep, kept
        )
        absent = kept is not None and kept.is_away
        self.attachment = Attachment(socket, first=True, absent=absent)
        self.player = player
        self.moving = asyncio.Lock()  # held while it moves from one socket to another
        self.model = model  # "" for a session that only transcribes
        self.settings = SessionSettings.default(model, self.speech, kind)
        self.id = new_id("sess")
        self._origin = socket.scope
        if prepared is not None:
            self.settings, self.id = prepared.settings, prepared.session_id
        if target := target_of(socket.scope, service.bus.directory, model):
            self.settings = replace(self.settings, target=target)
        self._received = 0  # client events that were handled or refused
        self._received_ms = 0.0  # of audio, committed or not
        self._rendering = ServerEvents(self.channel, caller.tenant, self._as_session)
        self._admission = TenantAdmission(service, caller.tenant, kept)
        self._state = None if kept is None else self._restore(kept)
        self._inputs: asyncio.Queue[tuple[inputs.Input, asyncio.Future[None]]] = asyncio.Queue()
        self._conversing: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[None] | None = None  # sends events that were posted
        self._refused = False  # the last input
        self._failed = False  # the conversation, which ends with the socket then
        self._drained = asyncio.Event()
        self._handlers: dict[type[events.ClientEvent], Callable[[Any], Awaitable[object]]] = {
            events.SessionUpdate: self._update,
            events.ItemCreate: self._create_item,
            events.ItemRetrieve: self._retrieve_item,
            events.ItemDelete: self._delete_item,
            events.ItemTruncate: self._truncate_item,
            events.ResponseCreate: self._create_response,
            events.ResponseCancel: self._cancel_response,
            events.AudioAppend: self._append_audio,
            events.AudioCommit: self._commit_audio,
            events.AudioClear: self._clear_audio,
            events.ImageAppend: self._append_image,
            events.OutputClear: self._clear_output,
        }

    def _restore(self, kept: KeptSession) -> session_state.SessionState | None:
        """Go on with the state at the last checkpoint; returns it, None without one.

        Raises ClientGone for one that is none: the connection is then aborted.
        """
        if kept.state is None:
            return None
        try:
            state = session_state.decode(kept.state)
        except MsgspecError as error:
            log.warning("a session cannot go on: its checkpoint: %s", error)
            kept.abort()
            raise ClientGone from None
        self.id, self.settings, self.model = (
            state.id,
            state.settings.settings,
            state.settings.settings.model,
        )
        self._received, self._received_ms = state.received, state.received_ms
        self._admission.asked = state.asked
        self.channel.restore(state.channel)
        self._rendering.restore(state.rendering)
        kept.restored()
        return state

    async def run(self, receive: Receive, attachment: Attachment) -> int:
        """Serve the client until this socket closes; returns the close code."""
        try:
            if attachment.first:
                state, self._state = self._state, None
                if state is not None and state.settings.recording is not None:
                    self.settings = state.settings.restored(await self.service.uploads())
                conversation = None if state is None else state.conversation
                conversing = self._converse(conversation)
                self._conversing = asyncio.create_task(conversing, name="conversation")
                if state is None:
                    await self._send("session.created", session=self._as_session())
                else:
                    await self.channel.flush()
                if self._kept is not None:
                    self._kept.retain()
                    await self._hear_again(self._kept)
            else:
                await self._resume()
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    return int(message.get("code") or 1006)
                if self._kept is not None:
                    await self._kept.input()
                await self._handle(message.get("text"))
                self._received += 1
                if self._kept is not None and self._kept.is_due:
                    await self._do(inputs.Save(self._save))
        finally:
            self.channel.detach(attachment.socket)
            attachment.over.set()

    def _save(self, conversation: ConversationState) -> None:
        """Make a checkpoint behind the message that was handled last."""
        if self._kept is None or self.channel.closed:
            return
        state = session_state.SessionState(
            self.id,
            SettingsState.of(self.settings),
            self._received,
            self._received_ms,
            self._admission.asked,
            self.channel.state(),
            self._rendering.state(),
            conversation,
        )
        _, numbered = self.channel.place
        self._kept.begin_again(session_state.encode(state), numbered)

    async def _hear_again(self, kept: KeptSession) -> None:
        """Handle what the client sent over earlier sockets."""
        for message in kept.earlier:
            if message is None:
                await self._resume()
            else:
                await kept.input_again()
                await self._handle(message.text)
                self._received += 1

    async def _resume(self) -> None:
        """Send what the client had not received before, and what it needs to continue."""
        received = {"events": self._received, "audio_ms": self._received_ms}
        await self._send("session.resumed", session=self._as_session(), received=received)

    async def release(self) -> None:
        """Detach the session from its current socket, which is closed with code 4001.

        Raises Unavailable if the socket's last event is not handled within `_MOVE_WITHIN` seconds.
        """
        attachment = self.attachment
        if attachment.over.is_set():
            return
        attachment.released = attachment.taken_over = True
        with contextlib.suppress(ClientGone):
            await attachment.socket.close(TAKEN_OVER, "the session goes on over another socket")
        try:
            async with asyncio.timeout(_MOVE_WITHIN):
                await attachment.over.wait()
        except TimeoutError:
            attachment.taken_over = False
            raise Unavailable(
                "the session is busy with an event that came before; try again"
            ) from None

    async def heard(self) -> None:
        """Wait until the session is where an earlier gateway had brought it.

        Raises Unavailable if that takes longer than `_HEAR_WITHIN` seconds.
        """
        try:
            async with asyncio.timeout(_HEAR_WITHIN):
                if self.attachment.absent:
                    await self.attachment.over.wait()
                if self._kept is not None:
                    await self._kept.replayed()
        except TimeoutError:
            raise Unavailable(
                "the session is handled again after the end of its gateway; try again"
            ) from None

    def attach(self, socket: Socket, after: str | None) -> Attachment:
        """Attach a client that has the events up to `after`.

        Raises EventNotFound if what followed is not kept any more.
        """
        self.channel.attach(socket, after)
        if self._kept is not None:
            socket.go_on(self._kept, *self.channel.place, self._origin)
        self.attachment = Attachment(socket)
        return self.attachment

    async def drain(self) -> None:
        """Wait for running responses, then close with code 1012: clients reconnect elsewhere."""
        with contextlib.suppress(ClientGone):
            await self._do(inputs.Drain())
            await self._unless_over(self._drained.wait())
            if self.player is not None:
                await self._unless_over(self.player.finish())
        with contextlib.suppress(ClientGone):
            await self.channel.close(
                1012, "the server restarts; connect again and open a new session"
            )

    async def expel(self, why: str) -> None:
        """End the session with close code 3000, whatever is under way."""
        with contextlib.suppress(ClientGone):
            await self.channel.close(3000, why)
        await self.service.sessions.end(self)

    async def abandon(self) -> None:
        """End the session and everything that runs for it."""
        with contextlib.suppress(ClientGone):
            await self.channel.close(1001, "the session is over")
        self._end_conversation()
        if self._flushing is not None:
            self._flushing.cancel()
        tasks = [task for task in (self._conversing, self._flushing) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._kept is not None:
            self._kept.close()

    # --------------------------------------------------------------------------------- conversation
    async def _converse(self, state: ConversationState | None) -> None:
        """Send the events of the conversation until the channel is closed."""
        config = self.service.config
        try:
            await run_conversation(
                self.service.bus,
                self.service.uploads,
                self._next_inputs(),
                self.settings.as_conversation(),
                self,
                admission=self._admission,
                limits=ConversationLimits(
                    max_bytes=config.max_message,
                    request_timeout=config.request_timeout,
                    patience=config.patience,
                ),
                playback_clock=lambda: self.channel.present_seconds,
                conversation_id=self.id,
                state=state,
            )
        except Exception:
            log.exception("the conversation of session %s failed", self.id)
            self._failed = True
        finally:
            if self._failed:  # nothing would answer the client any more
                with contextlib.suppress(ClientGone):
                    await self.channel.close(1011, "the session failed; open a new one")

    async def emit(self, *events: Event) -> None:
        """Send events of the conversation, and wait while the client does not read."""
        self._add(events)
        await self._flush()

    @property
    def is_free(self) -> bool:
        return self.channel.is_free

    def post(self, *events: Event) -> None:
        """Send events of the conversation as soon as the client reads."""
        is_free = self.channel.is_free
        self._add(events)
        if is_free:
            self.channel.flush_now()
        if self.channel.is_waiting and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.create_task(self._flush(), name="flush")

    def _add(self, events: Sequence[Event]) -> None:
        """Render events into the channel; ends the conversation if that fails."""
        try:
            if self.player is not None:
                events = [self._played(self.player, event) for event in events]
            for event in events:
                with self.channel.rendering(_sequence(event)):
                    self.channel.add(self._rendering.render(event))
                if isinstance(event, Failed):
                    self._refused |= event.tag is not None
                elif isinstance(event, Drained):
                    self._drained.set()
        except ClientGone:
            self._end_conversation()
        except Exception:
            log.exception("an event of session %s cannot be sent", self.id)
            self._failed = True
            self._end_conversation()

    async def _flush(self) -> None:
        """Send what is in the channel; ends the conversation if that is closed."""
        try:
            await self.channel.flush()
        except ClientGone:
            self._end_conversation()

    def _end_conversation(self) -> None:
        """Cancel the conversation once: another cancel would cut its own closing short."""
        if self._conversing is not None and not self._conversing.cancelling():
            self._conversing.cancel()

    def _played(self, player: Player, event: Event) -> Event:
        """Give speech to the player; the user's stops it, where that is a barge-in."""
        turns = self.settings.audio.turn_detection
        if isinstance(event, SpeechStarted) and turns is not None and turns.interrupt_response:
            self._cut(player)
        return player.take(event)

    def _cut(self, player: Player) -> None:
        """Stop the player, and cut the items in it to what was heard."""
        for item_id, ms in player.clear():
            # Not waited for: the conversation may wait for its events to be read.
            handled = asyncio.get_running_loop().create_future()
            self._inputs.put_nowait((inputs.TruncateItem(item_id, ms), handled))

    async def _next_inputs(self) -> AsyncGenerator[inputs.Input, None]:
        """Yield the inputs queued by `_do`; mark each as handled when the next is requested."""
        while True:
            given, handled = await self._inputs.get()
            yield given
            if not handled.done():
                handled.set_result(None)

    async def _do(self, given: inputs.Input) -> bool:
        """Give an input to the conversation and wait until it is handled; True if it was accepted.

        Raises ClientGone if the conversation is over.
        """
        handled = asyncio.get_running_loop().create_future()
        self._refused = False
        self._inputs.put_nowait((given, handled))
        await self._unless_over(handled)
        return not self._refused

    async def _unless_over(self, waited: Awaitable[object]) -> None:
        """Wait for `waited`. Raises ClientGone if the conversation ends before."""
        future = asyncio.ensure_future(waited)
        try:
            if self._conversing is not None:
                await asyncio.wait([future, self._conversing], return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise ClientGone
        finally:
            future.cancel()

    # --------------------------------------------------------------------------------------- events
    async def _handle(self, text: str | None) -> None:
        """Handle one event. Any error is sent to the client, and the socket stays open."""
        event_id = None
        try:
            if text is None:
                raise BadRequest("binary messages are not part of this protocol; send JSON as text")
            check_json(text, self.caller.tenant)
            ignored = None if self.service.config.strict else Ignored("realtime")
            event = _decoded(text, ignored)
            if ignored is not None and ignored.paths:
                log.info("/v1/realtime ignores %s", ignored.names, extra={"ignored": ignored.names})
            event_id = event.event_id
            await self._handlers[type(event)](event)
        except ClientGone:
            raise
        except Exception as error:
            given = event_id or (events.event_id(text) if text else None)
            problem = Problem.of(error)
            problem.note("/v1/realtime")
            await self.channel.send(self.channel.error(problem, given))

    async def _send(self, kind: str, **fields: Any) -> None:
        await self.channel.send(self.channel.event(kind, **fields))

    def _as_session(self) -> dict[str, Any]:
        return self.settings.as_session(self.id)

    @property
    def speech(self) -> SpeechServices:
        return SpeechServices.find(self.service.bus.directory, coming=True, model=self.model)

    async def _update(self, event: events.SessionUpdate) -> None:
        settings = self.settings.updated(event.session, self.speech)
        check_transcription(self.service.bus.directory, settings.audio, "session")
        if settings.video is not None:
            model = settings.model if settings.kind == "realtime" else ""
            check_video(self.service.bus.directory, model, "session.video")
        self.settings = await self._with_voice(settings, "session")
        settings = self.settings
        await self._do(inputs.Configure(settings.as_conversation(), tag=_tag(event)))

    async def _with_voice(self, settings: SessionSettings, where: str) -> SessionSettings:
        """Return the settings with the recording of their voice, if it is the tenant's own."""
        audio = await with_voice(
            self.service,
            self.caller.tenant.owner,
            settings.audio,
            self.settings.audio,
            self._rendering.has_spoken,
            where,
            settings.model,
        )
        return replace(settings, audio=audio)

    # ---------------------------------------------------------------------------------------- audio
    async def _append_audio(self, event: events.AudioAppend) -> None:
        self.speech.need("type", listening=True)
        format = self.settings.audio.input_format
        pcm = decode(event.audio, format)
        if await self._do(inputs.AppendAudio(pcm, tag=_tag(event))):
            self._received_ms += duration_ms(len(pcm), input_rate(format))

    async def hear(self, pcm: bytes) -> bool:
        """Append sound of a call's track; False if it was refused, by an error event."""
        return self.speech.listens and await self._do(inputs.AppendAudio(pcm, tag=""))

    async def _commit_audio(self, event: events.AudioCommit) -> None:
        self.speech.need("type", listening=True)
        await self._do(inputs.CommitAudio(tag=_tag(event)))

    async def _clear_audio(self, event: events.AudioClear) -> None:
        await self._do(inputs.ClearAudio(tag=_tag(event)))

    async def _clear_output(self, event: events.OutputClear) -> None:
        if self.player is None:
            raise UnsupportedParameter(
                "output_audio_buffer.clear is for WebRTC; use conversation.item.truncate",
                param="type",
            )
        self._cut(self.player)

    # ---------------------------------------------------------------------------------------- items
    async def _append_image(self, event: events.ImageAppend) -> None:
        frame = await read_frame(event.image, event.detail, "image", self.service.config)
        await self._do(inputs.AddFrames((frame,), tag=_tag(event)))

    async def _create_item(self, event: events.ItemCreate) -> None:
        given = await self._given(event.item, "item")
        if self.settings.video is not None and is_frame(event.item):
            frames = await frames_of(event.item, self.service.config)
            await self._do(inputs.AddFrames(frames, given.item, tag=_tag(event)))
            return
        await self._do(inputs.AddItem(given, event.previous_item_id, tag=_tag(event)))

    async def _given(self, item: events.ClientItem, where: str) -> inputs.GivenItem:
        """Check an item of the client and convert it."""
        events.check_item(item, where, self.speech)
        service = self.service
        await check_pictures(
            item, where, service.bus.directory, self.settings.model, service.config
        )
        format = self.settings.audio.input_format
        kept = events.stored(item, new_id("item"), new_id("call"))
        return inputs.GivenItem(kept, events.sounds(item, format), input_rate(format))

    async def _retrieve_item(self, event: events.ItemRetrieve) -> None:
        await self._do(inputs.RetrieveItem(event.item_id, tag=_tag(event)))

    async def _delete_item(self, event: events.ItemDelete) -> None:
        await self._do(inputs.DeleteItem(event.item_id, tag=_tag(event)))

    async def _truncate_item(self, event: events.ItemTruncate) -> None:
        if event.content_index != 0:
            raise BadRequest(
                f"`content_index` is {event.content_index}; it must be 0", param="content_index"
            )
        await self._do(inputs.TruncateItem(event.item_id, event.audio_end_ms, tag=_tag(event)))

    # ------------------------------------------------------------------------------------ responses
    async def _create_response(self, event: events.ResponseCreate) -> None:
        if self.settings.kind != "realtime":
            raise BadRequest(
                "a transcription session makes no responses; set `session.type` to 'realtime'",
                param="type",
            )
        patch = event.response or events.ResponsePatch()
        settings = self.settings.for_response(patch, self.speech)
        settings = await self._with_voice(settings, "response")
        request = inputs.CreateReply(
            settings.as_reply(),
            await self._context(patch),
            patch.conversation != "none",
            None if patch.metadata is UNSET else patch.metadata,
            tag=_tag(event),
        )
        await self._do(request)

    async def _context(
        self, patch: events.ResponsePatch
    ) -> tuple[inputs.GivenItem | str, ...] | None:
        """Return the items that a response sees; None: the conversation's."""
        if not isinstance(patch.input, list):
            return None
        return tuple(
            [
                item.id
                if isinstance(item, events.ItemReference)
                else await self._given(item, f"response.input[{index}]")
                for index, item in enumerate(patch.input)
            ]
        )

    async def _cancel_response(self, event: events.ResponseCancel) -> None:
        await self._do(inputs.CancelReply(event.response_id, tag=_tag(event)))


def _decoded(text: str, ignored: Ignored | None) -> events.ClientEvent:
    """Return an event. Raises BadRequest, which names tools that other servers host."""
    try:
        return events.decode(text, ignored)
    except BadRequest as error:
        raise as_refusal(error, text) from None


def _sequence(event: Event) -> str:
    """Return the sequence of an event: of a response, of an item or its words, or of the client's inputs."""
    match event:
        case ReplyEnded():
            return event.reply_id + END
        case (
            ReplyStarted()
            | OutputOpened()
            | TextDelta()
            | SpeechDelta()
            | ArgumentsDelta()
            | OutputClosed()
        ):
            return event.reply_id
        case TranscriptDelta() | TranscriptCompleted() | TranscriptFailed():
            return f"{event.item_id} {event.part}"
        case SpeechStarted() | SpeechStopped() | IdleTimeout():
            return event.item_id
        case AudioCommitted():
            return str(event.item["id"])
        case Failed(tag=None):
            return "failures"
    return ""


def _tag(event: events.ClientEvent) -> str:
    """Return the tag of an input: the id of its event, "" without one."""
    return event.event_id or ""
