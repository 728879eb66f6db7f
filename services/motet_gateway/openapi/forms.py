"""Describe form bodies, in which audio and images are sent as files, as JSON Schema."""

from __future__ import annotations

from typing import Any

import msgspec

from motet_gateway.audio.known_speakers import MOST
from motet_gateway.audio.transcription_schema import DIARIZED, FORMATS, GRANULARITIES, Task
from motet_gateway.audio.voices import LONGEST_NAME, LONGEST_WORDS
from motet_gateway.files.schema import LONGEST, SHORTEST, purposes
from motet_gateway.images.schema import EditBody
from motet_gateway.videos.schema import VideoBody

Schema = dict[str, Any]

_FILE: Schema = {
    "type": "string",
    "contentMediaType": "application/octet-stream",
    "format": "binary",
}


def transcription_form(task: Task) -> Schema:
    """Return the schema of POST /v1/audio/transcriptions or /translations."""
    formats = [*FORMATS, DIARIZED] if task == "transcribe" else list(FORMATS)
    fields: Schema = {
        "file": {**_FILE, "description": "A sound or a film in any format."},
        "model": {"type": "string", "minLength": 1},
        "prompt": {"type": "string", "description": "What was said before, and how it is written."},
        "response_format": {"enum": formats, "default": "json"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    }
    if task == "transcribe":
        fields |= _of_transcriptions()
    return _form(fields, "file", "model")


def _of_transcriptions() -> Schema:
    return {
        "language": {
            "type": "string",
            "description": "Code or name; without it the language is found out.",
        },
        "stream": {"type": "boolean", "default": False},
        "timestamp_granularities": {
            "type": "array",
            "items": {"enum": list(GRANULARITIES)},
            "description": "With verbose_json, or with a stream of json.",
        },
        "chunking_strategy": {
            "type": "string",
            "description": 'auto, or JSON with the type "server_vad".',
        },
        "known_speaker_names": {"type": "array", "items": {"type": "string"}, "maxItems": MOST},
        "known_speaker_references": {
            "type": "array",
            "items": {"type": "string", "description": "A data URL of a sound of 2 to 10 seconds."},
            "maxItems": MOST,
        },
    }


def voice_form() -> Schema:
    """Return the schema of POST /v1/audio/voices."""
    fields: Schema = {
        "audio_sample": {**_FILE, "description": "A recording of 1 to 30 seconds."},
        "name": {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME},
        "text": {
            "type": "string",
            "minLength": 1,
            "maxLength": LONGEST_WORDS,
            "description": "What is said in the recording.",
        },
        "consent": {"enum": ["true"], "description": "The speaker agrees to this use."},
    }
    return _form(fields, "audio_sample", "name", "text", "consent")


def file_form() -> Schema:
    """Return the schema of POST /v1/files."""
    fields = {
        "file": _FILE,
        "purpose": {"enum": list(purposes())},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": SHORTEST, "maximum": LONGEST},
    }
    return _form(fields, "file", "purpose")


def edit_form() -> Schema:
    """Return the schema of POST /v1/images/edits."""
    schema = msgspec.json.schema_components([EditBody], ref_template="#/components/schemas/{name}")[
        1
    ]["EditBody"]
    fields = {name: _as_text(field) for name, field in schema["properties"].items()}
    files = {
        "image": {**_FILE, "description": "The picture that is changed."},
        "mask": {**_FILE, "description": "Where it may be changed: transparent, or else white."},
    }
    return _form(files | fields, "image", "prompt")


def video_form() -> Schema:
    """Return the schema of POST /v1/videos as a form."""
    schema = msgspec.json.schema_components(
        [VideoBody], ref_template="#/components/schemas/{name}"
    )[1]["VideoBody"]
    fields = {name: _as_text(field) for name, field in schema["properties"].items()}
    image = {**_FILE, "description": "The image that the video begins with."}
    return _form(fields | {"input_reference": image}, "prompt")


def _as_text(field: Schema) -> Schema:
    """Convert a field's schema to a form's, which has no null: the field is omitted instead."""
    if "anyOf" not in field:
        return field
    kinds = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
    if any(kind.get("type") == "array" for kind in kinds):
        return {"type": "string", "contentMediaType": "application/json"}
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _form(fields: Schema, *required: str) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def call_form() -> Schema:
    """Return the schema of POST /v1/realtime/calls; the offer alone may be sent as it is, too."""
    fields: Schema = {
        "sdp": {"type": "string", "description": "The client's offer."},
        "session": {
            "type": "string",
            "contentMediaType": "application/json",
            "description": "The settings of the session, as in session.update.",
        },
    }
    return _form(fields, "sdp")
