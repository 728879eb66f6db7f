"""Define the ASGI types, read headers of a scope, and refuse WebSocket upgrades."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from motet_gateway.kept import draws

from .problems import Problem

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class ClientGone(Exception):
    """Signal that the client closed the connection, so there is no recipient for an answer."""


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header, given its lower-case name; empty if it is missing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def request_id(scope: Scope) -> str:
    """Return the client's `x-request-id` if it is safe for a log line, else a new one."""
    given = header(scope, b"x-request-id")
    return given.decode() if _REQUEST_ID.fullmatch(given) else "req_" + draws.token_hex(12)


async def refuse_upgrade(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a WebSocket handshake with an error.

    Without the server extension `websocket.http.response`, the answer is a bare 403.
    """
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json"), *problem.headers()]
    await send(
        {"type": "websocket.http.response.start", "status": problem.status, "headers": headers}
    )
    await send({"type": "websocket.http.response.body", "body": problem.body()})
