"""One realtime session: hears the client's events, keeps the conversation, runs responses.

Every refused event becomes an `error` event that names it, and the socket lives on. One response at a time may write
the conversation; out-of-band ones run beside it. Responses run in tasks, so a cancel is heard while one speaks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import UNSET

from motet_shared.errors import BadRequest, UnsupportedParameter

from ..asgi import ClientGone, Receive
from ..problems import Problem
from ..service import Service
from . import events
from .audio_settings import Speech, check_voice
from .channel import Channel
from .conversation import Conversation, Stored, chat_messages, check_output, new_id, stored
from .ears import Ears
from .formats import decode, input_rate
from .outputs import Outputs
from .response import Response
from .settings import Settings
from .spoken import Spoken
from .transcripts import Transcripts

MAX_RESPONSES = 8  # at a time, out-of-band ones included


class ActiveResponse(BadRequest):
    code = "conversation_already_has_active_response"


class Session:
    """State of one connection."""

    def __init__(self, service: Service, channel: Channel, model: str):
        self._service = service
        self._channel = channel
        self._settings = Settings.default(model, self._speech)
        self._conversation = Conversation(service.config.max_message)
        self._transcripts = Transcripts(service, channel, self._conversation)
        self._ears = Ears(service, channel, self._conversation, self._transcripts, self, self._settings.audio)
        self._spoken: dict[str, Spoken] = {}  # by item
        self._turn: asyncio.Task[None] | None = None  # answers the last turn once its words are known
        self._responses: dict[str, Response] = {}
        self._writer: Response | None = None  # the response that writes the conversation
        self._epoch = 0
        self._draining = False
        self.id = new_id("sess")
        self._conversation_id = new_id("conv")
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

    async def run(self, receive: Receive) -> None:
        """Until the socket closes."""
        await self._tell("session.created", session=self._settings.as_session(self.id))
        try:
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    return
                await self._hear(message.get("text"))
        finally:
            await self._abandon()

    async def drain(self) -> None:
        """Let the responses that run end, then close with 1012: clients reconnect, elsewhere."""
        self._draining = True
        tasks = [response.task for response in self._responses.values() if response.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        with contextlib.suppress(ClientGone):
            await self._channel.close(1012, "the server restarts")

    async def _abandon(self) -> None:
        await self._ears.close()
        await self._transcripts.close()
        tasks = [response.task for response in self._responses.values() if response.task is not None]
        tasks += [self._turn] if self._turn is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            await self._channel.send(self._channel.error(Problem.of(error), given))

    async def _tell(self, kind: str, **fields: Any) -> None:
        await self._channel.send(self._channel.event(kind, **fields))

    async def _update(self, event: events.SessionUpdate) -> None:
        settings = self._settings.updated(event.session, self._speech)
        self._check_voice(settings, "session")
        self._settings = settings
        await self._ears.configure(settings.audio)
        await self._tell("session.updated", session=self._settings.as_session(self.id))

    async def _create_item(self, event: events.ItemCreate) -> None:
        events.check_item(event.item, "item", self._speech)
        check_output(event.item, self._conversation)
        item = stored(event.item, new_id("item"), new_id("call"))
        sounds = self._sounds(event.item)
        before = self._conversation.insert(item, event.previous_item_id)
        for index, pcm in sounds.items():
            audio = self._settings.audio
            self._transcripts.begin(item, index, pcm, input_rate(audio.input_format), audio.transcription)
        await self._channel.send(
            self._channel.event("conversation.item.added", previous_item_id=before, item=item),
            self._channel.event("conversation.item.done", previous_item_id=before, item=item),
        )

    async def _retrieve_item(self, event: events.ItemRetrieve) -> None:
        await self._tell("conversation.item.retrieved", item=self._conversation.get(event.item_id))

    async def _delete_item(self, event: events.ItemDelete) -> None:
        self._conversation.delete(event.item_id)
        self._spoken.pop(event.item_id, None)
        await self._tell("conversation.item.deleted", item_id=event.item_id)

    async def _truncate_item(self, event: events.ItemTruncate) -> None:
        item = self._conversation.get(event.item_id)
        if item.get("role") != "assistant":
            raise BadRequest("only messages of the assistant can be truncated", param="item_id")
        if event.content_index != 0:
            raise BadRequest(f"`content_index` is {event.content_index}; it must be 0", param="content_index")
        spoken = self._spoken.get(event.item_id) or Spoken()
        if event.audio_end_ms > spoken.ms:
            message = (
                f"item {event.item_id!r} has {spoken.ms:.0f} ms of audio; it cannot end at {event.audio_end_ms} ms"
            )
            raise BadRequest(message, param="audio_end_ms")
        spoken.cut(event.audio_end_ms)
        if item["status"] != "in_progress":  # else it is cut when it is closed
            content = [{"type": "output_audio", "transcript": spoken.text}]
            self._conversation.replace({**item, "content": content})
        where = {"item_id": event.item_id, "content_index": 0, "audio_end_ms": event.audio_end_ms}
        await self._tell("conversation.item.truncated", **where)

    # -------------------------------------------------------------------------------------------------------- sound
    @property
    def _speech(self) -> Speech:
        return Speech.here(self._service.bus.directory)

    async def _append_audio(self, event: events.AudioAppend) -> None:
        self._speech.need("type", ears=True)
        await self._ears.append(event.audio)

    async def _commit_audio(self, event: events.AudioCommit) -> None:
        self._speech.need("type", ears=True)
        await self._ears.commit()

    async def _clear_audio(self, event: events.AudioClear) -> None:
        await self._ears.clear()

    async def _clear_output(self, event: events.OutputClear) -> None:
        raise UnsupportedParameter(
            "output_audio_buffer.clear is for WebRTC; use conversation.item.truncate", param="type"
        )

    def _sounds(self, item: events.Item) -> dict[int, bytes]:
        """PCM of the spoken parts of a client's item whose words it does not tell."""
        if not isinstance(item, events.MessageItem):
            return {}
        silent = [(i, part.audio) for i, part in enumerate(item.content) if part.transcript is None]
        return {i: decode(audio, self._settings.audio.input_format) for i, audio in silent if audio is not None}

    def _check_voice(self, settings: Settings, where: str) -> None:
        """BadRequest for a voice that is unknown, or another one than was heard already."""
        voice, param = settings.audio.voice, f"{where}.audio.output.voice"
        if voice != self._settings.audio.voice and self._spoken:
            raise BadRequest(f"`{param}` cannot change once the model has spoken", param=param)
        check_voice(self._service.bus.directory, self._speech.voice, voice, param)

    @property
    def busy(self) -> bool:
        """Whether a reply is being made, or about to be."""
        return self._writer is not None or (self._turn is not None and not self._turn.done())

    async def interrupted(self) -> None:
        """The user speaks: the reply ends, in every service that works on it."""
        if self._writer is not None:
            self._epoch += 1
            self._writer.cancel("turn_detected")

    async def turn_ended(self, item: Stored, *, silent: bool = False) -> None:
        """Answer a turn as soon as its words are known; not one without words, nor one that goes on meanwhile."""
        if self._turn is not None:
            self._turn.cancel()
        self._turn = asyncio.create_task(self._answer(item, silent), name="turn")

    async def _answer(self, item: Stored, silent: bool) -> None:
        try:
            if self._writer is not None and self._writer.task is not None:
                await asyncio.wait([self._writer.task])  # it was interrupted, and closes its events
            await self._transcripts.wait([item])
            words = "".join(part.get("transcript") or "" for part in item["content"])
            if (words or silent) and not self._ears.speaking and self._writer is None and not self._draining:
                await self._create_response(events.ResponseCreate())
        except ClientGone:
            pass  # the session notices by itself
        except Exception as error:
            await self._complain(error)

    async def _complain(self, error: Exception) -> None:
        with contextlib.suppress(ClientGone):
            await self._channel.send(self._channel.error(Problem.of(error)))

    # ---------------------------------------------------------------------------------------------------- responses
    async def _create_response(self, event: events.ResponseCreate) -> None:
        patch = event.response or events.ResponsePatch()
        in_band = patch.conversation != "none"
        if in_band and self._writer is not None:
            message = f"response {self._writer.id} is in progress; cancel it or wait for response.done"
            raise ActiveResponse(message)
        if len(self._responses) >= MAX_RESPONSES:
            raise BadRequest(f"{len(self._responses)} responses run already; at most {MAX_RESPONSES} can")
        settings = self._settings.for_response(patch, self._speech)
        self._check_voice(settings, "response")
        context = self._context(patch)
        if not chat_messages(settings.instructions, context):
            raise BadRequest("there is nothing to respond to; create an item or give instructions", param="response")
        self._service.admit(settings.model)
        self._start(settings, context, patch, in_band)

    def _start(self, settings: Settings, context: list[Stored], patch: events.ResponsePatch, in_band: bool) -> None:
        self._epoch += 1
        head: dict[str, Any] = {
            "id": new_id("resp"),
            "conversation_id": self._conversation_id if in_band else None,
            "metadata": None if patch.metadata is UNSET else patch.metadata,
        }
        conversation = self._conversation if in_band else None
        outputs = Outputs(self._channel, conversation, head["id"], settings.audio.output_format, self._spoken)

        async def messages() -> list[dict[str, Any]]:
            await self._transcripts.wait(context)
            return chat_messages(settings.instructions, context)

        slot = self._service.limits.take()
        voice = self._speech.voice
        response = Response(self._service, self._channel, outputs, settings, messages, head, self._epoch, voice)
        self._responses[response.id] = response
        if in_band:
            self._writer = response
        response.task = asyncio.create_task(self._run_response(response))
        response.task.add_done_callback(lambda _: slot.release())

    async def _run_response(self, response: Response) -> None:
        try:
            await response.run()
        except ClientGone:
            pass  # the session notices by itself
        finally:
            self._responses.pop(response.id, None)
            if self._writer is response:
                self._writer = None
                self._ears.rest(response.sounding_ms)

    async def _cancel_response(self, event: events.ResponseCancel) -> None:
        response = self._responses.get(event.response_id) if event.response_id else self._writer
        if response is None:
            which = f"response {event.response_id!r}" if event.response_id else "no response"
            raise BadRequest(f"cancellation failed: {which} is in progress", param="response_id")
        response.cancel()

    def _context(self, patch: events.ResponsePatch) -> list[Stored]:
        """The items a response sees: those of the conversation, or the ones given with it."""
        if patch.input is UNSET:
            return self._conversation.items()
        context = []
        for index, item in enumerate(patch.input):
            if isinstance(item, events.ItemReference):
                context.append(self._conversation.get(item.id))
            else:
                events.check_item(item, f"response.input[{index}]", self._speech)
                context.append(given := stored(item, new_id("item"), new_id("call")))
                for part, pcm in self._sounds(item).items():
                    rate = input_rate(self._settings.audio.input_format)
                    self._transcripts.begin(given, part, pcm, rate, None)
        return context
