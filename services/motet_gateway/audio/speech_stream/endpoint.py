"""Accept connections to `/v1/audio/speech/stream`.

The WebSocket upgrade always succeeds (`motet_gateway.http.socket`); errors are sent on the socket
before it closes.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from motet_gateway.context import GatewayContext
from motet_gateway.http.socket import Socket
from motet_shared.errors import UnsupportedParameter

from .session import SpeechSession


async def speech_stream(service: GatewayContext, socket: Socket) -> None:
    """Serve one connection, whose upgrade is complete, to its end.

    Raises MotetError with the message for the client if no connection can be taken now.
    """
    if socket.caller is None:
        raise RuntimeError("the connection is not authenticated yet: `caller` is not set")
    if names := parse_qs(socket.scope["query_string"].decode("latin-1"), keep_blank_values=True):
        name = next(iter(names))
        raise UnsupportedParameter(
            f"unknown query parameter {name!r}; send it in `session.config`", param=name
        )
    if not socket.is_adopted:
        service.check_room()
        service.check_open()
    session = SpeechSession(service, socket, socket.caller, socket.keep())
    await service.sessions.add(session, is_admitted=socket.is_adopted)
    socket.served = True
    try:
        await session.run(socket.receive)
    finally:
        await service.sessions.end(session)
