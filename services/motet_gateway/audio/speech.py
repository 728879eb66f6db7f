"""Serve POST /v1/audio/speech: text to speech, as bytes or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
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
from motet_gateway.kept import draws
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.render import error_event
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import SpeechMeter, speech_length
from motet_pipelines.voice.speak import ClonedVoice, Outcome, speak
from motet_shared.errors import Draining, MotetError, PayloadTooLarge, UnsupportedParameter
from motet_shared.messages import Audio, Speak
from motet_shared.wire.instances import served

from .encoder import Encoder, make_encoder
from .voices import cloned_voice


class VoiceId(Strict):
    id: str


Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm", "pcmu", "pcma"]
MOST_TEXT = 65_536  # characters of one text
MOST_SOUND = 16 << 20  # bytes of the sound that a JSON object holds


class SpeechFields(Strict):
    """Fields of whatever is spoken: OpenAI's, and `seed` as an extension."""

    voice: str | VoiceId | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    instructions: Annotated[str, Meta(max_length=4096)] | None = None
    seed: Int64 | None = None

    @property
    def voice_name(self) -> str:
        """Return the name or id of the voice; "" for the model's first one."""
        return (self.voice.id if isinstance(self.voice, VoiceId) else self.voice) or ""

    def as_request(
        self,
        model: str,
        text: str,
        request_id: str,
        *,
        cloned: bool,
        priority: int = 0,
        draw: str = "",
    ) -> Speak:
        """Return the request for a text; with `cloned`, a recording replaces the voice.

        draw: name under which its seed is drawn, as in `draws.token_hex`.
        """
        return Speak(
            model=model,
            text=text,
            voice="" if cloned else self.voice_name,
            instructions=self.instructions or "",
            speed=self.speed,
            seed=draws.randbits(63, draw) if self.seed is None else self.seed,
            request_id=request_id,
            priority=priority,
        )


class SpeechBody(SpeechFields, kw_only=True):
    """OpenAI's fields, and as an extension the formats of telephony: G.711 at 8 kHz."""

    model: str
    input: Annotated[str, Meta(min_length=1, max_length=MOST_TEXT)]
    response_format: Format = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"


_decoder = Decoder(SpeechBody)


async def speech(service: GatewayContext, http: Exchange) -> None:
    """Answer with speech, as raw bytes or as events."""
    body, cloned = await _asked(service, http)
    encoder = make_encoder(body.response_format)
    with await http.tenant.take(audio=speech_length(body.input, body.speed)) as ticket:
        async with http.while_connected():
            spoken = _SpeechStream(service, http, body, encoder, ticket, cloned)
            if body.stream_format == "sse":
                await _events(http, spoken)
            else:
                http.content = [
                    (b"content-type", encoder.content_type.encode()),
                    (b"x-accel-buffering", b"no"),
                ]
                await spoken.run(lambda data: http.write(data))
                await http.finish(await spoken.rest())


async def speech_in_json(service: GatewayContext, http: Exchange) -> None:
    """Answer with a JSON object that has the whole sound in base64: a line of a batch."""
    body, cloned = await _asked(service, http)
    if body.stream_format != "audio":
        message = "`stream_format` is not supported in a batch; leave it out"
        raise UnsupportedParameter(message, param="stream_format")
    encoder = make_encoder(body.response_format)
    sound = bytearray()

    async def keep(data: bytes) -> None:
        sound.extend(data)
        if len(sound) > MOST_SOUND:
            raise PayloadTooLarge(
                f"`input` makes more than {MOST_SOUND} bytes of {body.response_format}; shorten it,"
                " or choose a `response_format` that takes less, such as 'opus'",
                param="input",
            )

    with await http.tenant.take(audio=speech_length(body.input, body.speed)) as ticket:
        spoken = _SpeechStream(service, http, body, encoder, ticket, cloned)
        await spoken.run(keep)
        await keep(await spoken.rest())
    answer = {
        "object": "audio.speech",
        "media_type": encoder.content_type,
        "audio_data": base64.b64encode(sound).decode(),
        **spoken.summary(),
    }
    await http.reply(200, msgspec.json.encode(answer))


async def _asked(service: GatewayContext, http: Exchange) -> tuple[SpeechBody, ClonedVoice | None]:
    """Return the checked body, with the served model, and the recording of its voice, if any."""
    data = await http.body(service.config.max_body)
    check_json(data, http.tenant, "input")
    body = _decoder.decode(data, http.hints("speech"))
    if service.limits.draining:
        raise Draining("this server is stopping; try again in a moment")
    body = msgspec.structs.replace(body, model=speech_model(service, body.model, body))
    return body, await cloned_voice(service, http.tenant.owner, body.model, body.voice_name)


def speech_model(service: GatewayContext, name: str, fields: SpeechFields) -> str:
    """Return the served model that `name` refers to; "" refers to any.

    Raises UnknownModel, WrongModelKind or Unavailable as `model_of`, UnsupportedParameter for
    instructions that the model does not follow.
    """
    model = model_of(service.bus.directory, "tts", name)
    card = served(service.bus.directory, "tts").get(model)
    if fields.instructions and card is not None and not card.instructions:
        raise UnsupportedParameter(
            f"`instructions` are not followed by {model!r}; choose another `voice` instead",
            param="instructions",
        )
    return model


async def _events(http: Exchange, spoken: _SpeechStream) -> None:
    """Send `speech.audio.delta`s and one `speech.audio.done`, which has the times of words too."""
    try:
        await spoken.run(lambda data: http.write(_delta(data)))
        rest = await spoken.rest()
        done = {"type": "speech.audio.done", **spoken.summary()}
        await http.finish((_delta(rest) if rest else b"") + _event(done))
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
        self._meter, self._ticket = SpeechMeter(ticket.audio), ticket
        self._outcome = Outcome()
        self._words: dict[int, list[tuple[str, int, int]]] = {}
        self._request = body.as_request(
            body.model,
            body.input,
            http.request_id,
            cloned=cloned is not None,
            priority=http.tenant.rights.priority(None),
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
        try:
            async with aclosing(batches):
                async for batch in batches:
                    self._note(batch)
                    pcm = b"".join([item.data for item in batch])
                    self._meter.got(len(pcm))
                    if pcm and (data := await encoded(self._encoder, pcm)):
                        await write(data)
        finally:
            # What a batch waits for would be taken for the latency that clients notice.
            if not self._ticket.is_background:
                self._service.metrics.speech.observe(self._request.model, self._outcome.playout)

    async def rest(self) -> bytes:
        """Return the last bytes of the encoder."""
        return await encoded(self._encoder)

    def _note(self, batch: list[Audio]) -> None:
        for item in batch:
            if item.words:
                self._words[item.sentence] = item.words

    def summary(self) -> dict[str, Any]:
        """Return the usage, and the times of all words in seconds."""
        words = [word for sentence in sorted(self._words) for word in self._words[sentence]]
        return {
            "usage": usage_of(self._outcome),
            "words": [
                {"word": word, "start": start / 1000, "end": end / 1000}
                for word, start, end in words
            ],
        }


def usage_of(outcome: Outcome) -> dict[str, int]:
    """Return the tokens of a speech: of its text and of its frames."""
    usage = outcome.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def encoded(encoder: Encoder, pcm: bytes | None = None) -> bytes:
    """Return what these samples complete; without samples, the encoder's last bytes."""

    def work() -> bytes:
        return encoder.finish() if pcm is None else encoder.push(pcm)

    return await asyncio.to_thread(work) if encoder.heavy else work()


def _delta(data: bytes) -> bytes:
    return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
