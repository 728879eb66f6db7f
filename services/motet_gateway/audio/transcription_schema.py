"""Parse and check the forms of /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from motet_gateway.http.multipart import Form
from motet_pipelines.voice.diarized_transcript import Diarization
from motet_pipelines.voice.transcribe import NO_AUDIO
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import FindSpeech

from .chunking_strategy import parse_chunking
from .known_speakers import parse_known

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
DIARIZED = "diarized_json"
GRANULARITIES = ("segment", "word")
_COMMON = frozenset({"model", "prompt", "response_format", "temperature"})
_KNOWN = ("known_speaker_names", "known_speaker_references")
_TRANSCRIBE = _COMMON | {
    "language",
    "stream",
    "timestamp_granularities",
    "chunking_strategy",
    *_KNOWN,
}

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioBody:
    """A checked request for a transcription or translation of audio."""

    file: bytes
    filename: str
    task: Task
    model: str
    language: str = ""
    prompt: str = ""
    format: str = "json"
    temperature: float = 0.0
    stream: bool = False
    granularities: tuple[str, ...] = ("segment",)
    speech: FindSpeech = field(default_factory=lambda: FindSpeech(audio=NO_AUDIO))
    vad: bool = False  # only a VAD may cut the audio
    known: tuple[tuple[str, bytes], ...] = ()  # (name, audio file) of each known speaker

    @property
    def diarization(self) -> Diarization | None:
        """Return the settings of diarization; None if it was not asked for."""
        return (
            Diarization(speech=self.speech, known=self.known) if self.format == DIARIZED else None
        )

    @property
    def words(self) -> bool:
        return "word" in self.granularities


def parse_audio(form: Form, task: Task) -> AudioBody:
    """Return the checked request.

    Raises BadRequest or UnsupportedParameter that names the parameter.
    """
    known = _TRANSCRIBE if task == "transcribe" else _COMMON
    for name in form.fields:
        base, bracket, _ = name.partition("[")
        if base not in known or (bracket and base != "chunking_strategy"):
            raise UnsupportedParameter(f"unknown parameter `{name}`; remove it", param=name)
    speech, vad = parse_chunking(form)
    if form.file is None:
        raise BadRequest("`file` is required; send the audio as a file of the form", param="file")
    body = AudioBody(
        file=form.file,
        filename=form.filename,
        task=task,
        model=_text(form, "model", required=True),
        language=_text(form, "language"),
        prompt=_text(form, "prompt"),
        format=_choice(
            form,
            "response_format",
            (*FORMATS, DIARIZED) if task == "transcribe" else FORMATS,
            "json",
        ),
        temperature=_temperature(form),
        stream=_choice(form, "stream", ("true", "false", "True", "False", "1", "0"), "false")
        in ("true", "True", "1"),
        granularities=_granularities(form),
        speech=speech,
        vad=vad,
        known=parse_known(form),
    )
    _check_together(body, "timestamp_granularities" in form.fields)
    return body


def _check_together(body: AudioBody, has_granularities: bool) -> None:
    if (
        has_granularities
        and body.format != "verbose_json"
        and not (body.stream and body.format == "json")
    ):
        message = (
            f"`timestamp_granularities` needs `response_format` verbose_json, not {body.format}"
        )
        raise BadRequest(message, param="timestamp_granularities")
    if body.stream and body.format in ("srt", "vtt", "text"):
        raise BadRequest(
            f"`response_format` {body.format} cannot be streamed; send json, or leave out `stream`",
            param="response_format",
        )
    if body.known and body.format != DIARIZED:
        raise BadRequest(
            f"`{_KNOWN[0]}` needs `response_format` {DIARIZED}, not {body.format}", param=_KNOWN[0]
        )


def _text(form: Form, name: str, *, required: bool = False) -> str:
    value = form.fields.get(name, [""])[-1]
    if required and not value:
        raise BadRequest(f"`{name}` is required", param=name)
    return value


def _choice(form: Form, name: str, choices: tuple[str, ...], default: str) -> str:
    value = form.fields.get(name, [default])[-1]
    if value not in choices:
        raise BadRequest(f"`{name}` {value[:40]!r} is not one of {', '.join(choices)}", param=name)
    return value


def _temperature(form: Form) -> float:
    text = form.fields.get("temperature", ["0"])[-1]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise BadRequest(
            f"`temperature` {text[:40]!r} must be a number from 0 to 1", param="temperature"
        )
    return value


def _granularities(form: Form) -> tuple[str, ...]:
    given = tuple(form.fields.get("timestamp_granularities", ()))
    for value in given:
        if value not in GRANULARITIES:
            message = (
                f"`timestamp_granularities` {value[:40]!r} is not one of {', '.join(GRANULARITIES)}"
            )
            raise BadRequest(message, param="timestamp_granularities")
    return given or ("segment",)
