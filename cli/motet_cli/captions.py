"""What is said, as text while it is said: live sound through a transcription session of `/v1/realtime`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

from motet_cli.devices import RATE
from motet_shared.audio import pcm_bytes
from motet_shared.errors import Unavailable, from_wire

_PIECE = pcm_bytes(40, RATE)
_LAST = "last"  # id of the event that commits the rest
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class Captions:
    """One session. `Unavailable` where there is no server; its errors come as `MotetError`."""

    def __init__(self, url: str, key: str | None) -> None:
        address = url.rstrip("/").replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._socket = connect(address, additional_headers=headers, proxy=None, max_size=None)
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise Unavailable(f"no server at {url} ({error}); start one with `motet up`, or give --url") from None
        self._url = url

    def __enter__(self) -> Captions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def of(self, sound: IO[bytes], settings: dict[str, str]) -> Iterator[str]:
        """Text in the order in which it was said, a line per turn, until `sound` (PCM) ends and all of it is heard.

        `settings` are those of `session.audio.input.transcription`.
        """
        turns = Turns()
        self._send("session.update", session={"type": "transcription", "audio": {"input": {"transcription": settings}}})
        sender = threading.Thread(target=self._hear, args=(sound,), name="microphone", daemon=True)
        for event in self._events():
            kind = event["type"]
            if kind == "session.updated":
                sender.start()
            elif kind == "input_audio_buffer.committed":
                turns.commit(event["item_id"])
            elif kind == "input_audio_buffer.cleared":
                yield from turns.end()
            elif kind.startswith(_TRANSCRIPTION):
                yield from turns.note(kind.removeprefix(f"{_TRANSCRIPTION}."), event)
            if turns.over:
                return

    def _hear(self, sound: IO[bytes]) -> None:
        """Sends the sound as it comes; at its end, what is left of it becomes the last turn."""
        try:
            while piece := sound.read(_PIECE):
                self._send("input_audio_buffer.append", audio=base64.b64encode(piece).decode())
            self._send("input_audio_buffer.commit", event_id=_LAST)
            self._send("input_audio_buffer.clear")
        except ConnectionClosed:
            pass  # the reader tells

    def _send(self, kind: str, **fields: Any) -> None:
        self._socket.send(json.dumps({"type": kind, **fields}))

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            for message in self._socket:
                event = json.loads(message)
                error = event.get("error") if event["type"] == "error" else None
                if error is None:
                    yield event
                elif error.get("event_id") != _LAST:  # that one had nothing left to commit
                    raise from_wire(str(error.get("code") or "internal"), str(error["message"]))
        except ConnectionClosed as closed:
            raise Unavailable(f"the connection to {self._url} broke: {closed}") from None
        raise Unavailable(f"{self._url} closed the connection")


class Turns:
    """Turns by the order in which they began. Only the oldest open one shows; later ones wait for it."""

    def __init__(self) -> None:
        self._text: dict[str, str] = {}  # by item: what is known of it
        self._committed: set[str] = set()
        self._closed: set[str] = set()
        self._shown = 0  # characters of the oldest
        self._ended = False

    @property
    def over(self) -> bool:
        """Whether nothing is to come any more."""
        return self._ended and not self._text

    def commit(self, item_id: str) -> None:
        """It is a turn: its words, if they are not all there, will come."""
        self._text.setdefault(item_id, "")
        self._committed.add(item_id)

    def note(self, kind: str, event: dict[str, Any]) -> Iterator[str]:
        """What an event of transcription lets show. A transcription that failed is shown as far as it came."""
        item_id = event["item_id"]
        text = self._text.setdefault(item_id, "")
        if kind == "delta":
            self._text[item_id] += event["delta"]
        elif kind in ("completed", "failed"):
            self._text[item_id] = event.get("transcript", text)
            self._closed.add(item_id)
        yield from self._show()

    def end(self) -> Iterator[str]:
        """No turn begins any more, and what has not become one never will."""
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
