"""A WebSocket protocol for uvicorn that writes many messages in one write.

ASGI sends one message per call, and each pays for the whole stack. An application that finds `BURST` in the scope's
extensions has a function there that takes text messages as UTF-8 bytes, frames them and writes them as one; it waits
while the peer does not read. Nothing is compressed: deltas are short, and a deflate context per socket costs more
memory than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Opcode
from websockets.protocol import State

BURST = "motet.websocket.burst"

_TEXT = 0x80 | Opcode.TEXT  # one whole message
_SHORT = [bytes((_TEXT, size)) for size in range(126)]
_MEDIUM = bytes((_TEXT, 126))
_LONG = bytes((_TEXT, 127))


class BurstProtocol(WebSocketsSansIOProtocol):
    """uvicorn's sans-IO protocol with the extension `BURST`."""

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            # The task that will read it has been made, but has not run yet.
            cast(dict[str, Any], self.scope["extensions"])[BURST] = self.send_texts

    async def send_texts(self, texts: Iterable[bytes]) -> None:
        """Send each of `texts` as a message. Raises OSError once the connection is closing."""
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        self.transport.write(b"".join([part for text in texts for part in (frame_head(len(text)), text)]))


def frame_head(size: int) -> bytes:
    """The head of an unmasked, unfragmented text frame (RFC 6455, section 5.2)."""
    if size < 126:
        return _SHORT[size]
    if size < 65536:
        return _MEDIUM + size.to_bytes(2, "big")
    return _LONG + size.to_bytes(8, "big")
