"""The responses of a session: which may run, what they see, and the turns that ask for one by themselves.

One at a time writes the conversation; those out of band run beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from motet_shared.epochs import NO_EPOCH, Epoch
from motet_shared.errors import BadRequest

from ..asgi import ClientGone
from ..problems import Problem
from ..tenants import SECOND, Ticket
from ..usage import REPLY_TOKENS, messages_tokens
from . import events
from .audio_settings import check_voice
from .conversation import Stored, chat_messages, new_id, stored
from .ears import Ears
from .formats import input_rate
from .outputs import Outputs
from .response import Response
from .settings import Settings
from .transcripts import Heard

if TYPE_CHECKING:
    from .session import Session

MAX_RESPONSES = 8  # at a time, out-of-band ones included


class ActiveResponse(BadRequest):
    code = "conversation_already_has_active_response"


class NothingToCancel(BadRequest):
    """Clients that cancel just as a response ends pass over this code, or over the first words of its message."""

    code = "response_cancel_not_active"


class Responses:
    """Of one session."""

    def __init__(self, session: Session):
        self._session = session
        self._running: dict[str, Response] = {}
        self._writer: Response | None = None  # the one that writes the conversation
        self._turn: asyncio.Task[None] | None = None  # answers the last turn once its words are known
        self._owed = False  # something was said since the last response began
        self._epoch = 0
        self._draining = False
        self._conversation_id = new_id("conv")

    @property
    def busy(self) -> bool:
        """Whether a reply is being made, or about to be."""
        return self.replying or (self._turn is not None and not self._turn.done())

    @property
    def replying(self) -> bool:
        """Whether a reply is being made."""
        return self._writer is not None

    # ---------------------------------------------------------------------------------------------------- on request
    def create(self, patch: events.ResponsePatch) -> None:
        session, in_band = self._session, patch.conversation != "none"
        if in_band and self._writer is not None:
            message = f"response {self._writer.id} is in progress; cancel it or wait for response.done"
            raise ActiveResponse(message)
        if len(self._running) >= MAX_RESPONSES:
            raise BadRequest(f"{len(self._running)} responses run already; at most {MAX_RESPONSES} can")
        settings = session.settings.for_response(patch, session.speech)
        directory, spoken = session.service.bus.directory, bool(session.spoken)
        check_voice(directory, settings.audio, session.settings.audio, spoken, "response")
        context = self._context(patch)
        if not chat_messages(settings.instructions, context):
            raise BadRequest("there is nothing to respond to; create an item or give instructions", param="response")
        session.service.admit(settings.model)
        session.caller.tenant.call()
        self._start(settings, context, patch, in_band)

    def cancel(self, response_id: str | None) -> None:
        response = self._running.get(response_id) if response_id else self._writer
        if response is None:
            which = f"response {response_id!r}" if response_id else "no response"
            raise NothingToCancel(f"Cancellation failed: {which} is in progress", param="response_id")
        response.cancel()

    def _start(self, settings: Settings, context: list[Stored], patch: events.ResponsePatch, in_band: bool) -> None:
        session = self._session
        head: dict[str, Any] = {
            "id": new_id("resp"),
            "conversation_id": self._conversation_id if in_band else None,
            "metadata": None if patch.metadata is UNSET else patch.metadata,
        }
        conversation = session.conversation if in_band else None
        outputs = Outputs(session.channel, conversation, head["id"], settings.audio.output_format, session.spoken)

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

    def _take(self, settings: Settings, context: list[Stored]) -> Ticket:
        """Room for one reply. RateLimited, Overloaded or Draining if there is none."""
        tenant, limit = self._session.caller.tenant, settings.max_output_tokens
        said = chat_messages(settings.instructions, context)
        tokens = messages_tokens(said) + (REPLY_TOKENS if limit == "inf" else limit)
        return tenant.take(tokens=tokens, audio=SECOND if settings.speaks else 0)

    def _next_epoch(self) -> Epoch:
        """Of a reply that writes the conversation: what still runs for the one before it is out of date."""
        self._epoch += 1
        return Epoch(self._session.id, self._epoch)

    async def _run(self, response: Response) -> None:
        try:
            await response.run()
        except ClientGone:
            pass  # the session notices by itself
        finally:
            self._running.pop(response.id, None)
            if self._writer is response:
                self._writer = None
                self._session.ears.rest(response.sounding_ms)

    def _context(self, patch: events.ResponsePatch) -> list[Stored]:
        """The items a response sees: those of the conversation, or the ones given with it."""
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
                    session.transcripts.begin(given, part, Heard(pcm, input_rate(heard_as), None))
        return context

    # ---------------------------------------------------------------------------------------------------- after turns
    def interrupt(self) -> None:
        """The user speaks: the reply ends, in every service that works on it."""
        if self._writer is not None:
            self._writer.cancel("turn_detected")

    def answer(self, item: Stored, ears: Ears, *, silent: bool) -> None:
        """Answer a turn as soon as its words are known; not one without words, unless it is `silent` by intent."""
        if self._turn is not None:
            self._turn.cancel()
        self._turn = asyncio.create_task(self._answer(item, ears, silent), name="turn")

    async def _answer(self, item: Stored, ears: Ears, silent: bool) -> None:
        """If the user goes on meanwhile, the next turn is answered together with this one."""
        try:
            await self._session.transcripts.wait([item])
            self._owed |= silent or any(part.get("transcript") for part in item["content"])
            if self._writer is not None and self._writer.task is not None:
                await asyncio.wait([self._writer.task])  # it was interrupted and closes, or may finish first
            if self._owed and not ears.speaking and not self._draining:
                self.create(events.ResponsePatch())
        except Exception as error:
            with contextlib.suppress(ClientGone):  # the session notices by itself
                await self._session.channel.send(self._session.channel.error(Problem.of(error)))

    # ------------------------------------------------------------------------------------------------------- the end
    async def drain(self) -> None:
        """Until all that run have ended; turns are no longer answered."""
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
