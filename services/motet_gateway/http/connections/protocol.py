"""Extend uvicorn's HTTP protocol by limits on size and time of incoming requests.

Times are checked by `check_time`, which the server calls regularly for each connection: a timer for
every request would cost more than parsing the request's head.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from motet_gateway.http.problems import HeadTooLarge, Problem, RequestTimeout, TooManyConnections
from motet_gateway.kept.transport import KeptTransport
from motet_shared.errors import BadRequest, MotetError

from .bounds import BoundedState
from .closing import ClosingTimer
from .counts import Lease


class _At(Enum):
    """State of the parser."""

    BETWEEN = 0  # between two requests, or before the first
    HEAD = 1
    BODY = 2


class BoundedProtocol(HttpToolsProtocol):
    """Limit the heads, bodies, idle time and number of connections."""

    lease: Lease | None = None  # set before `connection_made` if the connection is counted already

    def __init__(self, config: Any, server_state: ServerState, *more: Any, **options: Any):
        super().__init__(config, server_state, *more, **options)
        shared = server_state if isinstance(server_state, BoundedState) else BoundedState()
        self._bounds, self._counts = shared.bounds, shared.counts
        self._at = _At.BETWEEN
        self._since = 0.0  # start of the phase that is limited now, on the loop's clock
        self._unparsed = 0  # upper bound of the bytes since the parser last made progress
        self._body = 0  # bytes of the body so far
        self._trailers = 0
        self._closing = ClosingTimer()
        self._refusal: MotetError | None = None

    # ------------------------------------------------------------------------------------------------- the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        if self.lease is None:
            is_admitted = isinstance(transport, KeptTransport) and transport.is_admitted
            peer = self.client[0] if self.client else None
            try:
                self.lease = self._counts.connect(peer, is_admitted=is_admitted)
            except TooManyConnections as error:
                self.refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.lease is not None:
            self.lease.release()

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        successor: Any = self.transport.get_protocol()
        successor.lease, self.lease = self.lease, None
        if (
            not successor.handshake_initiated
        ):  # websockets enforces limits of its own without an answer
            self._fail(self._too_large(), "head")

    def refuse(self, error: MotetError) -> None:
        """Answer with an error, if no response has started yet, and close the connection."""
        cycle = self.cycle
        if not self.transport.is_closing():
            # In a body the last response belongs to this request; elsewhere to an earlier one.
            answered = cycle is not None and cycle.response_started
            is_upgraded = (
                isinstance(self.transport, KeptTransport) and self.transport.is_greeted_before
            )
            if not is_upgraded and not (
                answered and (self._at is _At.BODY or not cycle.response_complete)
            ):
                self.transport.write(_response(Problem.of(error)))
            self.transport.close()
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    # ------------------------------------------------------------------------------------------------------ what comes
    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._at is _At.BETWEEN:
            self._at, self._since = _At.HEAD, self.loop.time()
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._fail(self._refusal or BadRequest("what came is no HTTP/1.1 request"), "malformed")
            return
        if self._unparsed > self._bounds.head_bytes:
            self._fail(self._too_large(), "head")

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse what has come, up to an upgrade. Raises HttpParserError."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._at is not _At.HEAD:  # the request was taken
                    if self._should_upgrade():
                        self.handle_websocket_upgrade()
                    return
                data = memoryview(data)[upgrade.args[0] :]
            self._decline_upgrade()

    def _decline_upgrade(self) -> None:
        """Parse the head of a request again without the upgrade that it asks for.

        The parser skips the body of a request that asks for one.
        """
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.parser.feed_data(b"".join(head) + b"\r\n")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._at is not _At.HEAD:  # `data_received` did this for the first request of a read
            self._at, self._since = _At.HEAD, self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        fields = len(self.headers)
        if self._at is _At.BODY:  # a trailer field; trailers are counted and dropped
            self._trailers += 1
            fields = self._trailers
        if fields >= self._bounds.header_fields:
            self._refusal = self._too_large()
            raise self._refusal
        if self._at is not _At.BODY:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._unparsed > self._bounds.head_bytes and self._head_size() > self._bounds.head_bytes:
            self._refusal = self._too_large()
            raise self._refusal
        if self._is_declined:
            return  # the head comes again, without the upgrade
        self._at, self._since = _At.BODY, self.loop.time()
        self._unparsed = self._body = self._trailers = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._at is _At.HEAD:  # of an upgrade that is declined
            return
        self._at = _At.BETWEEN
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._since, self._body = self.loop.time(), 0
        super().on_response_complete()

    @property
    def _is_declined(self) -> bool:
        """Return True if the parsed head asks for an upgrade to anything but a WebSocket."""
        parser = self.parser
        is_upgrade = parser.should_upgrade() and parser.get_method() != b"CONNECT"
        return is_upgrade and not self._should_upgrade()

    @property
    def is_between_requests(self) -> bool:
        """Return True if no part of a request has come that is not parsed to its end."""
        return self._at is _At.BETWEEN

    # ------------------------------------------------------------------------------------------------------------ time
    def check_time(self, now: float) -> None:
        """Close the connection of a client that is too slow; `now` is on the loop's clock."""
        if self._closing.check(self.transport, now, self._bounds.head_seconds):
            return
        if self._at is _At.BODY:
            self._check_body(now)
        elif self.cycle is not None and not self.cycle.response_complete:
            self._since = now  # the client waits for the server
        elif self._at is _At.HEAD:
            if now - self._since > self._bounds.head_seconds:
                message = (
                    f"the head of the request took longer than {self._bounds.head_seconds:g} s"
                )
                self._fail(RequestTimeout(message), "slow_head")
        elif now - self._since > self._bounds.idle_seconds:
            self.transport.close()

    def _check_body(self, now: float) -> None:
        bounds = self._bounds
        if self.cycle.response_complete:  # the rest of the body is discarded
            allowed = bounds.head_seconds
        else:
            allowed = bounds.body_seconds + self._body / bounds.body_rate
        if self.flow.read_paused and not self.cycle.response_complete:
            self._since, self._body = now, 0  # the server has paused reading
        elif now - self._since > allowed:
            message = f"the body came too slowly: {self._body} bytes in {now - self._since:.0f} s"
            self._fail(
                RequestTimeout(f"{message}; send at least {bounds.body_rate:g} per second"),
                "slow_body",
            )

    # ----------------------------------------------------------------------------------------------------------- parts
    def _fail(self, error: MotetError, reason: str) -> None:
        self._counts.refused("head" if isinstance(error, HeadTooLarge) else reason)
        self.refuse(error)

    def _too_large(self) -> HeadTooLarge:
        most = (
            f"{self._bounds.head_bytes} bytes (--max-head) and {self._bounds.header_fields} fields"
        )
        return HeadTooLarge(
            f"the head of the request is too large; at most {most} (--max-header-fields) are accepted"
        )

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)


def _response(problem: Problem) -> bytes:
    """Return a complete response that closes its connection."""
    body = problem.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *problem.headers(),
    ]
    fields = b"".join(b"%b: %b\r\n" % header for header in headers)
    return STATUS_LINE[problem.status] + fields + b"connection: close\r\n\r\n" + body


def peer_of(transport: asyncio.BaseTransport) -> str | None:
    """Return the IP address of the peer, or None if it is unknown."""
    found = get_remote_addr(transport)  # type: ignore[arg-type]
    return found[0] if found else None
