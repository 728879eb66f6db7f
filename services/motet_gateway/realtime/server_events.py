"""Render the events of a conversation as OpenAI's server events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from motet_gateway.http.problems import Problem
from motet_gateway.tenancy.tenant import Tenant
from motet_pipelines.voice.conversation import events
from motet_pipelines.voice.conversation.history import new_id, without_sound
from motet_pipelines.voice.voice import TokenScores

from .channel import Channel
from .pictures import without_files
from .response_events import ResponseEvents

_TRANSCRIPTION = "conversation.item.input_audio_transcription"
_ASIDE = ""  # stands for all spoken items outside of the conversation, which are never deleted


class ServerEventsState(msgspec.Struct, frozen=True):
    """The id of the conversation, and those of spoken items of the assistant."""

    conversation_id: str
    spoken: set[str]


class ServerEvents:
    """Render the events of one session. `session`: returns the session as clients see it."""

    def __init__(self, channel: Channel, tenant: Tenant, session: Callable[[], dict[str, Any]]):
        self._channel, self._tenant, self._session = channel, tenant, session
        self._conversation_id = new_id("conv")
        self._responses: dict[str, ResponseEvents] = {}
        self._spoken: set[str] = set()  # ids of spoken items of the assistant
        self._renderers: dict[type[events.Event], Callable[[Any], list[bytes]]] = {
            events.SpeechStarted: self._speech_started,
            events.SpeechStopped: self._speech_stopped,
            events.IdleTimeout: self._idle_timeout,
            events.AudioCommitted: self._audio_committed,
            events.AudioCleared: self._audio_cleared,
            events.TranscriptDelta: self._transcript_delta,
            events.TranscriptCompleted: self._transcript_completed,
            events.TranscriptFailed: self._transcript_failed,
            events.ItemAdded: self._item_added,
            events.ItemRetrieved: self._item_retrieved,
            events.ItemDeleted: self._item_deleted,
            events.ItemTruncated: self._item_truncated,
            events.ReplyStarted: self._reply_started,
            events.OutputOpened: self._output_opened,
            events.TextDelta: self._delta,
            events.SpeechDelta: self._delta,
            events.ArgumentsDelta: self._delta,
            events.OutputClosed: self._output_closed,
            events.ReplyEnded: self._reply_ended,
            events.Configured: self._configured,
            events.Failed: self._failed,
        }

    def state(self) -> ServerEventsState:
        return ServerEventsState(self._conversation_id, self._spoken)

    def restore(self, state: ServerEventsState) -> None:
        self._conversation_id, self._spoken = state.conversation_id, state.spoken

    @property
    def has_spoken(self) -> bool:
        """Return True if the conversation has spoken items of the assistant."""
        return bool(self._spoken)

    def render(self, event: events.Event) -> list[bytes]:
        """Return the server events of one event; `Drained` has none."""
        renderer = self._renderers.get(type(event))
        return [] if renderer is None else renderer(event)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._channel.event(kind, **fields)

    # ----------------------------------------------------------------------------------------- user
    def _speech_started(self, event: events.SpeechStarted) -> list[bytes]:
        fields = {"audio_start_ms": event.ms, "item_id": event.item_id}
        return [self._event("input_audio_buffer.speech_started", **fields)]

    def _speech_stopped(self, event: events.SpeechStopped) -> list[bytes]:
        fields = {"audio_end_ms": event.ms, "item_id": event.item_id}
        return [self._event("input_audio_buffer.speech_stopped", **fields)]

    def _idle_timeout(self, event: events.IdleTimeout) -> list[bytes]:
        return [
            self._event(
                "input_audio_buffer.timeout_triggered",
                audio_start_ms=event.start_ms,
                audio_end_ms=event.end_ms,
                item_id=event.item_id,
            )
        ]

    def _audio_committed(self, event: events.AudioCommitted) -> list[bytes]:
        committed = self._event(
            "input_audio_buffer.committed",
            previous_item_id=event.previous,
            item_id=event.item["id"],
        )
        return [committed, *self._item_added(event)]

    def _audio_cleared(self, event: events.AudioCleared) -> list[bytes]:
        return [self._event("input_audio_buffer.cleared")]

    def _transcript_delta(self, event: events.TranscriptDelta) -> list[bytes]:
        return [self._transcript("delta", event, delta=event.text, **_logprobs(event.scores))]

    def _transcript_completed(self, event: events.TranscriptCompleted) -> list[bytes]:
        usage = {"type": "duration", "seconds": round(event.seconds, 3)}
        shown = {"transcript": event.text, "usage": usage, **_logprobs(event.scores)}
        return [self._transcript("completed", event, **shown)]

    def _transcript_failed(self, event: events.TranscriptFailed) -> list[bytes]:
        problem = Problem.of(event.error).as_dict()
        error = {key: value for key, value in problem.items() if value is not None}
        return [self._transcript("failed", event, error=error)]

    def _transcript(
        self,
        step: str,
        event: events.TranscriptDelta | events.TranscriptCompleted | events.TranscriptFailed,
        **fields: Any,
    ) -> bytes:
        return self._event(
            f"{_TRANSCRIPTION}.{step}", item_id=event.item_id, content_index=event.part, **fields
        )

    # ---------------------------------------------------------------------------------------- items
    def _item_added(self, event: events.ItemAdded | events.AudioCommitted) -> list[bytes]:
        fields = {"previous_item_id": event.previous, "item": without_files(event.item)}
        return [
            self._event("conversation.item.added", **fields),
            self._event("conversation.item.done", **fields),
        ]

    def _item_retrieved(self, event: events.ItemRetrieved) -> list[bytes]:
        item = without_sound(event.item)
        return [self._event("conversation.item.retrieved", item=item)]

    def _item_deleted(self, event: events.ItemDeleted) -> list[bytes]:
        self._spoken.discard(event.item_id)
        return [self._event("conversation.item.deleted", item_id=event.item_id)]

    def _item_truncated(self, event: events.ItemTruncated) -> list[bytes]:
        fields = {
            "item_id": event.item_id,
            "content_index": 0,
            "audio_end_ms": event.audio_ms,
        }
        return [self._event("conversation.item.truncated", **fields)]

    # ------------------------------------------------------------------------------------ responses
    def _reply_started(self, event: events.ReplyStarted) -> list[bytes]:
        conversation_id = self._conversation_id if event.in_conversation else None
        response = ResponseEvents(self._channel, event, conversation_id)
        self._responses[event.reply_id] = response
        return response.start()

    def _output_opened(self, event: events.OutputOpened) -> list[bytes]:
        if event.kind == "speech":
            in_conversation = self._responses[event.reply_id].in_conversation
            self._spoken.add(event.item["id"] if in_conversation else _ASIDE)
        return self._responses[event.reply_id].open_output(event)

    def _delta(
        self, event: events.TextDelta | events.SpeechDelta | events.ArgumentsDelta
    ) -> list[bytes]:
        return self._responses[event.reply_id].delta(event)

    def _output_closed(self, event: events.OutputClosed) -> list[bytes]:
        return self._responses[event.reply_id].close_output(event)

    def _reply_ended(self, event: events.ReplyEnded) -> list[bytes]:
        limits = self._tenant.as_rate_limits()
        return [
            *self._responses.pop(event.reply_id).end(event),
            self._event("rate_limits.updated", rate_limits=limits),
        ]

    # -------------------------------------------------------------------------------------- session
    def _configured(self, event: events.Configured) -> list[bytes]:
        return [self._event("session.updated", session=self._session())]

    def _failed(self, event: events.Failed) -> list[bytes]:
        problem = Problem.of(event.error)
        if event.tag is not None:
            problem.note("/v1/realtime")
        return [self._channel.error(problem, event.tag or None)]


def _logprobs(scores: TokenScores | None) -> dict[str, Any]:
    """Return the field with the log-probabilities of tokens, if they are reported."""
    if scores is None:
        return {}
    return {
        "logprobs": [
            {"token": text, "bytes": list(text.encode()), "logprob": value}
            for text, value in scores
        ]
    }
