"""Carry a session's events over the data channel of a call, as a WebSocket does elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec
from aiortc import RTCDataChannel, RTCSctpTransport
from aiortc.rtcsctptransport import DataChunk

from motet_gateway.http.asgi import ClientGone, Scope

LABEL = "oai-events"
MOST_MESSAGE = 2**18  # bytes of a client's event; answers announce it
_HIGH, _LOW = 2**18, 2**16  # bytes that wait to be sent, at which writers wait and go on
_MOST_HELD = 2**21  # bytes of a client that ignores the window of 1 MiB
_MOST_GAPS = 4096  # chunks behind one that is missing
_MOST_STREAMS = 16  # stream ids; browsers count from 0
_POLL, _LAST_POLLS = 0.02, 50  # seconds, and how often: for the last events to arrive
_GONE = {"type": "websocket.disconnect", "code": 1006}


class EventChannel:
    """Carry the events of a session over a data channel.

    scope: of the request with the offer. hang_up: closes the call.
    """

    def __init__(self, scope: Scope, hang_up: Callable[[], Awaitable[None]]):
        self.scope = scope
        self._hang_up = hang_up
        self._channel: RTCDataChannel | None = None
        self._sctp: RTCSctpTransport | None = None
        self._opened, self._writable = asyncio.Event(), asyncio.Event()
        self._received: deque[str | bytes] = deque()
        self._changed = asyncio.Event()  # something was received, or the client is gone
        self._gone = False
        self._tell: Callable[[int], None] = lambda mark: None

    def open(self, channel: RTCDataChannel) -> None:
        """Use the client's channel; any further one is closed."""
        if self._channel is not None or channel.label != LABEL:
            channel.close()
            return
        self._channel, self._sctp = channel, channel.transport
        channel.bufferedAmountLowThreshold = _LOW
        channel.on("message", self._receive)
        channel.on("bufferedamountlow", self._writable.set)
        channel.on("close", self.lose)
        self._opened.set()
        self._writable.set()

    def lose(self) -> None:
        """Note that the client has left."""
        self._gone = True
        for event in (self._opened, self._writable, self._changed):
            event.set()

    async def opened(self) -> None:
        """Wait for the client's channel. Raises ClientGone if it leaves before."""
        await self._opened.wait()
        if self._gone:
            raise ClientGone

    # ------------------------------------------------------------------------------------- receive
    def _receive(self, message: str | bytes) -> None:
        if len(message) > MOST_MESSAGE:
            self.lose()
            return
        assert self._sctp is not None
        # What is not handled yet keeps the window small, so that a client waits.
        self._sctp._advertised_rwnd -= len(message)
        self._received.append(message)
        self._changed.set()

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next event of the client, as a message of ASGI's WebSockets."""
        while not self._received and not self._gone:
            self._changed.clear()
            await self._changed.wait()
        if self._gone or self._sctp is None:
            return dict(_GONE)
        message = self._received.popleft()
        self._sctp._advertised_rwnd += len(message)
        text = message if isinstance(message, str) else None
        return {"type": "websocket.receive", "text": text}

    # ---------------------------------------------------------------------------------------- send
    @property
    def is_free(self) -> bool:
        return self._writable.is_set() and not self._gone and self._is_open

    def write_now(self, take: Callable[[], Iterable[bytes]]) -> None:
        """Send each text that `take` returns as a message."""
        assert self._channel is not None
        for text in take():
            try:
                self._channel.send(text.decode())
            except ValueError:  # larger than the client's maximum
                self._channel.send(_too_large(text))
        if self._channel.bufferedAmount > _HIGH:
            self._writable.clear()

    async def write(self, take: Callable[[], Iterable[bytes]]) -> None:
        """Send each text that `take` returns as a message.

        Raises ClientGone if the channel is closed.
        """
        await self._writable.wait()
        if self._gone or not self._is_open:
            raise ClientGone
        self.write_now(take)

    @property
    def _is_open(self) -> bool:
        return self._channel is not None and self._channel.readyState == "open"

    def ask(self, mark: int) -> None:
        """Count everything as arrived: a call's client does not come back."""
        self._tell(mark)

    def on_arrived(self, tell: Callable[[int], None]) -> None:
        self._tell = tell

    async def close(self, code: int, reason: str = "") -> None:
        """Hang up, once the last events have arrived or had the time to."""
        for _ in range(_LAST_POLLS):  # aiortc has no event for what has arrived
            if self._gone or not self._unsent():
                break
            await asyncio.sleep(_POLL)
        self.lose()
        await self._hang_up()

    def _unsent(self) -> bool:
        channel, sctp = self._channel, self._sctp
        if channel is None or sctp is None:
            return False
        return bool(channel.bufferedAmount or sctp._outbound_queue or sctp._sent_queue)


def bound(sctp: RTCSctpTransport, lose: Callable[[], None]) -> None:
    """Have a transport give up a client that sends more than it may, before it is stored."""

    async def receive(chunk: DataChunk) -> None:
        held = 2**20 - sctp._advertised_rwnd
        if (
            held > _MOST_HELD
            or chunk.stream_id >= _MOST_STREAMS
            or len(sctp._sack_misordered) > _MOST_GAPS
        ):
            lose()
        else:
            await received(chunk)

    received = sctp._receive_data_chunk
    sctp._receive_data_chunk = receive  # type: ignore[method-assign]


def _too_large(text: bytes) -> str:
    event = msgspec.json.decode(text)
    message = f"an event {event['type']} has {len(text)} bytes, more than the client accepts"
    error = {
        "type": "invalid_request_error",
        "code": "event_too_large",
        "message": message,
        "param": None,
        "event_id": None,
    }
    made = {"type": "error", "event_id": event["event_id"], "error": error}
    return msgspec.json.encode(made).decode()
