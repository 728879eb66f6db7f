"""Render the responses of a kept connection: each write is one that another gateway can make again.

Head and first part of the body are one write, so that a whole reply was rendered or was not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from motet_pipelines.answers import record_in
from motet_shared.wire.epochs import Epoch

from . import draws
from .epochs import GatewayEpochs
from .journal import JournaledStream, Writable
from .transport import KeptTransport

KEPT = "motet.http.kept"  # in the extensions of a scope: the `KeptResponse`

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]


class KeptResponse:
    """Stand in for the transport of one response, and record what services answer for it.

    `writable` waits until the client reads.
    """

    def __init__(self, transport: KeptTransport, writable: Writable):
        self._transport, self._writable = transport, writable
        self._generation = transport.journal.generation
        self.is_repeated = False  # True: another gateway had the whole request
        self._draws = transport.draws()
        self._head: bytes | None = None
        self._holds = False  # True: the next write is a head
        self._begins = False
        self._goes_on: bool | None = None  # None: the response has not begun
        self._epochs = GatewayEpochs(self.memo, self.note)

    def open(self, digest: bytes) -> JournaledStream | None:
        """Return the stream of a request to a service, None once the response has ended."""
        journal = self._transport.journal
        if journal.generation != self._generation:
            return None
        return journal.open(digest, self._writable)

    def memo(self, name: str) -> bytes | None:
        """Return the value that another gateway has noted under a name, None without any."""
        return self._transport.journal.memo(name)

    def note(self, name: str, value: bytes) -> None:
        """Note a value under a name."""
        self._transport.journal.note(name, value)

    def epoch(self, given: Epoch) -> Epoch:
        """Return the epoch of work of the epoch `given` that this gateway asks for."""
        return self._epochs.of(given, self._draws)

    @property
    def was_answered(self) -> bool:
        """Return True if another gateway has rendered all of the response."""
        return self._transport.was_answered

    def received(self) -> None:
        """Note that the whole request is here."""
        self.is_repeated = self._transport.is_adopting

    def stream(self) -> None:
        """Note that the response begins with the next write, and that an ASGI message ends it."""
        self._begins = self._goes_on = True

    def write(self, data: bytes) -> None:
        """Write a part of the response; its head waits for the part behind it."""
        if self._holds:
            self._head, self._holds = data, False
            return
        if self._head is not None:
            data, self._head, self._begins = self._head + data, None, True
        begins, self._begins = self._begins, False
        self._transport.render(data, begins=begins, goes_on=self._goes_on)

    def flush(self) -> None:
        """Write a head that has no body."""
        if self._head is not None:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def sending(self, send: _Send) -> _Send:
        """Return `send` of an ASGI application that answers with this response."""

        async def noted(message: _Message) -> None:
            if message["type"] == "http.response.start":
                self._holds = True
            elif message["type"] == "http.response.body":
                self._goes_on = bool(message.get("more_body", False))
            await send(message)

        return noted

    def enter(self) -> None:
        """Have the current task, and those that it starts, draw and record for this request."""
        draws.use(self._draws)
        record_in(self)


def kept_app(app: Any) -> Any:
    """Return the ASGI application that runs `app` for requests of kept connections."""

    async def run(scope: Any, receive: Any, send: Any) -> Any:
        kept: KeptResponse | None = scope.get("extensions", {}).get(KEPT)
        if kept is None:
            return await app(scope, receive, send)
        if kept.was_answered:  # by another gateway, which died before it forgot the request
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return await send({"type": "http.response.body"})
        kept.enter()
        return await app(scope, receive, kept.sending(send))

    return run
