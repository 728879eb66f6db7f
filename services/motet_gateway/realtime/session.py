"""Run one realtime session: handle the client's events, keep the conversation, run responses.

A session outlives its socket: `attach` gives it a client, `run` serves that client until it leaves.

Every refused event becomes an `error` event that names it, and the socket stays open. One response
at a time may write the conversation; out-of-band ones run beside it. Responses run in tasks, so
that a cancel is received while one speaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone, Receive
from motet_gateway.http.json_size import check_json
from motet_gateway.http.problems import Problem
from motet_gateway.openai.hints import Ignored
from motet_gateway.tenancy.auth import Caller
from motet_gateway.tenancy.usage import sound_length
from motet_shared.errors import BadRequest, Unavailable, UnsupportedParameter

from . import events
from .audio_input import AudioInput
from .audio_settings import Speech, check_transcription, check_voice
from .channel import Channel
from .conversation import Conversation, Stored, check_output, new_id, stored
from .formats import input_rate
from .item_transcription import HeardPart, ItemTranscription
from .pictures import check_pictures, without_files
from .response_queue import ResponseQueue
from .session_settings import Kind, SessionSettings
from .socket import Socket
from .spoken_words import SpokenWords

log = logging.getLogger(__name__)

TAKEN_OVER = 4001
_MOVE_WITHIN = 5.0  # seconds in which the last event of the old socket has to be handled


@dataclass(slots=True)
class Attachment:
    """A socket of a session, from when it becomes the client's until it is no longer read."""

    socket: Socket
    first: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    taken_over: bool = False


class Session:
    """State of one conversation."""

    def __init__(
        self,
        service: GatewayContext,
        socket: Socket,
        caller: Caller,
        model: str,
        kind: Kind = "realtime",
    ):
        self.service = service
        self.caller = caller
        self.channel = channel = Channel(socket, service.config.session_memory)
        self.attachment = Attachment(socket, first=True)
        self.moving = asyncio.Lock()  # held while it moves from one socket to another
        self.heard = 0  # client events that were handled or refused
        self.settings = SessionSettings.default(model, self.speech, kind)
        self.conversation = Conversation(service.config.max_message)
        self.transcripts = ItemTranscription(service, channel, self.conversation)
        self.ears = AudioInput(
            service, channel, self.conversation, self.transcripts, self, self.settings.audio
        )
        self.spoken: dict[str, SpokenWords] = {}  # by item id
        self._responses = ResponseQueue(self)
        self.id = new_id("sess")
        self._handlers: dict[type[events.ClientEvent], Callable[[Any], Awaitable[None]]] = {
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
            events.OutputClear: self._clear_output,
        }

    async def run(self, receive: Receive, attachment: Attachment) -> int:
        """Serve the client until this socket closes; returns the close code."""
        try:
            if attachment.first:
                await self._tell("session.created", session=self.settings.as_session(self.id))
            else:
                await self._resume()
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    return int(message.get("code") or 1006)
                await self._hear(message.get("text"))
                self.heard += 1
        finally:
            self.channel.detach(attachment.socket)
            attachment.over.set()

    async def _resume(self) -> None:
        """Send what the client had not received before, and what it needs to continue."""
        received = {"events": self.heard, "audio_ms": self.ears.heard_ms}
        await self._tell(
            "session.resumed", session=self.settings.as_session(self.id), received=received
        )

    async def release(self) -> None:
        """Detach the session from its current socket, which is closed with code 4001.

        Raises Unavailable if the socket's last event is not handled within `_MOVE_WITHIN` seconds.
        """
        attachment = self.attachment
        if attachment.over.is_set():
            return
        attachment.taken_over = True
        with contextlib.suppress(ClientGone):
            await attachment.socket.close(TAKEN_OVER, "the session goes on over another socket")
        try:
            await asyncio.wait_for(attachment.over.wait(), _MOVE_WITHIN)
        except TimeoutError:
            attachment.taken_over = False
            raise Unavailable(
                "the session is busy with an event that came before; try again"
            ) from None

    def attach(self, socket: Socket, after: str | None) -> Attachment:
        """Attach a client that has the events up to `after`.

        Raises EventNotFound if what followed is not kept any more.
        """
        self.channel.attach(socket, after)
        self.attachment = Attachment(socket)
        return self.attachment

    async def drain(self) -> None:
        """Wait for running responses, then close with code 1012: clients reconnect elsewhere."""
        await self._responses.drain()
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
        await self.ears.close()
        await self.transcripts.close()
        await self._responses.abandon()

    # --------------------------------------------------------------------------------------- events
    async def _hear(self, text: str | None) -> None:
        """Handle one event. Any error is sent to the client, and the socket stays open."""
        event_id = None
        try:
            if text is None:
                raise BadRequest("binary messages are not part of this protocol; send JSON as text")
            check_json(text, self.caller.tenant)
            ignored = None if self.service.config.strict else Ignored("realtime")
            event = events.decode(text, ignored)
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

    async def _tell(self, kind: str, **fields: Any) -> None:
        await self.channel.send(self.channel.event(kind, **fields))

    async def _update(self, event: events.SessionUpdate) -> None:
        settings = self.settings.updated(event.session, self.speech)
        check_voice(
            self.service.bus.directory,
            settings.audio,
            self.settings.audio,
            bool(self.spoken),
            "session",
        )
        check_transcription(self.service.bus.directory, settings.audio, "session")
        self.settings = settings
        await self.ears.configure(settings.audio)
        await self._tell("session.updated", session=self.settings.as_session(self.id))

    async def _create_item(self, event: events.ItemCreate) -> None:
        events.check_item(event.item, "item", self.speech)
        await self.check_pictures(event.item, "item")
        check_output(event.item, self.conversation)
        item = stored(event.item, new_id("item"), new_id("call"))
        audio = self.settings.audio
        sounds = events.sounds(event.item, audio.input_format)
        self.hear(sum(map(len, sounds.values())), input_rate(audio.input_format))
        before = self.conversation.insert(item, event.previous_item_id)
        for index, pcm in sounds.items():
            self.transcripts.begin(
                item, index, HeardPart(pcm, input_rate(audio.input_format), audio.transcription)
            )
        await self.channel.send(
            self.channel.event(
                "conversation.item.added", previous_item_id=before, item=without_files(item)
            ),
            self.channel.event(
                "conversation.item.done", previous_item_id=before, item=without_files(item)
            ),
        )

    async def check_pictures(self, item: events.Item, where: str) -> None:
        """Raise for images that this session's model cannot read."""
        service = self.service
        await check_pictures(
            item, where, service.bus.directory, self.settings.model, service.config
        )

    async def _retrieve_item(self, event: events.ItemRetrieve) -> None:
        await self._tell("conversation.item.retrieved", item=self.conversation.get(event.item_id))

    async def _delete_item(self, event: events.ItemDelete) -> None:
        self.conversation.delete(event.item_id)
        self.spoken.pop(event.item_id, None)
        await self._tell("conversation.item.deleted", item_id=event.item_id)

    async def _truncate_item(self, event: events.ItemTruncate) -> None:
        item = self.conversation.get(event.item_id, "truncate")
        if item.get("role") != "assistant":
            raise BadRequest("only messages of the assistant can be truncated", param="item_id")
        if event.content_index != 0:
            raise BadRequest(
                f"`content_index` is {event.content_index}; it must be 0", param="content_index"
            )
        spoken = self.spoken.get(event.item_id)
        if spoken is None or event.audio_end_ms > spoken.ms:
            ms = 0 if spoken is None else round(spoken.ms)
            message = f"item {event.item_id!r} has {ms} ms of audio; it cannot end at {event.audio_end_ms} ms"
            raise BadRequest(message, param="audio_end_ms")
        spoken.cut(event.audio_end_ms)
        self.ears.rest(0)
        if item["status"] != "in_progress":  # otherwise it is cut when it is closed
            content = [{"type": "output_audio", "transcript": spoken.text}]
            self.conversation.replace({**item, "content": content})
        where = {"item_id": event.item_id, "content_index": 0, "audio_end_ms": event.audio_end_ms}
        await self._tell("conversation.item.truncated", **where)

    # ---------------------------------------------------------------------------------------- sound
    @property
    def speech(self) -> Speech:
        return Speech.here(self.service.bus.directory, coming=True)

    def hear(self, pcm_bytes: int, rate: int) -> None:
        """Charge audio that a client sends. Raises RateLimited if it has sent too much."""
        if pcm_bytes:
            tenant = self.caller.tenant
            tenant.spend(tenant.audio, sound_length(pcm_bytes, rate))

    async def _append_audio(self, event: events.AudioAppend) -> None:
        self.speech.need("type", ears=True)
        await self.ears.append(event.audio)

    async def _commit_audio(self, event: events.AudioCommit) -> None:
        self.speech.need("type", ears=True)
        await self.ears.commit()

    async def _clear_audio(self, event: events.AudioClear) -> None:
        await self.ears.clear()

    async def _clear_output(self, event: events.OutputClear) -> None:
        raise UnsupportedParameter(
            "output_audio_buffer.clear is for WebRTC; use conversation.item.truncate", param="type"
        )

    async def interrupted(self) -> None:
        self._responses.interrupt()

    async def turn_ended(self, item: Stored, *, silent: bool = False) -> None:
        if self.settings.kind == "realtime":
            self._responses.answer(item, self.ears, silent=silent)

    @property
    def busy(self) -> bool:
        return self._responses.busy

    @property
    def replying(self) -> bool:
        return self._responses.replying

    # ------------------------------------------------------------------------------------ responses
    async def _create_response(self, event: events.ResponseCreate) -> None:
        if self.settings.kind != "realtime":
            raise BadRequest(
                "a transcription session makes no responses; set `session.type` to 'realtime'",
                param="type",
            )
        patch = event.response or events.ResponsePatch()
        for index, item in enumerate(patch.input if isinstance(patch.input, list) else ()):
            if not isinstance(item, events.ItemReference):
                await self.check_pictures(item, f"response.input[{index}]")
        self._responses.create(patch)

    async def _cancel_response(self, event: events.ResponseCancel) -> None:
        self._responses.cancel(event.response_id)
