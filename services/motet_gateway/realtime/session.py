"""One realtime session: hears the client's events, keeps the conversation, runs responses.

Every refused event becomes an `error` event that names it, and the socket lives on. One response at a time may write
the conversation; out-of-band ones run beside it. Responses run in tasks, so a cancel is heard while one speaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import UNSET

from motet_shared.errors import BadRequest, UnsupportedParameter

from ..asgi import ClientGone, Receive
from ..problems import Problem
from ..service import Service
from . import events
from .channel import Channel
from .conversation import Conversation, Stored, chat_messages, check_output, new_id, stored
from .outputs import Outputs
from .response import Response
from .settings import Settings

MAX_RESPONSES = 8  # at a time, out-of-band ones included


class ActiveResponse(BadRequest):
    code = "conversation_already_has_active_response"


class Session:
    """State of one connection."""

    def __init__(self, service: Service, channel: Channel, model: str):
        self._service = service
        self._channel = channel
        self._settings = Settings(model=model)
        self._conversation = Conversation(service.config.max_message)
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
            events.AudioAppend: self._refuse_audio,
            events.AudioCommit: self._refuse_audio,
            events.AudioClear: self._clear_audio,
            events.OutputClear: self._refuse_audio,
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
        await self._channel.close(1012, "the server restarts")

    async def _abandon(self) -> None:
        tasks = [response.task for response in self._responses.values() if response.task is not None]
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
        self._settings = self._settings.updated(event.session)
        await self._tell("session.updated", session=self._settings.as_session(self.id))

    async def _create_item(self, event: events.ItemCreate) -> None:
        events.check_item(event.item, "item")
        check_output(event.item, self._conversation)
        item = stored(event.item, new_id("item"), new_id("call"))
        before = self._conversation.insert(item, event.previous_item_id)
        await self._channel.send(
            self._channel.event("conversation.item.added", previous_item_id=before, item=item),
            self._channel.event("conversation.item.done", previous_item_id=before, item=item),
        )

    async def _retrieve_item(self, event: events.ItemRetrieve) -> None:
        await self._tell("conversation.item.retrieved", item=self._conversation.get(event.item_id))

    async def _delete_item(self, event: events.ItemDelete) -> None:
        self._conversation.delete(event.item_id)
        await self._tell("conversation.item.deleted", item_id=event.item_id)

    async def _truncate_item(self, event: events.ItemTruncate) -> None:
        item = self._conversation.get(event.item_id)
        if item.get("role") != "assistant":
            raise BadRequest("only messages of the assistant can be truncated", param="item_id")
        if event.content_index != 0:
            raise BadRequest(f"`content_index` is {event.content_index}; it must be 0", param="content_index")
        message = f"item {event.item_id!r} has 0 ms of audio; it cannot end at {event.audio_end_ms} ms"
        raise BadRequest(message, param="audio_end_ms")

    async def _refuse_audio(self, event: events.ClientEvent) -> None:
        kind = str(event.__struct_config__.tag)
        raise UnsupportedParameter(f"{kind}: {events.SPEECH_MISSING}", param="type")

    async def _clear_audio(self, event: events.AudioClear) -> None:
        await self._tell("input_audio_buffer.cleared")  # it is always empty

    # ---------------------------------------------------------------------------------------------------- responses
    async def _create_response(self, event: events.ResponseCreate) -> None:
        patch = event.response or events.ResponsePatch()
        in_band = patch.conversation != "none"
        if in_band and self._writer is not None:
            message = f"response {self._writer.id} is in progress; cancel it or wait for response.done"
            raise ActiveResponse(message)
        if len(self._responses) >= MAX_RESPONSES:
            raise BadRequest(f"{len(self._responses)} responses run already; at most {MAX_RESPONSES} can")
        settings = self._settings.for_response(patch)
        messages = chat_messages(settings.instructions, self._context(patch))
        if not messages:
            raise BadRequest("there is nothing to respond to; create an item or give instructions", param="response")
        self._service.admit(settings.model)
        self._start(settings, messages, patch, in_band)

    def _start(
        self, settings: Settings, messages: list[dict[str, Any]], patch: events.ResponsePatch, in_band: bool
    ) -> None:
        self._epoch += 1
        head: dict[str, Any] = {
            "id": new_id("resp"),
            "conversation_id": self._conversation_id if in_band else None,
            "metadata": None if patch.metadata is UNSET else patch.metadata,
        }
        outputs = Outputs(self._channel, self._conversation if in_band else None, head["id"])
        slot = self._service.limits.take()
        response = Response(self._service, self._channel, outputs, settings, messages, head, self._epoch)
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
                events.check_item(item, f"response.input[{index}]")
                context.append(stored(item, new_id("item"), new_id("call")))
        return context
