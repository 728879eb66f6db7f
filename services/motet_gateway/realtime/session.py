"""One realtime session: hears the client's events, keeps the conversation, runs responses.

It outlives its socket: `attach` gives it a client, `run` hears that one until it is gone.

Every refused event becomes an `error` event that names it, and the socket lives on. One response at a time may write
the conversation; out-of-band ones run beside it. Responses run in tasks, so a cancel is heard while one speaks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from motet_shared.errors import BadRequest, Unavailable, UnsupportedParameter

from ..asgi import ClientGone, Receive
from ..auth import Caller
from ..problems import Problem
from ..service import Service
from ..usage import sound_length
from . import events
from .audio_settings import Speech, check_voice
from .channel import Channel
from .conversation import Conversation, Stored, check_output, new_id, stored
from .ears import Ears
from .formats import input_rate
from .responses import Responses
from .settings import Kind, Settings
from .socket import Socket
from .spoken import Spoken
from .transcripts import Heard, Transcripts

TAKEN_OVER = 4001
_MOVE_WITHIN = 5.0  # seconds in which the event that the old socket brought last is carried out


@dataclass(slots=True)
class Attachment:
    """A socket of a session, from when it becomes its client until nobody hears it any more."""

    socket: Socket
    first: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    taken_over: bool = False


class Session:
    """The state of one conversation."""

    def __init__(self, service: Service, socket: Socket, caller: Caller, model: str, kind: Kind = "realtime"):
        self.service = service
        self.caller = caller
        self.channel = channel = Channel(socket, service.config.session_memory)
        self.attachment = Attachment(socket, first=True)
        self.moving = asyncio.Lock()  # from one socket to another
        self.heard = 0  # events of the client that were carried out or refused
        self.settings = Settings.default(model, self.speech, kind)
        self.conversation = Conversation(service.config.max_message)
        self.transcripts = Transcripts(service, channel, self.conversation)
        self.ears = Ears(service, channel, self.conversation, self.transcripts, self, self.settings.audio)
        self.spoken: dict[str, Spoken] = {}  # by item
        self._responses = Responses(self)
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
        """Hear the client until this socket closes; the code that it was closed with."""
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
        """What the client had not got before, and then what it needs to know to go on where it was."""
        received = {"events": self.heard, "audio_ms": self.ears.heard_ms}
        await self._tell("session.resumed", session=self.settings.as_session(self.id), received=received)

    async def release(self) -> None:
        """Take the session from the socket that it has, which is closed with 4001. Unavailable if it hangs."""
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
            raise Unavailable("the session is busy with an event that came before; try again") from None

    def attach(self, socket: Socket, after: str | None) -> Attachment:
        """This is the client from now on, which has the events up to `after`. EventNotFound if the next are gone."""
        self.channel.attach(socket, after)
        self.attachment = Attachment(socket)
        return self.attachment

    async def drain(self) -> None:
        """Let the responses that run end, then close with 1012: clients reconnect, elsewhere."""
        await self._responses.drain()
        with contextlib.suppress(ClientGone):
            await self.channel.close(1012, "the server restarts; connect again and open a new session")

    async def expel(self, why: str) -> None:
        """Close with 3000, whatever is under way."""
        with contextlib.suppress(ClientGone):
            await self.channel.close(3000, why)
        await self.service.sessions.end(self)

    async def abandon(self) -> None:
        """The end: nothing that runs for it goes on."""
        with contextlib.suppress(ClientGone):
            await self.channel.close(1001, "the session is over")
        await self.ears.close()
        await self.transcripts.close()
        await self._responses.abandon()

    # ------------------------------------------------------------------------------------------------------- events
    async def _hear(self, text: str | None) -> None:
        """Carry out one event. Whatever is wrong with it is told, and the socket lives on."""
        event_id = None
        try:
            if text is None:
                raise BadRequest("binary messages are not part of this protocol; send JSON as text")
            event = events.decode(text)
            event_id = event.event_id
            await self._handlers[type(event)](event)
        except ClientGone:
            raise
        except Exception as error:
            given = event_id or (events.event_id(text) if text else None)
            await self.channel.send(self.channel.error(Problem.of(error), given))

    async def _tell(self, kind: str, **fields: Any) -> None:
        await self.channel.send(self.channel.event(kind, **fields))

    async def _update(self, event: events.SessionUpdate) -> None:
        settings = self.settings.updated(event.session, self.speech)
        check_voice(self.service.bus.directory, settings.audio, self.settings.audio, bool(self.spoken), "session")
        self.settings = settings
        await self.ears.configure(settings.audio)
        await self._tell("session.updated", session=self.settings.as_session(self.id))

    async def _create_item(self, event: events.ItemCreate) -> None:
        events.check_item(event.item, "item", self.speech)
        check_output(event.item, self.conversation)
        item = stored(event.item, new_id("item"), new_id("call"))
        audio = self.settings.audio
        sounds = events.sounds(event.item, audio.input_format)
        self.hear(sum(map(len, sounds.values())), input_rate(audio.input_format))
        before = self.conversation.insert(item, event.previous_item_id)
        for index, pcm in sounds.items():
            self.transcripts.begin(item, index, Heard(pcm, input_rate(audio.input_format), audio.transcription))
        await self.channel.send(
            self.channel.event("conversation.item.added", previous_item_id=before, item=item),
            self.channel.event("conversation.item.done", previous_item_id=before, item=item),
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
            raise BadRequest(f"`content_index` is {event.content_index}; it must be 0", param="content_index")
        spoken = self.spoken.get(event.item_id)
        if spoken is None or event.audio_end_ms > spoken.ms:
            ms = 0 if spoken is None else round(spoken.ms)
            message = f"item {event.item_id!r} has {ms} ms of audio; it cannot end at {event.audio_end_ms} ms"
            raise BadRequest(message, param="audio_end_ms")
        spoken.cut(event.audio_end_ms)
        self.ears.rest(0)
        if item["status"] != "in_progress":  # else it is cut when it is closed
            content = [{"type": "output_audio", "transcript": spoken.text}]
            self.conversation.replace({**item, "content": content})
        where = {"item_id": event.item_id, "content_index": 0, "audio_end_ms": event.audio_end_ms}
        await self._tell("conversation.item.truncated", **where)

    # -------------------------------------------------------------------------------------------------------- sound
    @property
    def speech(self) -> Speech:
        return Speech.here(self.service.bus.directory)

    def hear(self, pcm_bytes: int, rate: int) -> None:
        """Charge sound that a client sends. RateLimited if it has sent too much."""
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

    # ---------------------------------------------------------------------------------------------------- responses
    async def _create_response(self, event: events.ResponseCreate) -> None:
        if self.settings.kind != "realtime":
            raise BadRequest(
                "a transcription session makes no responses; set `session.type` to 'realtime'", param="type"
            )
        self._responses.create(event.response or events.ResponsePatch())

    async def _cancel_response(self, event: events.ResponseCancel) -> None:
        self._responses.cancel(event.response_id)
