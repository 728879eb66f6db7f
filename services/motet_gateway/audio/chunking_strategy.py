"""Parse `chunking_strategy` of a transcription: how speech is found in the file."""

from __future__ import annotations

from typing import Any

import msgspec

from motet_gateway.http.multipart import Form
from motet_pipelines.voice.transcribe import NO_AUDIO
from motet_shared.errors import BadRequest
from motet_shared.messages import FindSpeech

NAME = "chunking_strategy"
_SPECIAL = {
    "prefix_padding_ms": 300,
    "silence_duration_ms": 200,
    "threshold": 0.5,
}  # OpenAI's defaults of server_vad
_LONGEST = 60_000  # ms


def parse_chunking(form: Form) -> tuple[FindSpeech, bool]:
    """Return how to find speech, and whether a VAD alone may cut; "auto" leaves both to the server.

    An object comes as fields (`chunking_strategy[type]`, as OpenAI's client sends it) or as JSON.
    Raises BadRequest that names what is wrong.
    """
    given = _given(form)
    if given is None:
        return FindSpeech(audio=NO_AUDIO), False
    if given.pop("type", None) != "server_vad":
        raise BadRequest(
            f'`{NAME}` must be "auto", or an object with the type "server_vad"', param=NAME
        )
    if unknown := given.keys() - _SPECIAL:
        message = f"`{NAME}` has no {min(unknown)[:40]!r}; a server_vad has {', '.join(_SPECIAL)}"
        raise BadRequest(message, param=NAME)
    numbers = {name: _number(name, value) for name, value in (_SPECIAL | given).items()}
    search = FindSpeech(
        audio=NO_AUDIO,
        threshold=numbers["threshold"],
        prefix_padding_ms=int(numbers["prefix_padding_ms"]),
        silence_duration_ms=int(numbers["silence_duration_ms"]),
    )
    return search, True


def _given(form: Form) -> dict[str, Any] | None:
    """Return the object; None for "auto" and for an absent field."""
    prefix = f"{NAME}["
    parts = {
        name[len(prefix) :].rstrip("]"): values[-1]
        for name, values in form.fields.items()
        if name.startswith(prefix)
    }
    text = form.fields.get(NAME, ["auto"])[-1]
    if parts or text == "auto":
        return parts or None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        message = (
            f'`{NAME}` {text[:40]!r} is neither "auto" nor an object with the type "server_vad"'
        )
        raise BadRequest(message, param=NAME) from None


def _number(name: str, value: Any) -> float:
    highest = 1 if name == "threshold" else _LONGEST
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= highest or (highest > 1 and number != int(number)):
        kind = "a number" if name == "threshold" else "a whole number of ms"
        raise BadRequest(
            f"`{NAME}.{name}` {str(value)[:40]!r} must be {kind} from 0 to {highest}", param=NAME
        )
    return number
