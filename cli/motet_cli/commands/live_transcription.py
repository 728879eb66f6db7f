"""Transcribe live audio through a transcription session of `/v1/realtime`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

from motet_cli.commands.devices import RATE
from motet_media.audio import pcm_bytes
from motet_shared.errors import Unavailable, from_wire

_PIECE = pcm_bytes(40, RATE)
_LAST = "last"  # id of the event that commits the remaining audio
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class LiveTranscription:
    """Hold one transcription session; errors of the server are raised as MotetError."""

    def __init__(self, url: str, key: str | None) -> None:
        """Connect to the server. Raises Unavailable if that fails."""
        address = url.rstrip("/").replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._socket = connect(address, additional_headers=headers, proxy=None, max_size=None)
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise Unavailable(
                f"no server at {url} ({error}); start one with `motet up`, or give --url"
            ) from None
        self._url = url

    def __enter__(self) -> LiveTranscription:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def transcribe(self, sound: IO[bytes], settings: dict[str, str]) -> Iterator[str]:
        """Yield text in spoken order, a line per turn, until all of `sound` is transcribed.

        sound: PCM, 16 bits, mono, 24 kHz.
        settings: fields of `session.audio.input.transcription`.
        """
        turns = Turns()
        self._send(
            "session.update",
            session={"type": "transcription", "audio": {"input": {"transcription": settings}}},
        )
        sender = threading.Thread(
            target=self._send_audio, args=(sound,), name="microphone", daemon=True
        )
        for event in self._events():
            kind = event["type"]
            if kind == "session.updated":
                sender.start()
            elif kind == "input_audio_buffer.committed":
                turns.commit(event["item_id"])
            elif kind == "input_audio_buffer.cleared":
                yield from turns.end()
            elif kind.startswith(_TRANSCRIPTION):
                yield from turns.apply(kind.removeprefix(f"{_TRANSCRIPTION}."), event)
            if turns.finished:
                return

    def _send_audio(self, sound: IO[bytes]) -> None:
        """Send the audio as it arrives; at its end, commit the rest as the last turn."""
        try:
            while piece := sound.read(_PIECE):
                self._send("input_audio_buffer.append", audio=base64.b64encode(piece).decode())
            self._send("input_audio_buffer.commit", event_id=_LAST)
            self._send("input_audio_buffer.clear")
        except ConnectionClosed:
            pass  # the receiving side reports it

    def _send(self, kind: str, **fields: Any) -> None:
        self._socket.send(json.dumps({"type": kind, **fields}))

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            for message in self._socket:
                event = json.loads(message)
                error = event.get("error") if event["type"] == "error" else None
                if error is None:
                    yield event
                elif error.get("event_id") != _LAST:  # there was nothing left to commit
                    raise from_wire(str(error.get("code") or "internal"), str(error["message"]))
        except ConnectionClosed as closed:
            raise Unavailable(f"the connection to {self._url} broke: {closed}") from None
        raise Unavailable(f"{self._url} closed the connection")


class Turns:
    """Order the text of turns by their beginning: only the oldest open turn is shown."""

    def __init__(self) -> None:
        self._text: dict[str, str] = {}  # text so far, by item
        self._committed: set[str] = set()
        self._closed: set[str] = set()
        self._shown = 0  # characters of the oldest turn already shown
        self._ended = False

    @property
    def finished(self) -> bool:
        """Return True if no text can follow."""
        return self._ended and not self._text

    def commit(self, item_id: str) -> None:
        """Mark an item as a turn, whose text arrives now or later."""
        self._text.setdefault(item_id, "")
        self._committed.add(item_id)

    def apply(self, kind: str, event: dict[str, Any]) -> Iterator[str]:
        """Apply a transcription event; yield the text that it makes visible.

        A failed transcription is shown as far as it was received.
        """
        item_id = event["item_id"]
        text = self._text.setdefault(item_id, "")
        if kind == "delta":
            self._text[item_id] += event["delta"]
        elif kind in ("completed", "failed"):
            self._text[item_id] = event.get("transcript", text)
            self._closed.add(item_id)
        yield from self._show()

    def end(self) -> Iterator[str]:
        """Record that no further turn begins; close items that were not committed."""
        self._ended = True
        self._closed |= self._text.keys() - self._committed
        yield from self._show()

    def _show(self) -> Iterator[str]:
        while self._text:
            oldest, text = next(iter(self._text.items()))
            if len(text) > self._shown:
                yield text[self._shown :]
                self._shown = len(text)
            if oldest not in self._closed:
                return
            if self._shown:
                yield "\n"
            del self._text[oldest]
            self._shown = 0
