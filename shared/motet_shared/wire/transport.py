"""Define a connection that moves bytes between subjects, and implement it with NATS.

A transport promises: messages of one publisher on one subject arrive in order, at most once; a
request to a subject without subscribers fails at once with NoResponders. `testing.MemoryTransport`
keeps the same promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import nats
import nats.errors
from nats.aio.msg import Msg

from motet_shared.errors import ConfigError, PayloadTooLarge, Unavailable

from .nats_client import ReconnectingClient, end, header_bytes

log = logging.getLogger(__name__)

NO_RESPONDERS = "503"
_PING_TIMEOUT = 60  # seconds; nats-py closes an unresponsive connection long before
_SAME_ERROR_AGAIN = 5.0  # seconds until an error is logged once more while it repeats


class NoResponders(Unavailable):
    """Report a request to a subject without subscribers: the peer is gone, or never existed."""


@dataclass(slots=True)
class Message:
    """Hold one received message."""

    subject: str
    data: bytes
    reply: str = ""
    headers: dict[str, str] | None = None

    @property
    def no_responders(self) -> bool:
        """Return True if this is NATS's answer to a request without subscribers."""
        return (
            not self.data
            and self.headers is not None
            and self.headers.get("Status") == NO_RESPONDERS
        )


Handler = Callable[[Message], None]


class Transport(Protocol):
    """Define what streams, actors and discovery require of a connection."""

    max_payload: int

    @property
    def connected(self) -> bool: ...

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Queue a message.

        Raises PayloadTooLarge with both sizes before anything is sent.
        """

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        """Call `handler` for each message, in order, on the loop; it must not block.

        Returns the function that unsubscribes.
        """

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        """Return one reply.

        Raises NoResponders if the subject has no subscriber, TimeoutError without an answer in
        time.
        """

    async def flush(self) -> None: ...

    async def ping(self) -> None:
        """Return once the server has answered.

        Raises Unavailable if the connection is lost before; has no timeout of its own.
        """

    async def close(self) -> None: ...


def check_payload(subject: str, size: int, limit: int) -> None:
    """Raise PayloadTooLarge if `size` bytes exceed `limit`."""
    if size > limit:
        raise PayloadTooLarge(
            f"the message has {size} bytes on its way to the model; at most {limit} are possible: send less at a time"
        )


def _is_refusal(error: Exception) -> bool:
    """Return True for what retries cannot fix: a certificate, a user or a password is refused."""
    if isinstance(error, ssl.SSLError):
        return True
    return isinstance(error, nats.errors.Error) and "authorization violation" in str(error).lower()


class NatsUnreachable(ConfigError):
    """Report that no NATS server took the connection; it may be one that has not started yet."""


@dataclass(slots=True)
class NatsTransport:
    """Keep a NATS connection that reconnects forever, and record errors of nats-py's callbacks."""

    client: ReconnectingClient
    max_payload: int
    errors: dict[str, int] = field(default_factory=dict)
    # set while the first connection is awaited
    _refused: asyncio.Future[Exception] | None = None
    _last_logged: tuple[str, float] = ("", 0.0)  # text, time

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        inbox_prefix: str,
        user: str | None = None,
        password: str | Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
        connect_timeout: float = 5.0,
    ) -> NatsTransport:
        """Connect within `connect_timeout` seconds, to one of the servers of `url`.

        Several are separated by commas. A callable `password` is called anew for each connection.
        With `tls`, TLS starts with the first byte, so that a server or a path without TLS never
        receives the password. Raises ConfigError if the server refuses the password or the
        certificates are not trusted, which retries cannot fix; NatsUnreachable if no server
        answers.
        """
        transport = cls(ReconnectingClient(), 0)
        options: dict[str, Any] = {"user": user, "password": password} if password else {}
        if tls is not None:
            options |= {"tls": tls, "tls_handshake_first": True}
        connecting = transport.client.connect(
            [one.strip() for one in url.split(",")],
            name=name,
            inbox_prefix=inbox_prefix,
            max_reconnect_attempts=-1,  # nats-py gives up after 60 by default
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # it is only slept on
            connect_timeout=2,
            ping_interval=5,
            error_cb=transport._on_error,
            disconnected_cb=transport._on_disconnect,
            reconnected_cb=transport._on_reconnect,
            # Messages sent during a NATS restart must not be lost; a server accepts 16 MB at once.
            pending_size=16 * 1024 * 1024,
            **options,
        )
        try:
            await transport._connected_within(asyncio.ensure_future(connecting), connect_timeout)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            await transport.client.close()
            raise (ConfigError if _is_refusal(error) else NatsUnreachable)(
                f"nats_url: cannot connect to {url} as {user or 'anonymous'}: {type(error).__name__} {error}; "
                "is nats-server running there, and are the password and the certificates right?"
            ) from error
        transport.max_payload = transport.client.max_payload
        return transport

    async def _connected_within(self, connecting: asyncio.Future[None], timeout: float) -> None:
        """Wait for the first connection.

        Raises TimeoutError, or the first error that retries cannot fix.
        """
        refused = self._refused = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait(
                (connecting, refused), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if connecting.done():
                connecting.result()
                return
            if refused.done():
                raise refused.result()
            raise TimeoutError
        finally:
            self._refused = None
            await end(connecting)

    @property
    def connected(self) -> bool:
        """Return True if the connection is open."""
        return self.client.is_connected

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Queue a message; see `Transport.publish`. Raises Unavailable for errors of NATS."""
        check_payload(subject, len(data) + header_bytes(headers), self.max_payload)
        try:
            await self.client.publish(subject, data, reply=reply, headers=headers)
        except (
            nats.errors.Error,
            OSError,
            RuntimeError,
        ) as error:  # the last: a transport that is closed
            raise Unavailable(f"NATS: {type(error).__name__} on {subject}") from error

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        """Call `handler` for each message; see `Transport.subscribe`."""

        async def deliver(msg: Msg) -> None:
            handler(Message(msg.subject, msg.data, msg.reply, msg.headers))

        # Bound pending messages by bytes: a limit in messages would drop frames long before memory
        # is short.
        subscription = await self.client.subscribe(
            subject,
            queue,
            cb=deliver,
            pending_msgs_limit=1 << 20,
            pending_bytes_limit=64 * 1024 * 1024,
        )

        async def unsubscribe() -> None:
            if not self.client.is_closed:
                await subscription.unsubscribe()

        return unsubscribe

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        """Return one reply; see `Transport.request`. Raises Unavailable for errors of NATS."""
        check_payload(subject, len(data), self.max_payload)
        try:
            return bytes((await self.client.request(subject, data, timeout=timeout)).data)
        except nats.errors.NoRespondersError as error:
            raise NoResponders(f"no process serves {subject}") from error
        except nats.errors.TimeoutError as error:
            raise TimeoutError(f"no reply on {subject} within {timeout:g} s") from error
        except nats.errors.Error as error:
            raise Unavailable(f"NATS: {type(error).__name__} on {subject}") from error

    async def flush(self) -> None:
        """Wait until the server has received all that is queued; skipped once there is no connection."""
        # nats-py writes the PING of a flush ahead of what is queued, which is written while the
        # answer is awaited: only the answer to a second PING covers it.
        for _ in range(2):
            if self.client.is_connected:
                with contextlib.suppress(nats.errors.ConnectionClosedError):
                    await self.client.flush()

    async def ping(self) -> None:
        """Return once the server has answered; see `Transport.ping`."""
        try:
            await self.client.flush(timeout=_PING_TIMEOUT)
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"NATS: {type(error).__name__}") from error

    async def close(self) -> None:
        """Close the connection."""
        # nats-py flushes pending data into a lost connection, which raises RuntimeError under
        # uvloop.
        with contextlib.suppress(RuntimeError):
            await self.client.close()

    async def _on_error(self, error: Exception) -> None:
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1
        if self._refused is not None and not self._refused.done() and _is_refusal(error):
            self._refused.set_result(error)
        if isinstance(error, (nats.errors.Error, OSError)):
            # A permission error surfaces only here: nats-py's publish has long returned.
            self._log_error(f"{name} {error}")
        else:
            log.error("a handler failed: %s %s", name, error, exc_info=error)

    def _log_error(self, text: str) -> None:
        """Log an error of NATS, unless the last one was the same, a moment ago.

        nats-py tells each failed try to reconnect twice, ten times a second.
        """
        last, at = self._last_logged
        if text != last or time.monotonic() - at > _SAME_ERROR_AGAIN:
            log.warning("nats: %s", text)
            self._last_logged = text, time.monotonic()

    async def _on_disconnect(self) -> None:
        if not self.client.is_closed:
            log.warning("nats: disconnected")

    async def _on_reconnect(self) -> None:
        self.max_payload = self.client.max_payload
        log.info("nats: reconnected")
