"""Have a text spoken while it is written, over `/v1/audio/speech/stream`."""

from __future__ import annotations

import codecs
import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from motet_shared.errors import MotetError, Unavailable, from_wire

_READ = 4096  # bytes of one piece of text, at most
_FIRST_CREDIT = 65_536  # characters that may be sent before the server grants more


def speak_stream(
    url: str, key: str | None, settings: dict[str, Any], source: int
) -> Iterator[bytes]:
    """Yield the encoded speech of what is read from `source`, a file descriptor, to its end.

    settings: fields of `session.config`. Closing the iterator cancels the speech. Raises
    Unavailable if the server cannot be reached or leaves, MotetError for what it refuses.
    """
    address = url.rstrip("/").replace("http", "ws", 1) + "/v1/audio/speech/stream"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        socket = connect(address, additional_headers=headers, proxy=None, max_size=None)
    except (OSError, InvalidHandshake, TimeoutError) as error:
        raise Unavailable(
            f"no server at {url} ({error}); start one with `motet up`, or give --url"
        ) from None
    with socket:
        yield from _spoken(url, socket, settings, source)


def _spoken(
    url: str, socket: ClientConnection, settings: dict[str, Any], source: int
) -> Iterator[bytes]:
    _send(socket, "session.config", **settings, stream_audio=True)
    credit = _Credit()
    # A daemon: what it waits for may never be written.
    threading.Thread(target=_send_text, args=(socket, source, credit), daemon=True).start()
    try:
        for message in socket:
            if isinstance(message, bytes):
                yield message
                continue
            event = json.loads(message)
            if event["type"] == "error":
                error = event["error"]
                raise from_wire(str(error.get("code") or "internal"), str(error["message"]))
            if "credit" in event:
                credit.grant(int(event["credit"]))
            if event["type"] == "session.done":
                return
    except ConnectionClosed as closed:
        raise Unavailable(f"the connection to {url} broke: {closed}") from None
    raise MotetError(f"{url} closed the connection before the text was spoken; try again")


class _Credit:
    """Count the characters that may be sent in all."""

    def __init__(self) -> None:
        self._total = _FIRST_CREDIT
        self._granted = threading.Condition()

    def grant(self, total: int) -> None:
        with self._granted:
            self._total = max(self._total, total)
            self._granted.notify_all()

    def wait(self, total: int) -> None:
        """Wait until `total` characters may be sent."""
        with self._granted:
            self._granted.wait_for(lambda: total <= self._total)


def _send_text(socket: ClientConnection, source: int, credit: _Credit) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sent = 0
    with suppress(ConnectionClosed):  # the receiving side reports it
        while data := os.read(source, _READ):
            text = decoder.decode(data)
            sent += len(text)
            credit.wait(sent)
            _send(socket, "input.text", text=text)
        _send(socket, "input.text", text=decoder.decode(b"", final=True))
        _send(socket, "input.done")


def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))
