"""Extend uvicorn's WebSocket protocol to batch messages in one write and confirm their arrival.

ASGI sends one message per call, and each pays for the whole stack. An application that finds
`BURST` in the scope's extensions has a `Burst` there. Messages are not compressed: deltas are
short, and a deflate context per socket costs more memory than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from motet_gateway.http.connections.closing import ClosingTimer
from motet_gateway.http.connections.counts import Lease
from motet_gateway.kept.session import KEPT_SESSION, KeptSession
from motet_gateway.kept.transport import KeptTransport

from . import chunks
from .readers import SlowReaders

BURST = "motet.websocket.burst"

_WHOLE = 0x80  # of a frame that is one whole message
_MARK_BYTES = 8  # uvicorn's own pings carry four
_CLOSE_FRAME_TIMEOUT = 2.0  # seconds for the close frame of a peer that answers no pings


class BurstProtocol(WebSocketsSansIOProtocol):
    """Extend uvicorn's sans-IO protocol by the ASGI extension `BURST`."""

    burst: Burst | None = None
    lease: Lease | None = None  # of the connection, released when it is lost

    def __init__(self, config: Config, server_state: ServerState, *more: Any, **options: Any):
        super().__init__(config, server_state, *more, **options)
        self._closing = ClosingTimer()
        self._pong = b""  # that waits for the rest of what was received
        _accept_early_close(self.conn)
        self.readers = (
            server_state.readers if isinstance(server_state, chunks.State) else SlowReaders()
        )

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            # The task that reads the scope has been created but has not run yet.
            self.burst = Burst(self)
            extensions = cast(dict[str, Any], self.scope["extensions"])
            extensions[BURST] = self.burst
            if isinstance(self.transport, KeptTransport):
                extensions[KEPT_SESSION] = KeptSession(self.transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._pong:
            self.transport.write(self._pong)
            self._pong = b""

    def handle_ping(self) -> None:
        """Answer a ping; of those that an earlier gateway had received, the last one (RFC 6455, section 5.5.3)."""
        if isinstance(self.transport, KeptTransport) and self.transport.is_adopting:
            # Of several pings in one piece all answers are here at the first.
            self._pong = b"".join(self.conn.data_to_send()) or self._pong
        else:
            super().handle_ping()

    def send_receive_event_to_app(self) -> None:
        """Give the application a message; close the connection of a text that is no UTF-8.

        uvicorn's own method logs a traceback of each such text, so that clients could fill the log.
        """
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                text = b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(CloseCode.INVALID_DATA)
                self.handle_parser_exception()
                return
            self.frames = []
            self.queue.put_nowait({"type": "websocket.receive", "text": text})
            if not self.read_paused:
                self.read_paused = True
                self.transport.pause_reading()
        else:
            super().send_receive_event_to_app()

    def handle_pong(self, event: Any) -> None:
        if self.burst is not None and len(event.data) == _MARK_BYTES:
            self.burst.on_arrived(int.from_bytes(event.data))
        else:
            super().handle_pong(event)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        # A full buffer would never be flushed, and the application would not see the disconnect.
        self.loop.call_later(_CLOSE_FRAME_TIMEOUT, self.transport.abort)

    def check_time(self, now: float) -> None:
        """Abort the connection if its client delays the closing; `now` is on the loop's clock."""
        self._closing.check(self.transport, now, self.close_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn reports 1005, which means a close frame without a code. The application reads only
        # the first disconnect, so this one is ignored after a real close frame.
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
        super().connection_lost(exc)
        if self.lease is not None:
            self.lease.release()


class Burst:
    """Send messages in batches, bypassing ASGI."""

    def __init__(self, protocol: BurstProtocol):
        self._protocol = protocol
        self.on_arrived: Callable[[int], None] = lambda mark: None

    @property
    def clogged(self) -> bool:
        """Return True if the peer does not read, so that `send` would wait."""
        return not self._protocol.writable.is_set()

    @property
    def is_free(self) -> bool:
        """Return True if `send_now` may be called: the connection is open, and the peer reads."""
        peer = self._protocol
        return peer.writable.is_set() and self._is_open

    @property
    def _is_open(self) -> bool:
        peer = self._protocol
        closes = peer.disconnected or peer.close_sent
        return not closes and peer.conn.state is State.OPEN

    def send_now(self, take: Callable[[], Iterable[bytes]], *, binary: bool = False) -> None:
        """Send each text returned by `take` as one message, all in a single write."""
        self._protocol.transport.write(
            b"".join([part for data in take() for part in (frame_head(len(data), binary), data)])
        )

    async def send(self, take: Callable[[], Iterable[bytes]], *, binary: bool = False) -> None:
        """Send each text returned by `take` as one message, all in a single write.

        binary: they are bytes, not text. `take` is called once the peer reads. Raises OSError,
        without calling `take`, if the connection is closing.
        """
        peer = self._protocol
        if not peer.writable.is_set():
            with peer.readers.waiting():
                await peer.writable.wait()
        if not self._is_open:
            raise ClientDisconnected
        self.send_now(take, binary=binary)

    def ask(self, mark: int) -> None:
        """Request a call of `on_arrived(mark)` once everything sent so far has arrived."""
        peer = self._protocol
        if self._is_open:
            peer.conn.send_ping(mark.to_bytes(_MARK_BYTES))
            peer.transport.write(b"".join(peer.conn.data_to_send()))

    def drop(self) -> None:
        """Abort the connection at once."""
        self._protocol.transport.abort()


def _accept_early_close(conn: ServerProtocol) -> None:
    """Have a connection answer a close frame within a fragmented message as any other.

    RFC 6455, section 5.4, allows control frames there; websockets takes it for an error.
    """

    def receive(frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            conn.current_size = None
        received(frame)

    received = conn.recv_frame
    conn.recv_frame = receive  # type: ignore[method-assign]


def frame_head(size: int, binary: bool = False) -> bytes:
    """Return the head of an unmasked, unfragmented frame (RFC 6455, section 5.2)."""
    short, medium, long = _HEADS[binary]
    if size < 126:
        return short[size]
    if size < 65536:
        return medium + size.to_bytes(2, "big")
    return long + size.to_bytes(8, "big")


def _heads(opcode: int) -> tuple[list[bytes], bytes, bytes]:
    first = _WHOLE | opcode
    return [bytes((first, size)) for size in range(126)], bytes((first, 126)), bytes((first, 127))


_HEADS = (_heads(Opcode.TEXT), _heads(Opcode.BINARY))
