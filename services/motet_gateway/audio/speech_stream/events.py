"""Define the client events of the socket, and render the server's; names are vLLM-Omni's.

Unknown fields are refused by name unless the table of `hints.py` lists them, as everywhere in the
gateway.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from motet_gateway.audio.encoder import G711_RATE, RATE
from motet_gateway.audio.speech import MOST_TEXT, Format, SpeechFields
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.fields import Strict
from motet_gateway.http.problems import Problem
from motet_shared.errors import BadRequest

_encode = msgspec.json.Encoder().encode
EventId = Annotated[str, Meta(max_length=512)]


class SessionConfig(SpeechFields, tag="session.config"):
    """Settings of the utterances that follow.

    stream_audio: audio as it is synthesized; otherwise each sentence is one message, a file of its
    own. split_granularity: with "none" an utterance is spoken only when it is complete.
    word_timestamps: audio in JSON, with the times of words.
    """

    event_id: EventId | None = None
    model: str = ""
    response_format: Format = "wav"
    stream_audio: bool = False
    split_granularity: Literal["sentence", "none"] = "sentence"
    word_timestamps: bool = False


class InputText(Strict, tag="input.text"):
    """The next piece of the utterance, of any length."""

    text: Annotated[str, Meta(max_length=MOST_TEXT)]
    event_id: EventId | None = None


class InputDone(Strict, tag="input.done"):
    """End the utterance; the connection stays open."""

    event_id: EventId | None = None


class InputCancel(Strict, tag="input.cancel"):
    """Speak nothing more of what was sent so far."""

    event_id: EventId | None = None


class SessionClose(Strict, tag="session.close"):
    """End the connection once everything is spoken."""

    event_id: EventId | None = None


ClientEvent = SessionConfig | InputText | InputDone | InputCancel | SessionClose

_decoder: Decoder[ClientEvent] = Decoder(cast(type[ClientEvent], ClientEvent))
decode = _decoder.decode


def check_config(config: SessionConfig) -> None:
    """Raise BadRequest for word times without audio that they can go with."""
    if config.word_timestamps and not (config.stream_audio and config.response_format == "pcm"):
        raise BadRequest(
            "`word_timestamps` go with `stream_audio` true and `response_format` 'pcm'",
            param="word_timestamps",
        )


def sample_rate(audio_format: str) -> int:
    """Return the sample rate of a format, in Hz."""
    return G711_RATE if audio_format in ("pcmu", "pcma") else RATE


def event(kind: str, **fields: Any) -> bytes:
    """Return a rendered event."""
    return _encode({"type": kind, **fields})


def error(problem: Problem, event_id: str | None = None) -> bytes:
    """Return an `error` event as of realtime sessions, with vLLM-Omni's `message` beside it."""
    return event(
        "error",
        event_id="event_" + secrets.token_hex(6),
        message=problem.message,
        error={**problem.as_dict(), "event_id": event_id},
    )
