"""Render a spoken message: audio in the client's format, with its transcript in step."""

from __future__ import annotations

from motet_shared.messages import Audio

from .audio_settings import Format
from .channel import Deltas
from .conversation import Stored
from .formats import Encoder
from .output_position import OutputPosition
from .spoken_words import SpokenWords


class SpeechOutput:
    """Render one spoken message; text that is written but not yet spoken is not sent."""

    def __init__(self, place: OutputPosition, item_id: str, format: Format, spoken: SpokenWords):
        self._place, self._item_id, self._spoken = place, item_id, spoken
        self._encoder = Encoder(format)
        self._told = ""
        self._where = {
            "response_id": place.response_id,
            "item_id": item_id,
            "output_index": place.output_index,
            "content_index": 0,
        }
        self._sounds = Deltas(place.channel, "response.output_audio.delta", **self._where)
        self._words = Deltas(place.channel, "response.output_audio_transcript.delta", **self._where)

    def open(self) -> list[bytes]:
        events = self._place.opened(self._item("in_progress"))
        part = {"type": "audio", "transcript": ""}
        return [
            *events,
            self._place.channel.event("response.content_part.added", **self._where, part=part),
        ]

    def write(self, text: str) -> None:
        self._spoken.write(text)

    def sound(self, batch: list[Audio]) -> list[bytes]:
        """Return the events of the next audio and of the words that it completes."""
        self._spoken.note(batch)
        encoded = self._encoder.push(b"".join([item.data for item in batch]))
        events = [self._sounds.render(encoded)] if encoded else []
        return events + self._caption(self._spoken.told)

    def _caption(self, until: int) -> list[bytes]:
        fresh = self._spoken.text[len(self._told) : until]
        self._told += fresh
        return [self._words.render(fresh)] if fresh else []

    def close(self, status: str) -> tuple[Stored, list[bytes]]:
        """Return the finished item and its closing events. `status`: completed or incomplete."""
        rest = self._encoder.finish()
        events = [self._sounds.render(rest)] if rest else []
        if status == "completed":
            events += self._caption(len(self._spoken.text))
        event, item, transcript = self._place.channel.event, self._item(status), self._transcript
        events += [
            event("response.output_audio.done", **self._where),
            event("response.output_audio_transcript.done", **self._where, transcript=transcript),
            event(
                "response.content_part.done",
                **self._where,
                part={"type": "audio", "transcript": transcript},
            ),
        ]
        return item, events + self._place.closed(item)

    @property
    def _transcript(self) -> str:
        """Return the sent transcript, or less if the client truncated it while it was spoken."""
        return self._told if len(self._told) <= len(self._spoken.text) else self._spoken.text

    def _item(self, status: str) -> Stored:
        content = (
            [{"type": "output_audio", "transcript": self._transcript}]
            if status != "in_progress"
            else []
        )
        base = {"id": self._item_id, "object": "realtime.item", "type": "message", "status": status}
        return {**base, "role": "assistant", "content": content}
