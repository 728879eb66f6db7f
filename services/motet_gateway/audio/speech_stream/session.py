"""Speak what one client writes: its reader queues text, its speaker sends audio in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from motet_gateway.audio.speech import speech_model
from motet_gateway.audio.voices import cloned_voice
from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone, Receive
from motet_gateway.http.json_size import check_json
from motet_gateway.http.problems import Problem
from motet_gateway.http.socket import Socket
from motet_gateway.kept import draws
from motet_gateway.kept.session import END, KeptSession
from motet_gateway.openai.hints import Ignored
from motet_gateway.realtime.events import event_id
from motet_gateway.tenancy.auth import Caller
from motet_pipelines.answers import noted
from motet_shared.errors import BadRequest, Draining

from . import events
from .outbox import ANSWERS, Outbox
from .speaker import Speaker
from .texts import Settings, Texts, Utterance

log = logging.getLogger(__name__)

PATH = "/v1/audio/speech/stream"
_NORMAL, _LEAVING, _RESTARTING, _EXPELLED = 1000, 1001, 1012, 3000  # close codes


class SpeechSession:
    """Serve one connection."""

    def __init__(
        self,
        service: GatewayContext,
        socket: Socket,
        caller: Caller,
        kept: KeptSession | None = None,
    ):
        """`kept`: what keeps it beyond the death of this gateway."""
        self.id = "speech_" + draws.token_hex(12, "session")
        self.caller = caller
        self._service, self._socket, self._kept = service, socket, kept
        self._outbox = Outbox(socket, kept)
        self._request_id = noted("request_id", socket.request_id)
        self._received = 0  # messages of the client
        self._texts = Texts()
        self._settings: Settings | None = None
        self._draining = False
        self._speaking: asyncio.Task[None] | None = None  # the current utterance
        self._tasks: list[asyncio.Task[None]] = []
        self._handlers: dict[type[events.ClientEvent], Callable[[Any], Awaitable[None]]] = {
            events.SessionConfig: self._configure,
            events.InputText: self._write,
            events.InputDone: self._end,
            events.InputCancel: self._cancel,
            events.SessionClose: self._close,
        }

    async def run(self, receive: Receive) -> None:
        """Serve the client until it leaves, or everything is spoken after `session.close`."""
        self._tasks = [
            asyncio.create_task(self._read(receive), name="speech-reader"),
            asyncio.create_task(self._speak(), name="speech-speaker"),
        ]
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self.abandon()
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def drain(self) -> None:
        """Begin no utterance any more; once all are spoken, close with code 1012."""
        self._draining = True
        if not self._texts.is_open:
            self._texts.close()
        if self._tasks:
            await asyncio.wait(self._tasks[1:])

    async def expel(self, why: str) -> None:
        """End the session with close code 3000, whatever is under way."""
        with contextlib.suppress(ClientGone):
            await self._socket.close(_EXPELLED, why)
        await self._service.sessions.end(self)

    async def abandon(self) -> None:
        """End everything that runs for the session."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -------------------------------------------------------------------------------------- reading
    async def _read(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            if self._kept is not None:
                await self._kept.input()
            self._received += 1
            await self._handle(message.get("text"))

    async def _handle(self, text: str | None) -> None:
        """Handle one event. Any error is sent to the client, and the socket stays open."""
        was_accepted = False
        try:
            with self._outbox.deciding(f"message {self._received}") as was_accepted:
                await self._obey(text)
        except ClientGone:
            raise
        except Exception as error:
            if was_accepted and self._kept is not None:  # what followed cannot be made again
                log.warning("a spoken text cannot go on: %s", error)
                self._kept.abort()
                raise ClientGone from None
            problem = Problem.of(error)
            problem.note(PATH)
            shown = events.error(problem, event_id(text) if text else None)
            await self._outbox.send(ANSWERS, lambda: (shown,))

    async def _obey(self, text: str | None) -> None:
        if text is None:
            raise BadRequest("binary messages are not part of this protocol; send JSON as text")
        check_json(text, self.caller.tenant)
        ignored = None if self._service.config.strict else Ignored("speech")
        event = events.decode(text, ignored)
        if ignored is not None and ignored.paths:
            log.info("%s ignores %s", PATH, ignored.names, extra={"ignored": ignored.names})
        await self._handlers[type(event)](event)

    async def _configure(self, config: events.SessionConfig) -> None:
        if self._texts.is_open:
            raise BadRequest(
                "`session.config` in the middle of an utterance; send `input.done` first",
                param="type",
            )
        events.check_config(config)
        model = speech_model(self._service, config.model, config)
        owner = self.caller.tenant.owner
        cloned = await cloned_voice(self._service, owner, model, config.voice_name)
        self._settings = Settings(config, model, cloned)

    async def _write(self, event: events.InputText) -> None:
        self._check_open()
        self._texts.write(event.text, self._configured)

    async def _end(self, event: events.InputDone) -> None:
        self._check_open()
        self._texts.end(self._configured)
        if self._draining:
            self._texts.close()

    async def _cancel(self, event: events.InputCancel) -> None:
        if self._texts.cancel() is not None and self._speaking is not None:
            self._speaking.cancel()
        if self._draining:
            self._texts.close()

    async def _close(self, event: events.SessionClose) -> None:
        self._texts.close()

    @property
    def _configured(self) -> Settings:
        if self._settings is None:
            raise BadRequest("send `session.config` first", param="type")
        return self._settings

    def _check_open(self) -> None:
        """Raise Draining for a new utterance while the gateway is stopping."""
        if self._draining and not self._texts.is_open:
            raise Draining("this server is stopping; connect again")

    # ------------------------------------------------------------------------------------- speaking
    async def _speak(self) -> None:
        """Speak all utterances, one after another, and close the socket after the last."""
        while (utterance := await self._texts.take()) is not None:
            speaker = Speaker(
                self._service, self._outbox, self.caller.tenant, self._texts, self._request_id
            )
            self._speaking = asyncio.create_task(speaker.run(utterance), name="utterance")
            if utterance.refused:
                self._speaking.cancel()
            try:
                await asyncio.wait([self._speaking])
            except asyncio.CancelledError:
                self._speaking.cancel()
                await asyncio.wait([self._speaking])
                raise
            await self._finish(utterance, speaker, self._speaking)
        if self._draining:
            await self._socket.close(_RESTARTING, "the server restarts; connect again")
        else:
            await self._socket.close(_NORMAL)

    async def _finish(
        self, utterance: Utterance, speaker: Speaker, task: asyncio.Task[None]
    ) -> None:
        """Send the end of an utterance, with the error that ended it, if any."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ClientGone):
            raise error
        utterance.refused = utterance.refused or error is not None
        problem = None
        if error is not None:
            problem = Problem.of(error)
            problem.note(PATH)
        await self._outbox.send(
            utterance.sequence + END, lambda: speaker.ending(utterance, problem)
        )
