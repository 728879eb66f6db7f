"""Start and cancel the responses of a session, on request or after a user's turn.

One response at a time writes the conversation; out-of-band ones run beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

from msgspec import UNSET

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone
from motet_gateway.http.problems import Problem
from motet_gateway.openai.prompt_size import PromptSize
from motet_gateway.tenancy.auth import Caller
from motet_gateway.tenancy.tenant import SECOND, Ticket
from motet_gateway.tenancy.usage import REPLY_TOKENS, messages_tokens
from motet_shared.errors import BadRequest
from motet_shared.wire.epochs import NO_EPOCH, Epoch

from . import events
from .audio_input import AudioInput
from .audio_settings import Speech, check_voice
from .channel import Channel
from .conversation import Conversation, Stored, chat_messages, new_id, stored
from .formats import input_rate
from .item_transcription import HeardPart, ItemTranscription
from .outputs import Outputs
from .response import Response
from .session_settings import SessionSettings
from .spoken_words import SpokenWords

MAX_RESPONSES = 8  # at a time, out-of-band ones included


class ActiveResponse(BadRequest):
    code = "conversation_already_has_active_response"


class NothingToCancel(BadRequest):
    """Refuse to cancel a response that does not run.

    Clients that cancel just as a response ends ignore this code, or the first words of its message.
    """

    code = "response_cancel_not_active"


class SessionState(Protocol):
    """Describe the state of a session that its responses read and write."""

    id: str
    service: GatewayContext
    caller: Caller
    channel: Channel
    settings: SessionSettings
    conversation: Conversation
    transcripts: ItemTranscription
    ears: AudioInput
    spoken: dict[str, SpokenWords]

    @property
    def speech(self) -> Speech: ...

    def hear(self, pcm_bytes: int, rate: int) -> None: ...


class ResponseQueue:
    """Keep the responses of one session."""

    def __init__(self, session: SessionState):
        self._session = session
        self._running: dict[str, Response] = {}
        self._writer: Response | None = None  # the response that writes the conversation
        self._turn: asyncio.Task[None] | None = (
            None  # answers the last turn once its words are known
        )
        self._owed = False  # the user spoke since the last response began
        self._epoch = 0
        self._draining = False
        self._conversation_id = new_id("conv")

    @property
    def busy(self) -> bool:
        """Return True if a reply is being generated or is about to be."""
        return self.replying or (self._turn is not None and not self._turn.done())

    @property
    def replying(self) -> bool:
        """Return True if a reply is being generated."""
        return self._writer is not None

    # ----------------------------------------------------------------------------------- on request
    def create(self, patch: events.ResponsePatch) -> None:
        session, in_band = self._session, patch.conversation != "none"
        if in_band and self._writer is not None:
            message = (
                f"response {self._writer.id} is in progress; cancel it or wait for response.done"
            )
            raise ActiveResponse(message)
        if len(self._running) >= MAX_RESPONSES:
            raise BadRequest(
                f"{len(self._running)} responses run already; at most {MAX_RESPONSES} can"
            )
        settings = session.settings.for_response(patch, session.speech)
        directory, spoken = session.service.bus.directory, bool(session.spoken)
        check_voice(directory, settings.audio, session.settings.audio, spoken, "response")
        context = self._context(patch)
        if not chat_messages(settings.instructions, context):
            raise BadRequest(
                "there is nothing to respond to; create an item or give instructions",
                param="response",
            )
        session.service.admit(settings.model)
        session.caller.tenant.count_request()
        self._start(settings, context, patch, in_band)

    def cancel(self, response_id: str | None) -> None:
        response = self._running.get(response_id) if response_id else self._writer
        if response is None:
            which = f"response {response_id!r}" if response_id else "no response"
            raise NothingToCancel(
                f"Cancellation failed: {which} is in progress", param="response_id"
            )
        response.cancel()

    def _start(
        self,
        settings: SessionSettings,
        context: list[Stored],
        patch: events.ResponsePatch,
        in_band: bool,
    ) -> None:
        session = self._session
        head: dict[str, Any] = {
            "id": new_id("resp"),
            "conversation_id": self._conversation_id if in_band else None,
            "metadata": None if patch.metadata is UNSET else patch.metadata,
        }
        conversation = session.conversation if in_band else None
        outputs = Outputs(
            session.channel, conversation, head["id"], settings.audio.output_format, session.spoken
        )

        async def messages() -> list[dict[str, Any]]:
            await session.transcripts.wait(context)
            return chat_messages(settings.instructions, context)

        ticket = self._take(settings, context)
        voice = session.speech.voice
        epoch = self._next_epoch() if in_band else NO_EPOCH
        response = Response(
            session.service,
            session.channel,
            outputs,
            settings,
            messages,
            head,
            epoch,
            voice,
            ticket,
            session.caller.tenant,
        )
        self._running[response.id] = response
        if in_band:
            self._writer, self._owed = response, False
        response.task = asyncio.create_task(self._run(response))
        response.task.add_done_callback(lambda _: ticket.release())

    def _take(self, settings: SessionSettings, context: list[Stored]) -> Ticket:
        """Return a ticket for one reply. Raises RateLimited, Overloaded or Draining."""
        tenant, limit = self._session.caller.tenant, settings.max_output_tokens
        said = chat_messages(settings.instructions, context)
        size = PromptSize.of(
            self._session.service.bus.directory, "tokenizer", settings.model, tenant
        )
        size.check_tools(settings.wire_tools())
        size.check_text(said, "response")
        tokens = messages_tokens(said) + (REPLY_TOKENS if limit == "inf" else limit)
        return tenant.take(tokens=tokens, audio=SECOND if settings.speaks else 0)

    def _next_epoch(self) -> Epoch:
        """Return the epoch of a reply that writes the conversation; earlier epochs are stale."""
        self._epoch += 1
        return Epoch(self._session.id, self._epoch)

    async def _run(self, response: Response) -> None:
        try:
            await response.run()
        except ClientGone:
            pass  # the session detects the disconnect
        finally:
            self._running.pop(response.id, None)
            if self._writer is response:
                self._writer = None
                self._session.ears.rest(response.sounding_ms)

    def _context(self, patch: events.ResponsePatch) -> list[Stored]:
        """Return the items that a response sees: the conversation's, or those in its request."""
        session = self._session
        if not isinstance(patch.input, list):
            return session.conversation.items()
        context, heard_as = [], session.settings.audio.input_format
        for index, item in enumerate(patch.input):
            if isinstance(item, events.ItemReference):
                context.append(session.conversation.get(item.id))
            else:
                events.check_item(item, f"response.input[{index}]", session.speech)
                context.append(given := stored(item, new_id("item"), new_id("call")))
                for part, pcm in events.sounds(item, heard_as).items():
                    session.hear(len(pcm), input_rate(heard_as))
                    session.transcripts.begin(
                        given, part, HeardPart(pcm, input_rate(heard_as), None)
                    )
        return context

    # ---------------------------------------------------------------------------------- after turns
    def interrupt(self) -> None:
        """Cancel the reply because the user speaks, in every service that works on it."""
        if self._writer is not None:
            self._writer.cancel("turn_detected")

    def answer(self, item: Stored, ears: AudioInput, *, silent: bool) -> None:
        """Answer a turn as soon as its words are known; a turn without words only if `silent`."""
        if self._turn is not None:
            self._turn.cancel()
        self._turn = asyncio.create_task(self._answer(item, ears, silent), name="turn")

    async def _answer(self, item: Stored, ears: AudioInput, silent: bool) -> None:
        """Answer a turn; if the user goes on in the meantime, it is answered with the next turn."""
        try:
            await self._session.transcripts.wait([item])
            self._owed |= silent or any(part.get("transcript") for part in item["content"])
            if self._writer is not None and self._writer.task is not None:
                await asyncio.wait(
                    [self._writer.task]
                )  # it was interrupted and closes, or may finish first
            if self._owed and not ears.speaking and not self._draining:
                self.create(events.ResponsePatch())
        except Exception as error:
            with contextlib.suppress(ClientGone):  # the session detects the disconnect
                await self._session.channel.send(self._session.channel.error(Problem.of(error)))

    # ------------------------------------------------------------------------------------- shutdown
    async def drain(self) -> None:
        """Wait until all running responses have ended; turns are no longer answered."""
        self._draining = True
        if tasks := self._tasks():
            await asyncio.wait(tasks)

    async def abandon(self) -> None:
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        tasks = [response.task for response in self._running.values()] + [self._turn]
        return [task for task in tasks if task is not None]
