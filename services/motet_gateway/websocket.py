"""A WebSocket protocol for uvicorn that writes many messages in one write.

ASGI sends one message per call, and each pays for the whole stack. An application that finds `BURST` in the scope's
extensions may send `{"type": BURST, "texts": [bytes, …]}`: UTF-8 text messages, framed here and joined in one write.
Nothing is compressed: deltas are short, and a deflate context per socket costs more memory than it saves.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Opcode
from websockets.protocol import State

BURST = "motet.websocket.burst"

_TEXT = 0x80 | Opcode.TEXT  # one whole message


class BurstProtocol(WebSocketsSansIOProtocol):
    """uvicorn's sans-IO protocol with the extension `BURST`."""

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["extensions"][BURST] = {}  # the task that reads it has not run yet

    async def send(self, message: MutableMapping[str, Any]) -> None:  # type: ignore[override]
        if message["type"] != BURST:
            await super().send(message)  # type: ignore[arg-type]
            return
        await self.writable.wait()
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        self.transport.write(b"".join([part for text in message["texts"] for part in (frame_head(len(text)), text)]))


def frame_head(size: int) -> bytes:
    """The head of an unmasked, unfragmented text frame (RFC 6455, section 5.2)."""
    if size < 126:
        return bytes((_TEXT, size))
    if size < 65536:
        return bytes((_TEXT, 126)) + size.to_bytes(2, "big")
    return bytes((_TEXT, 127)) + size.to_bytes(8, "big")
