"""Render the outputs of a response: messages, spoken messages and function calls.

The order is that of OpenAI's service (see the table in the README): an item is announced before its
parts, every part is closed before its item, and the `done` events repeat the sum of the deltas.
"""

from __future__ import annotations

from typing import Any

from motet_pipelines.voice.conversation.history import Item

from .audio_settings import Format
from .channel import Channel, Deltas
from .formats import Encoder


class TextOutput:
    """Render a text message of the assistant. `position`: the fields that name it in events."""

    def __init__(self, channel: Channel, position: dict[str, Any]):
        self._channel, self._position = channel, {**position, "content_index": 0}
        self._deltas = Deltas(channel, "response.output_text.delta", **self._position)

    def open(self) -> list[bytes]:
        part = {"type": "text", "text": ""}
        return [self._channel.event("response.content_part.added", **self._position, part=part)]

    def delta(self, text: str) -> bytes:
        return self._deltas.render(text)

    def close(self, item: Item) -> list[bytes]:
        event, text = self._channel.event, "".join(part["text"] for part in item["content"])
        part = {"type": "text", "text": text}
        return [
            event("response.output_text.done", **self._position, text=text),
            event("response.content_part.done", **self._position, part=part),
        ]


class SpeechOutput:
    """Render a spoken message: audio in the client's format, with its transcript in step."""

    def __init__(self, channel: Channel, position: dict[str, Any], format: Format):
        self._channel, self._position = channel, {**position, "content_index": 0}
        self._encoder = Encoder(format)
        self._audio = Deltas(channel, "response.output_audio.delta", **self._position)
        self._words = Deltas(channel, "response.output_audio_transcript.delta", **self._position)

    def open(self) -> list[bytes]:
        part = {"type": "audio", "transcript": ""}
        return [self._channel.event("response.content_part.added", **self._position, part=part)]

    def delta(self, pcm: bytes, words: str) -> list[bytes]:
        encoded = self._encoder.push(pcm)
        events = [self._audio.render(encoded)] if encoded else []
        return [*events, self._words.render(words)] if words else events

    def close(self, item: Item) -> list[bytes]:
        event = self._channel.event
        transcript = "".join(part["transcript"] for part in item["content"])
        part = {"type": "audio", "transcript": transcript}
        rest = self._encoder.finish()
        return [
            *([self._audio.render(rest)] if rest else []),
            event("response.output_audio.done", **self._position),
            event("response.output_audio_transcript.done", **self._position, transcript=transcript),
            event("response.content_part.done", **self._position, part=part),
        ]


class CallOutput:
    """Render a function call that the client is to carry out."""

    def __init__(self, channel: Channel, position: dict[str, Any], call_id: str):
        self._channel, self._position = channel, {**position, "call_id": call_id}
        self._deltas = Deltas(channel, "response.function_call_arguments.delta", **self._position)

    def open(self) -> list[bytes]:
        return []

    def delta(self, arguments: str) -> bytes:
        return self._deltas.render(arguments)

    def close(self, item: Item) -> list[bytes]:
        return [
            self._channel.event(
                "response.function_call_arguments.done",
                **self._position,
                name=item["name"],
                arguments=item["arguments"],
            )
        ]


Output = TextOutput | SpeechOutput | CallOutput
