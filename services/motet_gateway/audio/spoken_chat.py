"""Answer chats in text and sound: `modalities` ["text", "audio"] with `audio`, in OpenAI's shape.

The text of such a reply is the transcript of its sound. In a stream, `delta.audio` has the `id`, then
pieces of `transcript` and of `data` (base64) as each is there, and `expires_at` at the end. If the
sound cannot go on, the text does, and `delta.audio.error` says so, an extension.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.problems import Problem
from motet_gateway.kept import draws
from motet_gateway.openai.render import ChatChoice, ChatChunks, Choice, Chunks
from motet_gateway.openai.results import Collected
from motet_gateway.openai.schema import SPEAKING, AudioOptions, ChatBody
from motet_pipelines.chat.chat import Outcome
from motet_pipelines.graphs.graph import Call, GraphOutcome, run
from motet_pipelines.graphs.spoken import OMNI, SENTENCES, SPEAK, THINK, speaks_itself
from motet_pipelines.voice.speak import ClonedVoice
from motet_pipelines.voice.speak import Outcome as SpeechOutcome
from motet_shared.errors import BadRequest, MotetError, UnsupportedParameter
from motet_shared.messages import Audio, Chat, End, Request, SpeakStates

from .encoder import make_encoder
from .speech import SpeechFields, speech_model
from .voices import cloned_voice

_KEPT = 3600  # seconds; `expires_at` of a sound that is not kept here at all


@dataclass(frozen=True, slots=True)
class SpeechLost:
    """Report that the sound of a reply ends early."""

    error: MotetError


@dataclass(frozen=True, slots=True)
class ChatAudio:
    """Hold how the replies of a chat are spoken.

    itself: the model speaks its replies. speech: the model that speaks them otherwise. cloned: a
    recording whose voice that one has.
    """

    options: AudioOptions
    model: str
    itself: bool
    speech: str = ""
    cloned: ClonedVoice | None = None

    @classmethod
    async def of(cls, service: GatewayContext, http: Exchange, body: ChatBody) -> ChatAudio | None:
        """Return how a chat is spoken; None for one that wants text alone.

        Raises BadRequest or UnsupportedParameter that name the parameter.
        """
        if body.modalities not in SPEAKING:
            if body.audio is not None:
                raise BadRequest(
                    '`audio` needs `modalities` ["text", "audio"]; send both', param="audio"
                )
            return None
        options = body.audio
        if options is None:
            raise BadRequest(
                '`modalities` ["text", "audio"] needs `audio`, such as {"format": "pcm16"}',
                param="audio",
            )
        if body.stream and options.format != "pcm16":
            raise UnsupportedParameter(
                f"`audio.format` {options.format!r} is not streamed; send 'pcm16', or leave out `stream`",
                param="audio.format",
            )
        directory = service.bus.directory
        if speaks_itself(directory, body.model):
            return cls(options, body.model, True)
        fields = SpeechFields(voice=options.voice)
        try:
            speech = speech_model(service, "", fields)
        except MotetError as error:
            raise UnsupportedParameter(
                f"`modalities`: model {body.model!r} does not speak, and no speech model is served"
                f" ({error.message}); send ['text']",
                param="modalities",
            ) from None
        cloned = await cloned_voice(service, http.tenant.owner, speech, fields.voice_name)
        return cls(options, body.model, False, speech, cloned)

    def requests(self, request: Chat) -> dict[str, Request]:
        """Return the requests of the stages that answer a chat."""
        fields = SpeechFields(voice=self.options.voice, seed=request.sampling.seed)
        if not self.itself:
            cloned = self.cloned is not None
            spoken = fields.as_request(
                self.speech, "", request.request_id, cloned=cloned, priority=request.priority
            )
            return {THINK: request, SPEAK: spoken}
        states = SpeakStates(
            model=self.model,
            voice=fields.voice_name,
            seed=request.sampling.seed,
            request_id=request.request_id,
            priority=request.priority,
            tenant=request.tenant,
        )
        return {THINK: msgspec.structs.replace(request, return_states=True), SPEAK: states}

    async def reply(
        self, service: GatewayContext, request: Chat, outcome: Outcome
    ) -> AsyncGenerator[list[Any], None]:
        """Yield text, audio, and a `SpeechLost` if the audio ends early."""
        call = Call(
            bus=service.bus,
            requests=self.requests(request),
            outcomes={THINK: outcome, SPEAK: (SpeechOutcome(), self.cloned)},
            deadline=service.config.request_timeout,
            patience=service.config.patience,
        )
        ended = GraphOutcome()
        async with aclosing(run(OMNI if self.itself else SENTENCES, call, ended)) as batches:
            async for batch in batches:
                yield batch
        if (error := ended.lost.get(SPEAK)) is not None:
            yield [SpeechLost(error)]


class AudioChatChunks(ChatChunks):
    """Render the chunks of a spoken chat."""

    def choice(self, index: int) -> Choice:
        return AudioChatChoice(self, index)


class AudioChatChoice(ChatChoice):
    """Render the chunks of one spoken choice."""

    def __init__(self, chunks: Chunks, index: int):
        super().__init__(chunks, index)
        self._id = "audio_" + draws.token_hex(12)
        self._error: dict[str, Any] = {}

    def _opening(self) -> bytes:
        opening = {"role": "assistant", "refusal": None, "audio": {"id": self._id}}
        return self._chunks.chunk(self._delta(opening))

    def batch(self, items: list[Any]) -> bytes:
        if items and isinstance(items[0], Audio):
            data = base64.b64encode(b"".join([item.data for item in items])).decode()
            return self._open() + self._audio({"data": data}) if data else b""
        if items and isinstance(items[0], SpeechLost):
            self._error = {"error": Problem.of(items[0].error).as_dict()}
            return b""
        return super().batch(items)

    def finish(self, end: End) -> bytes:
        expires = self._audio({"id": self._id, "expires_at": draws.now() + _KEPT, **self._error})
        return self._open() + expires + super().finish(end)

    def _audio(self, fields: dict[str, Any]) -> bytes:
        return self._chunks.chunk(self._delta({"audio": fields}))

    def _text_delta(self, text: str) -> dict[str, Any]:
        return {"audio": {"transcript": text}}


@dataclass(slots=True)
class CollectedSpeech(Collected):
    """Collect a spoken choice."""

    pcm: bytearray = field(default_factory=bytearray)
    lost: MotetError | None = None

    def add(self, items: list[Any]) -> None:
        if items and isinstance(items[0], Audio):
            for item in items:
                self.pcm += item.data
        elif items and isinstance(items[0], SpeechLost):
            self.lost = items[0].error
        else:
            Collected.add(self, items)

    def message(self, options: AudioOptions) -> dict[str, Any]:
        """Return the field `audio` of the message, encoded; blocks while it encodes."""
        encoder = make_encoder("pcm" if options.format == "pcm16" else options.format)
        data = encoder.push(bytes(self.pcm)) + encoder.finish() if self.pcm else b""
        error = {} if self.lost is None else {"error": Problem.of(self.lost).as_dict()}
        return {
            "id": "audio_" + draws.token_hex(12),
            "data": base64.b64encode(data).decode(),
            "expires_at": draws.now() + _KEPT,
            "transcript": self.text,
            **error,
        }
