"""One connection that moves bytes between subjects, and the NATS form of it.

What a transport promises: messages of one publisher on one subject arrive in order, at most once; a request to a
subject that nobody serves fails at once with NoResponders. `testing.MemoryTransport` keeps the same promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from .errors import ConfigError, PayloadTooLarge, Unavailable

log = logging.getLogger(__name__)

NO_RESPONDERS = "503"


class NoResponders(Unavailable):
    """Nobody serves the subject: the peer is gone, or was never there."""


@dataclass(slots=True)
class Message:
    subject: str
    data: bytes
    reply: str = ""
    headers: dict[str, str] | None = None

    @property
    def no_responders(self) -> bool:
        return not self.data and self.headers is not None and self.headers.get("Status") == NO_RESPONDERS


Handler = Callable[[Message], None]


class Transport(Protocol):
    """What streams, actors and discovery need of a connection."""

    max_payload: int

    @property
    def connected(self) -> bool: ...

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Queue a message. PayloadTooLarge (naming both sizes) before anything is sent."""

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Callable[[], Awaitable[None]]:
        """Call `handler` for each message, in order, on the loop; it must not block. Returns the unsubscriber."""

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        """One reply. NoResponders if nobody serves the subject, TimeoutError if nobody answers in time."""

    async def flush(self) -> None: ...

    async def close(self) -> None: ...


def check_payload(subject: str, size: int, limit: int) -> None:
    if size > limit:
        raise PayloadTooLarge(
            f"message of {size} bytes for {subject} is over the server's max_payload of {limit} bytes; "
            "send bulk data as a BlobRef"
        )


@dataclass(slots=True)
class NatsTransport:
    """A NATS connection that reconnects for ever and reports what nats-py tells only its callbacks."""

    client: Client
    max_payload: int
    errors: dict[str, int] = field(default_factory=dict)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        inbox_prefix: str,
        user: str | None = None,
        password: str | None = None,
        connect_timeout: float = 5.0,
    ) -> NatsTransport:
        transport = cls(Client(), 0)
        options: dict[str, Any] = {"user": user, "password": password} if password else {}
        try:
            await asyncio.wait_for(
                transport.client.connect(
                    url,
                    name=name,
                    inbox_prefix=inbox_prefix,
                    max_reconnect_attempts=-1,  # nats-py gives up after 60 by default
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # it is only slept on
                    connect_timeout=2,
                    ping_interval=5,
                    error_cb=transport._on_error,
                    disconnected_cb=transport._on_disconnect,
                    reconnected_cb=transport._on_reconnect,
                    # A restart of NATS must not lose what is said meanwhile; 16 MB is what a server takes in one go.
                    pending_size=16 * 1024 * 1024,
                    **options,
                ),
                connect_timeout,
            )
        except (OSError, TimeoutError, nats.errors.Error) as error:
            await transport.client.close()
            raise ConfigError(
                f"nats_url: cannot connect to {url} as {user or 'anonymous'}: {type(error).__name__} {error}; "
                "is nats-server running there and is the password right?"
            ) from error
        transport.max_payload = transport.client.max_payload
        return transport

    @property
    def connected(self) -> bool:
        return self.client.is_connected

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        check_payload(subject, len(data), self.max_payload)
        try:
            await self.client.publish(subject, data, reply=reply, headers=headers)
        except nats.errors.Error as error:
            raise Unavailable(f"NATS: {type(error).__name__} on {subject}") from error

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Callable[[], Awaitable[None]]:
        async def deliver(msg: Msg) -> None:
            handler(Message(msg.subject, msg.data, msg.reply, msg.headers))

        # A subscription limit in messages would drop frames long before memory is short: bytes bound it.
        subscription = await self.client.subscribe(
            subject, queue, cb=deliver, pending_msgs_limit=1 << 20, pending_bytes_limit=64 * 1024 * 1024
        )

        async def unsubscribe() -> None:
            if not self.client.is_closed:
                await subscription.unsubscribe()

        return unsubscribe

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        check_payload(subject, len(data), self.max_payload)
        try:
            return bytes((await self.client.request(subject, data, timeout=timeout)).data)
        except nats.errors.NoRespondersError as error:
            raise NoResponders(f"nobody serves {subject}") from error
        except nats.errors.TimeoutError as error:
            raise TimeoutError(f"no reply on {subject} within {timeout:g} s") from error
        except nats.errors.Error as error:
            raise Unavailable(f"NATS: {type(error).__name__} on {subject}") from error

    async def flush(self) -> None:
        if self.client.is_connected:
            await self.client.flush()

    async def close(self) -> None:
        # nats-py writes what is pending into a connection that is gone, and uvloop does not have that.
        with contextlib.suppress(RuntimeError):
            await self.client.close()

    async def _on_error(self, error: Exception) -> None:
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1
        if isinstance(error, (nats.errors.Error, OSError)):
            # A permission error reaches nobody else: nats-py's publish has long returned.
            log.warning("nats: %s %s", name, error)
        else:
            log.error("a handler failed: %s %s", name, error, exc_info=error)

    async def _on_disconnect(self) -> None:
        if not self.client.is_closed:
            log.warning("nats: disconnected")

    async def _on_reconnect(self) -> None:
        self.max_payload = self.client.max_payload
        log.info("nats: reconnected")
