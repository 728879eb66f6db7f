"""Serve POST /v1/audio/speech: text to speech, as bytes or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Int64, Strict
from motet_gateway.http.json_size import check_json
from motet_gateway.http.problems import Problem
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.render import error_event
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import SpeechMeter, speech_length
from motet_pipelines.voice.speak import ClonedVoice, Outcome, speak
from motet_shared.errors import Draining, MotetError, UnsupportedParameter
from motet_shared.messages import Audio, Speak
from motet_shared.wire.instances import served

from .encoder import Encoder, make_encoder
from .voices import cloned_voice


class VoiceId(Strict):
    id: str


class SpeechBody(Strict):
    """OpenAI's fields, and as extensions `seed` and the formats of telephony: G.711 at 8 kHz."""

    model: str
    input: Annotated[str, Meta(min_length=1, max_length=65_536)]
    voice: str | VoiceId | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm", "pcmu", "pcma"] = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    stream_format: Literal["audio", "sse"] = "audio"
    instructions: Annotated[str, Meta(max_length=4096)] | None = None
    seed: Int64 | None = None


_decoder = Decoder(SpeechBody)


async def speech(service: GatewayContext, http: Exchange) -> None:
    """Answer with speech, as raw bytes or as events."""
    data = await http.body(service.config.max_body)
    check_json(data, http.tenant, "input")
    body = _decoder.decode(data, http.hints("speech"))
    if service.limits.draining:
        raise Draining("this server is stopping; try again in a moment")
    body = msgspec.structs.replace(body, model=model_of(service.bus.directory, "tts", body.model))
    card = served(service.bus.directory, "tts").get(body.model)
    if body.instructions and card is not None and not card.instructions:
        raise UnsupportedParameter(
            f"`instructions` are not followed by {body.model!r}; choose another `voice` instead",
            param="instructions",
        )
    encoder = make_encoder(body.response_format)
    cloned = await cloned_voice(service, http.tenant.owner, body.model, _voice(body))
    with http.tenant.take(audio=speech_length(body.input, body.speed)) as ticket:
        async with http.while_connected():
            if body.stream_format == "sse":
                spoken = _SpeechStream(service, http, body, encoder, ticket, cloned)
                await _events(http, spoken)
            else:
                http.content = [
                    (b"content-type", encoder.content_type.encode()),
                    (b"x-accel-buffering", b"no"),
                ]
                spoken = _SpeechStream(service, http, body, encoder, ticket, cloned)
                await spoken.run(lambda data: http.write(data))
                await http.finish(await spoken.rest())


async def _events(http: Exchange, spoken: _SpeechStream) -> None:
    """Send `speech.audio.delta`s and one `speech.audio.done`, which has the times of words too."""
    try:
        await spoken.run(lambda data: http.write(_delta(data)))
        rest = await spoken.rest()
        await http.finish((_delta(rest) if rest else b"") + _event(spoken.done()))
    except MotetError as error:
        if not http.started:
            raise
        await http.finish(error_event(Problem.of(error)))


class _SpeechStream:
    """Run one text through the pipeline and an encoder."""

    def __init__(
        self,
        service: GatewayContext,
        http: Exchange,
        body: SpeechBody,
        encoder: Encoder,
        ticket: Ticket,
        cloned: ClonedVoice | None,
    ):
        self._service, self._encoder, self._cloned = service, encoder, cloned
        self._meter = SpeechMeter(ticket.audio)
        self._outcome = Outcome()
        self._words: dict[int, list[tuple[str, int, int]]] = {}
        self._request = Speak(
            model=body.model,
            text=body.input,
            voice="" if cloned else _voice(body),
            instructions=body.instructions or "",
            speed=body.speed,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            request_id=http.request_id,
        )

    async def run(self, write: Callable[[bytes], Any]) -> None:
        """Write all audio.

        A client that does not read blocks here, so its stream gets no credit.
        """
        config = self._service.config
        batches = speak(
            self._service.bus,
            self._request,
            self._outcome,
            deadline=config.request_timeout,
            patience=config.patience,
            cloned=self._cloned,
        )
        async with aclosing(batches):
            async for batch in batches:
                self._note(batch)
                pcm = b"".join([item.data for item in batch])
                self._meter.got(len(pcm))
                if pcm and (data := await self._encoded(lambda pcm=pcm: self._encoder.push(pcm))):  # type: ignore[misc]
                    await write(data)

    async def rest(self) -> bytes:
        return await self._encoded(self._encoder.finish)

    async def _encoded(self, work: Callable[[], bytes]) -> bytes:
        return await asyncio.to_thread(work) if self._encoder.heavy else work()

    def _note(self, batch: list[Audio]) -> None:
        for item in batch:
            if item.words:
                self._words[item.sentence] = item.words

    def done(self) -> dict[str, Any]:
        usage = self._outcome.usage
        words = [word for sentence in sorted(self._words) for word in self._words[sentence]]
        return {
            "type": "speech.audio.done",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            "words": [
                {"word": word, "start": start / 1000, "end": end / 1000}
                for word, start, end in words
            ],
        }


def _voice(body: SpeechBody) -> str:
    return (body.voice.id if isinstance(body.voice, VoiceId) else body.voice) or ""


def _delta(data: bytes) -> bytes:
    return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
