"""POST /v1/audio/transcriptions and POST /v1/audio/translations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from motet_pipelines.instances import check_served
from motet_pipelines.transcribe import NO_AUDIO, ROLE, Hearing, transcribe
from motet_shared.errors import MotetError
from motet_shared.messages import Segment, Transcribe

from .asgi import Exchange
from .audio_schema import AudioBody, Task, parse_audio
from .multipart import read_form
from .problems import Problem
from .render import error_event
from .service import Service
from .transcripts import delta_events, done_event, render
from .wire import fresh_seed


async def transcriptions(service: Service, http: Exchange) -> None:
    """Text in the language that is spoken."""
    await _answer(service, http, "transcribe")


async def translations(service: Service, http: Exchange) -> None:
    """Text in English."""
    await _answer(service, http, "translate")


async def _answer(service: Service, http: Exchange, task: Task) -> None:
    body = parse_audio(await read_form(http, service.config.max_upload), task)
    service.check_open()
    check_served(service.bus.directory, ROLE, body.model)
    with service.limits.take():
        transcript = _Transcript(service, http, body)
        if body.stream:
            await transcript.stream()
        else:
            await transcript.collect()


class _Transcript:
    """One file on its way to text."""

    def __init__(self, service: Service, http: Exchange, body: AudioBody):
        self._service, self._http, self._body = service, http, body
        self._hearing = Hearing()

    async def collect(self) -> None:
        async with self._http.while_connected():
            async with aclosing(await self._open()) as segments:
                whole = [segment async for segment in segments]
            body = self._body
            data, kind = render(body.format, body.task, whole, self._hearing, body.granularities)
            await self._http.reply(200, data, content_type=kind)

    async def stream(self) -> None:
        """Server-sent events. An error before the first text is raised; a later one is told and ends the stream."""
        text = ""
        try:
            async with self._http.while_connected(), aclosing(await self._open()) as segments:
                async for segment in segments:
                    await self._http.write(delta_events(segment, first=not text))
                    text += segment.text if text else segment.text.lstrip()
                await self._http.finish(done_event(text, self._hearing))
        except MotetError as error:
            if not self._http.started:
                raise
            await self._http.finish(error_event(Problem.of(error)))

    async def _open(self) -> AsyncGenerator[Segment, None]:
        body, config = self._body, self._service.config
        request = Transcribe(
            model=body.model,
            audio=NO_AUDIO,
            language=body.language,
            task=body.task,
            prompt=body.prompt,
            temperature=body.temperature,
            words=body.words,
            seed=fresh_seed() & 0xFFFFFFFF,
            request_id=self._http.request_id,
        )
        return transcribe(
            self._service.bus,
            await self._service.uploads(),
            body.file,
            request,
            self._hearing,
            deadline=config.request_timeout,
            patience=config.patience,
        )
