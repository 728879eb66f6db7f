"""Mend nats-py's client where a lost connection, or closing, leaves something waiting.

nats-py forgets the pings that a lost connection has not answered, has requests wait for an answer
that was lost with one, waits until a lost connection has sent what was queued, and leaves
connections of failed tries open. It counts no headers where the server limits a message. It closes for
good where the server ends a connection with an error: of a message that is too large, or because a
reload has changed the password. It ends its tasks by one cancellation, which `asyncio.wait_for` may
swallow before Python 3.12.
"""

from __future__ import annotations

import asyncio
from typing import Any

import nats.errors
from nats.aio.client import PERMISSIONS_ERR, Client, Srv
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport

_HEADER_LINES, _HEADER_MARKS = len("NATS/1.0\r\n\r\n"), len(": \r\n")
_CANCELS = 50  # most attempts to cancel a task
_CANCELLED_WITHIN = 0.1  # seconds for each


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task until it is done."""
    for _ in range(_CANCELS):
        if task.done():
            return
        task.cancel()
        await asyncio.wait((task,), timeout=_CANCELLED_WITHIN)


def _heed_cancellation() -> None:
    """Raise CancelledError if the current task was cancelled, and has gone on all the same."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def header_bytes(headers: dict[str, Any] | None) -> int:
    """Return how many bytes headers add to a message, at most."""
    if not headers:
        return 0
    sizes = (len(name.encode()) + len(value.encode()) for name, value in headers.items())
    return _HEADER_LINES + sum(size + _HEADER_MARKS for size in sizes)


def may_be_repeated(subject: str, headers: dict[str, Any] | None) -> bool:
    """Return True for a request that has no further effect when it comes again.

    So are those to JetStream's API that Motet sends, and messages of which JetStream drops copies.
    """
    return subject.startswith("$JS.API.") or "Nats-Msg-Id" in (headers or {})


class ReconnectingClient(Client):
    """Reconnect in one task, which ends with `close`.

    Pings fail with the connection that they went over. Requests do so too, or are sent again if they
    may be.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reconnecting: asyncio.Task[Any] | None = None
        self._is_closing = False
        self._lost: asyncio.Future[None] | None = None  # done when the connection is lost

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        loop = asyncio.get_running_loop()
        expires = loop.time() + timeout
        while True:
            left = max(expires - loop.time(), 0.001)
            asking = loop.create_task(super().request(subject, payload, left, old_style, headers))
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            if self._lost is None:
                self._lost = loop.create_future()
            try:
                await asyncio.wait((asking, self._lost), return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
            finally:
                asking.cancel()
            if not may_be_repeated(subject, headers):
                raise nats.errors.ConnectionClosedError

    async def _send_publish(
        self,
        subject: str,
        reply: str,
        payload: bytes,
        payload_size: int,
        headers: dict[str, Any] | None,
    ) -> None:
        if payload_size + header_bytes(headers) > self.max_payload:
            raise nats.errors.MaxPayloadError
        await super()._send_publish(subject, reply, payload, payload_size, headers)

    async def _process_err(self, err_msg: str) -> None:
        if self.is_connecting or PERMISSIONS_ERR in err_msg.lower():
            await super()._process_err(err_msg)
        else:  # the server ends this connection, not the client: a next one may be admitted
            await self._process_op_err(nats.errors.Error(f"nats: {err_msg.strip().lower()}"))

    async def _attempt_reconnect(self) -> None:
        before, self._reconnecting = self._reconnecting, asyncio.current_task()
        if before is not None:
            await end(before)
        if self._is_closing:
            return
        self._lose()
        self._abort()
        await super()._attempt_reconnect()

    async def _connect_to_server(self, s: Srv) -> None:
        _heed_cancellation()
        self._abort()  # what the last try has left
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        _heed_cancellation()
        self._fail_pings()  # sent while the connection was being lost
        await super()._process_connect_init()

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():  # cancelled: nats-py would fail, and read no more
            self._pongs[0] = asyncio.Future()
        await super()._process_pong()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self._is_closing = True
        running = self._reconnecting
        if running is not None and running is not asyncio.current_task():
            await end(running)
        if not self.is_connected:
            self._pending, self._pending_data_size = [], 0  # the connection is lost
        self._lose()
        await super()._close(status, do_cbs)
        self._abort()

    def _lose(self) -> None:
        """End all that waits for an answer over the connection."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        self._lost = None
        self._fail_pings()

    def _fail_pings(self) -> None:
        pings, self._pongs = self._pongs, []
        for ping in pings:
            if not ping.done():
                ping.set_exception(nats.errors.ConnectionClosedError())
                ping.exception()  # nothing waits for those of `_ping_interval`

    def _abort(self) -> None:
        """Close the connection at once, whatever it has not sent."""
        connection = self._transport
        if isinstance(connection, TcpTransport) and connection._io_writer is not None:
            connection._io_writer.transport.abort()
