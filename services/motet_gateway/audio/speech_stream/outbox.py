"""Send the messages of one connection; what an earlier gateway has sent is not sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from motet_gateway.http.socket import Socket
from motet_gateway.kept.session import KeptSession

ANSWERS = ""  # the sequence of what answers the client's messages


class Outbox:
    """Send messages in sequences: each has one order in every gateway, others may come in between.

    kept: what keeps the connection beyond the death of this gateway.
    """

    def __init__(self, socket: Socket, kept: KeptSession | None):
        self._socket, self._kept = socket, kept
        self._count = 0 if kept is None else kept.sent

    @contextmanager
    def deciding(self, name: str, sequence: str | None = None) -> Iterator[bool]:
        """Decide in the block as an earlier gateway did: see `KeptSession.deciding`.

        sequence: whose next message follows from that.
        """
        if self._kept is None:
            yield False
            return
        is_told = sequence is not None and self._kept.is_sent(sequence)
        with self._kept.deciding(name, is_told=is_told) as is_admitted:
            yield is_admitted

    async def send(
        self, sequence: str, take: Callable[[], Sequence[bytes]], *, binary: bool = False
    ) -> None:
        """Send each message of `take`, which is called once the client reads, in one write.

        binary: they are bytes, not text. Raises ClientGone after the client has left.
        """
        kept = self._kept
        if kept is None:
            await self._socket.write(take, binary=binary)
        elif kept.is_sent(sequence):  # a write was sent whole, or not at all
            again = take()
            for _ in again:
                kept.known(sequence)
            kept.tick(len(again), len(again))
        else:
            await self._socket.write(lambda: self._recorded(kept, sequence, take()), binary=binary)

    def _recorded(
        self, kept: KeptSession, sequence: str, messages: Sequence[bytes]
    ) -> Sequence[bytes]:
        """Record messages before they are sent."""
        if messages:
            kept.render(self._count + 1, [(sequence, False)] * len(messages))
            kept.tick(len(messages), len(messages))
            self._count += len(messages)
            kept.send(self._count)
        return messages
