"""Render segments as text, captions, JSON and server-sent events."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from motet_gateway.openai.render import event
from motet_pipelines.voice.diarized_transcript import Part
from motet_pipelines.voice.transcribe import TranscriptionOutcome
from motet_shared.messages import Segment

JSON, PLAIN, VTT = b"application/json", b"text/plain; charset=utf-8", b"text/vtt; charset=utf-8"
_BREAKS = re.compile(r"\s*[\r\n]+\s*")  # a blank line ends a caption
_HOP = 0.01  # seconds per frame in which OpenAI counts `seek`


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def render(
    shape: str,
    task: str,
    segments: Sequence[Segment],
    recording: TranscriptionOutcome,
    granularities: Sequence[str],
) -> tuple[bytes, bytes]:
    """Return body and content type of a whole transcription."""
    if shape == "text":
        return (text_of(segments) + "\n").encode(), PLAIN
    if shape == "srt":
        return _captions(segments, ",", numbered=True).encode(), PLAIN
    if shape == "vtt":
        return ("WEBVTT\n\n" + _captions(segments, ".", numbered=False)).encode(), VTT
    document: dict[str, Any] = {"text": text_of(segments), "usage": _usage(recording)}
    if shape == "verbose_json":
        document |= _verbose(task, segments, recording, granularities)
    return msgspec.json.encode(document), JSON


def render_speakers(parts: Sequence[Part], recording: TranscriptionOutcome) -> tuple[bytes, bytes]:
    """Return body and content type of a whole transcription with speakers."""
    document = {
        "task": "transcribe",
        "duration": round(recording.duration, 3),
        "text": text_of([part.segment for part in parts]),
        "segments": [_spoken(part) for part in parts],
        "usage": _usage(recording),
    }
    return msgspec.json.encode(document), JSON


def _spoken(part: Part) -> dict[str, Any]:
    segment = part.segment
    return {
        "type": "transcript.text.segment",
        "id": _segment_id(part),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "speaker": part.speaker,
    }


def _segment_id(part: Part) -> str:
    return f"seg_{part.segment.id}" if part.speaker else str(part.segment.id)


def _verbose(
    task: str,
    segments: Sequence[Segment],
    recording: TranscriptionOutcome,
    granularities: Sequence[str],
) -> dict[str, Any]:
    language = "english" if task == "translate" else recording.language_name
    document: dict[str, Any] = {
        "task": task,
        "language": language,
        "duration": round(recording.duration, 3),
    }
    if "segment" in granularities:
        document["segments"] = [_segment(segment) for segment in segments]
    if "word" in granularities:
        words = [word for segment in segments for word in segment.words]
        document["words"] = [
            {"word": text.strip(), "start": start, "end": end} for text, start, end in words
        ]
    return document


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "seek": round(segment.seek / _HOP),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _usage(recording: TranscriptionOutcome) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(recording.duration)}


def _captions(segments: Sequence[Segment], comma: str, *, numbered: bool) -> str:
    blocks = []
    for number, segment in enumerate(segments, start=1):
        head = f"{number}\n" if numbered else ""
        text = _BREAKS.sub("\n", segment.text.strip()).replace("-->", "->")
        blocks.append(
            f"{head}{clock(segment.start, comma)} --> {clock(segment.end, comma)}\n{text}\n\n"
        )
    return "".join(blocks)


def clock(seconds: float, comma: str) -> str:
    """Format a time for captions: hours, minutes, seconds and milliseconds."""
    total = round(seconds * 1000)
    minutes, milliseconds = divmod(total, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{comma}{milliseconds % 1000:03}"


# ------------------------------------------------------------------------------------------- events
def delta_events(part: Part, first: bool) -> bytes:
    """Return the events of a final segment: its text, and the segment itself."""
    text = part.segment.text.lstrip() if first else part.segment.text
    delta = {"type": "transcript.text.delta", "delta": text}
    if part.speaker:
        delta["segment_id"] = _segment_id(part)
    return event(delta) + event(_spoken(part))


def done_event(text: str, recording: TranscriptionOutcome) -> bytes:
    """Return the last event, with the deltas joined.

    Its usage counts tokens, as the public type wants, and seconds too.
    """
    said = (
        recording.end.usage.completion_tokens
        if recording.end is not None and recording.end.usage is not None
        else 0
    )
    usage = {"type": "tokens", "input_tokens": 0, "output_tokens": said, "total_tokens": said}
    return event(
        {
            "type": "transcript.text.done",
            "text": text,
            "usage": usage | {"seconds": recording.duration},
        }
    )
