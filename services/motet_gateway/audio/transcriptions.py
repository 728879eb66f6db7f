"""Serve POST /v1/audio/transcriptions and POST /v1/audio/translations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.multipart import read_form
from motet_gateway.http.problems import Problem
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.prompts import check_prompt
from motet_gateway.openai.render import error_event
from motet_gateway.openai.requests import random_seed
from motet_gateway.tenancy.tenant import SECOND
from motet_gateway.tenancy.usage import settled
from motet_media.pool import decoding
from motet_media.sound_file import claimed_seconds
from motet_pipelines.chat.models import servable
from motet_pipelines.voice.chat_transcription import transcribe_by_chat
from motet_pipelines.voice.diarized_transcript import Part, speakers_model, transcribe_speakers
from motet_pipelines.voice.speech_detection import MODEL as VAD_MODEL
from motet_pipelines.voice.speech_detection import ROLE as VAD
from motet_pipelines.voice.transcribe import NO_AUDIO, ROLE, TranscriptionOutcome, transcribe
from motet_shared.errors import MotetError, UnsupportedParameter
from motet_shared.messages import Chat, Sampling, Transcribe
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import check_served, served

from .known_speakers import check_sounds
from .transcript_formats import delta_events, done_event, render, render_speakers
from .transcription_schema import AudioBody, Task, parse_audio

SHORTEST = 1.0  # seconds assumed for a file without a length in its header


async def transcriptions(service: GatewayContext, http: Exchange) -> None:
    """Answer with text in the spoken language."""
    await _answer(service, http, "transcribe")


async def translations(service: GatewayContext, http: Exchange) -> None:
    """Answer with text in English."""
    await _answer(service, http, "translate")


async def _answer(service: GatewayContext, http: Exchange, task: Task) -> None:
    body = parse_audio(
        await read_form(http, service.config.max_upload, surface="transcription"), task
    )
    service.check_open()
    directory = service.bus.directory
    by_chat = hears_in_chats(directory, body.model)
    if by_chat:
        check_by_chat(body)
    else:
        body = replace(body, model=model_of(directory, ROLE, body.model))
    check_prompt(service.bus.directory, body.model, body.prompt, "prompt")
    async with http.while_connected():
        await _check(service, body)
        claimed = await decoding(claimed_seconds, body.file)
    expected = int(max(claimed, SHORTEST) * SECOND)
    with await http.tenant.take(audio=expected) as ticket:
        transcript = _TranscriptionCall(service, http, body, claimed if by_chat else None)
        with settled(ticket.audio, expected, lambda: transcript.length):
            await (transcript.stream() if body.stream else transcript.collect())


def hears_in_chats(directory: Directory, model: str) -> bool:
    """Return True for a chat model that hears, if no recognizer has its name."""
    card = servable(directory).get(model)
    return card is not None and card.audio and model not in served(directory, ROLE)


def check_by_chat(body: AudioBody) -> None:
    """Raise UnsupportedParameter for a form that a chat model cannot answer."""
    if body.diarization is not None:
        raise UnsupportedParameter(
            f"`response_format`: {body.model!r} is a chat model, which does not say who speaks when; "
            "choose another format, or a model of docs/recognizers.md",
            param="response_format",
        )
    if body.vad:
        raise UnsupportedParameter(
            f"`chunking_strategy`: {body.model!r} is a chat model, which hears a recording as a "
            "whole; leave it out",
            param="chunking_strategy",
        )


async def _check(service: GatewayContext, body: AudioBody) -> None:
    """Check that all services the request needs are served, and its speaker references."""
    directory = service.bus.directory
    if body.vad or body.diarization is not None:
        check_served(directory, VAD, VAD_MODEL)
    if body.diarization is not None:
        speakers_model(directory)
        await decoding(check_sounds, body.known)


class _TranscriptionCall:
    """Transcribe one file.

    heard: seconds that the file claims to last, if a chat model is to hear it; else None.
    """

    def __init__(
        self, service: GatewayContext, http: Exchange, body: AudioBody, heard: float | None = None
    ):
        self._service, self._http, self._body = service, http, body
        self._hearing = TranscriptionOutcome()
        self._heard = heard

    @property
    def length(self) -> int:
        """Return the duration of the audio in microseconds; 0: not known yet."""
        return round(self._hearing.duration * SECOND)

    async def collect(self) -> None:
        async with self._http.while_connected():
            async with aclosing(self._parts()) as parts:
                whole = [part async for part in parts]
            data, kind = self._rendered(whole)
            await self._http.reply(200, data, content_type=kind)

    def _rendered(self, parts: list[Part]) -> tuple[bytes, bytes]:
        body = self._body
        if body.diarization is not None:
            return render_speakers(parts, self._hearing)
        segments = [part.segment for part in parts]
        return render(body.format, body.task, segments, self._hearing, body.granularities)

    async def stream(self) -> None:
        """Send server-sent events.

        An error before the first text is raised; a later one is sent as an event and ends the
        stream.
        """
        text = ""
        try:
            async with self._http.while_connected(), aclosing(self._parts()) as parts:
                async for part in parts:
                    await self._http.write(delta_events(part, first=not text))
                    text += part.segment.text if text else part.segment.text.lstrip()
                await self._http.finish(done_event(text, self._hearing))
        except MotetError as error:
            if not self._http.started:
                raise
            await self._http.finish(error_event(Problem.of(error)))

    async def _parts(self) -> AsyncGenerator[Part, None]:
        """Yield the segments, with speakers if they were asked for."""
        body, config = self._body, self._service.config
        source = (self._service.bus, await self._service.uploads(), body.file, self._request())
        deadline, patience = config.request_timeout, config.patience
        if body.diarization is not None:
            asked = body.diarization
            parts = transcribe_speakers(
                *source, asked, self._hearing, deadline=deadline, patience=patience
            )
            async with aclosing(parts):
                async for part in parts:
                    yield part
            return
        segments = (
            transcribe_by_chat(
                *source,
                self._chat(),
                self._hearing,
                seconds=self._heard,
                in_pieces=body.stream,
                deadline=deadline,
                patience=patience,
            )
            if self._heard is not None
            else transcribe(
                *source, self._hearing, speech=body.speech, deadline=deadline, patience=patience
            )
        )
        async with aclosing(segments):
            async for segment in segments:
                yield Part(segment, "")

    def _chat(self) -> Chat:
        """Return the request to a chat model that hears, without its messages."""
        rights = self._http.tenant.rights
        return Chat(
            model=self._body.model,
            messages=[],
            sampling=Sampling(),
            request_id=self._http.request_id,
            priority=rights.priority(None),
            tenant=rights.share(""),
            max_context=rights.max_context,
        )

    def _request(self) -> Transcribe:
        body = self._body
        return Transcribe(
            model=body.model,
            audio=NO_AUDIO,
            language=body.language,
            task=body.task,
            prompt=body.prompt,
            temperature=body.temperature,
            words=body.words,
            seed=random_seed() & 0xFFFFFFFF,
            request_id=self._http.request_id,
        )
