"""Render the responses of a session as OpenAI's events."""

from __future__ import annotations

from typing import Any

from motet_gateway.http.problems import Problem
from motet_pipelines.voice.conversation import events
from motet_pipelines.voice.conversation.history import Item
from motet_shared.messages import Usage

from .channel import Channel
from .output_events import CallOutput, Output, SpeechOutput, TextOutput
from .session_settings import SessionSettings


class ResponseEvents:
    """Render one response, from `response.created` to `response.done`.

    conversation_id: None for a response that is out of band.
    """

    def __init__(self, channel: Channel, started: events.ReplyStarted, conversation_id: str | None):
        self._channel, self._conversation_id = channel, conversation_id
        self._id, self._metadata = started.reply_id, started.metadata
        self._settings: SessionSettings = started.settings.label
        self._output: Output | None = None

    @property
    def in_conversation(self) -> bool:
        return self._conversation_id is not None

    def start(self) -> list[bytes]:
        return [self._channel.event("response.created", response=self._shape("in_progress"))]

    def open_output(self, event: events.OutputOpened) -> list[bytes]:
        """Render the announcement of an item, which is empty still."""
        position = {
            "response_id": self._id,
            "item_id": event.item["id"],
            "output_index": event.index,
        }
        output = self._output = self._new_output(event, position)
        added = self._channel.event(
            "response.output_item.added",
            response_id=self._id,
            output_index=event.index,
            item=event.item,
        )
        return [added, *self._in_conversation("added", event), *output.open()]

    def delta(
        self, event: events.TextDelta | events.SpeechDelta | events.ArgumentsDelta
    ) -> list[bytes]:
        output = self._output
        if isinstance(event, events.SpeechDelta):
            assert isinstance(output, SpeechOutput)
            return output.delta(event.pcm, event.words)
        assert output is not None
        assert not isinstance(output, SpeechOutput)
        return [output.delta(event.text)]

    def close_output(self, event: events.OutputClosed) -> list[bytes]:
        assert self._output is not None
        rendered = [*self._output.close(event.item), *self._in_conversation("done", event)]
        done = self._channel.event(
            "response.output_item.done",
            response_id=self._id,
            output_index=event.index,
            item=event.item,
        )
        return [*rendered, done]

    def end(self, event: events.ReplyEnded) -> list[bytes]:
        usage = None if event.usage is None else _usage(event.usage, event.speech_usage)
        shape = self._shape(event.status, _details(event), event.items, usage)
        return [self._channel.event("response.done", response=shape)]

    def _new_output(self, event: events.OutputOpened, position: dict[str, Any]) -> Output:
        if event.kind == "function_call":
            return CallOutput(self._channel, position, event.item["call_id"])
        if event.kind == "speech":
            return SpeechOutput(self._channel, position, self._settings.audio.output_format)
        return TextOutput(self._channel, position)

    def _in_conversation(
        self, step: str, event: events.OutputOpened | events.OutputClosed
    ) -> list[bytes]:
        if self._conversation_id is None:
            return []
        fields = {"previous_item_id": event.previous, "item": event.item}
        return [self._channel.event(f"conversation.item.{step}", **fields)]

    def _shape(
        self,
        status: str,
        details: dict[str, Any] | None = None,
        items: list[Item] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "object": "realtime.response",
            "id": self._id,
            "conversation_id": self._conversation_id,
            "metadata": self._metadata,
            "status": status,
            "status_details": details,
            "output": items or [],
            "output_modalities": self._settings.modalities,
            "audio": {"output": self._settings.audio.as_output()},
            "max_output_tokens": self._settings.max_output_tokens,
            "usage": usage,
        }


def _details(event: events.ReplyEnded) -> dict[str, Any] | None:
    """Return `status_details`: why a response is not complete."""
    if event.error is not None:
        problem = Problem.of(event.error)
        error = {"type": problem.type, "code": problem.code, "message": problem.message}
        return {"type": "failed", "error": error}
    if event.status == "completed":
        return None
    return {"type": event.status, "reason": event.reason}


def _usage(usage: Usage, speech: Usage) -> dict[str, Any]:
    audio_tokens = speech.completion_tokens
    cached = {"text_tokens": usage.cached_tokens, "audio_tokens": 0, "image_tokens": 0}
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens + audio_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens + audio_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens - usage.audio_tokens - usage.image_tokens,
            "audio_tokens": usage.audio_tokens,
            "image_tokens": usage.image_tokens,
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": cached,
        },
        "output_token_details": {
            "text_tokens": usage.completion_tokens,
            "audio_tokens": audio_tokens,
        },
    }
