"""Put the memory of a connection between its socket and its protocol.

`KeptConnection` is the protocol that the event loop sees: it reads into the memory. `KeptTransport`
is the transport that the connection's own protocol sees: it writes into the memory first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

from .absent import AbsentTransport
from .draws import Draws
from .journal import Checkpoint, Journal
from .memory import READ, BadMemory, ConnectionMemory
from .moves import Place, messages, upgrade_end, without_messages

log = logging.getLogger(__name__)


class KeptConnection(asyncio.BufferedProtocol):
    """A connection that the descriptor store gave to this gateway.

    `make` creates its protocol. `adopted`: another gateway has served it before. `ended` is called
    once when it is to be kept no longer: it was closed, or something cannot be kept. `away` is called
    when its client has left, and its session waits for it. `known` is called once an adopted session is.
    `passed` has another gateway adopt it, and returns True if that is possible.
    """

    def __init__(
        self,
        memory: ConnectionMemory,
        make: Callable[[], asyncio.Protocol],
        ended: Callable[[], None],
        *,
        adopted: bool,
        away: Callable[[], None] = lambda: None,
        known: Callable[[], None] = lambda: None,
        passed: Callable[[], bool] = lambda: False,
    ):
        """Begin to serve it. Raises BadMemory if what the other gateway has left cannot be used."""
        self.memory, self.adopted = memory, adopted
        self._make, self._ended, self._left, self.known = make, ended, away, known
        self._passed = passed
        self.is_kept = True  # what is read and written is put into the memory
        self._is_stored = True  # the memory outlives this process
        self.is_retained = False  # True: the memory outlives the connection
        self._is_lost = False
        self.journal = Journal(memory, self.forget, self.abort)
        self.protocol: asyncio.Protocol | None = None
        self._outer: KeptTransport | None = None
        self._head: int | None = None  # bytes of the upgrade that is being repeated
        self._owes_messages = adopted and memory.is_socket  # True: its protocol does not have them
        self._private: bytearray | None = None  # received bytes of a connection that is not kept

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop does not end a transport that its protocol closes in `connection_made`.
        outer = self._outer = KeptTransport(transport, self)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_soon(self._begin, outer)

    def _begin(self, outer: KeptTransport) -> None:
        if outer.is_closing() or self.protocol is not None:
            return
        self.protocol = protocol = self._make()
        protocol.connection_made(outer)
        if self.adopted:
            if self.memory.is_open and not self.memory.is_journaled:
                outer.abort()  # its rest cannot be rendered again
                return
            if rest := self.memory.unsent():
                outer.resend(rest)
            if self.memory.is_socket:
                data = self.memory.received()
                self._head = upgrade_end(data)
                protocol.data_received(data[: self._head])
                return
        if (data := self.memory.received()) and not outer.is_closing():
            outer.is_adopting = self.adopted
            protocol.data_received(data)
            outer.is_adopting = False

    def upgraded(self) -> None:
        """Give the messages of a WebSocket to its protocol, once that has repeated the upgrade."""
        head, self._head, self._owes_messages = self._head, None, False
        if head is None or self._outer is None or self.protocol is None:
            return
        self._outer.is_adopting = True
        self.protocol.data_received(self.memory.received()[head:])
        self._outer.is_adopting = False
        if self.is_retained and self._outer.is_away:
            self._outer.close()  # the client left before the session had its messages

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        if self.is_kept:
            try:
                return self.memory.buffer()
            except BadMemory as error:
                log.warning("a connection is kept no longer: %s", error)
                self.forget()
        if self._private is None:
            self._private = bytearray(READ)
        return self._private

    def buffer_updated(self, nbytes: int) -> None:
        if self._private is None:
            data = self.memory.took(nbytes)
            # Else it gets what is in memory when it begins, or behind the upgrade.
            if self.protocol is not None and self._head is None:
                self.protocol.data_received(data)
        elif self.protocol is not None:
            self.protocol.data_received(bytes(self._private[:nbytes]))

    def eof_received(self) -> bool | None:
        return self.protocol.eof_received() if self.protocol is not None else None

    def pause_writing(self) -> None:
        if self.protocol is not None:
            self.protocol.pause_writing()

    def resume_writing(self) -> None:
        if self.protocol is not None:
            self.protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        is_away, is_lasting = self.memory.is_away, self.memory.is_lasting
        if self._outer is not None and self._owes_messages and is_lasting and not is_away:
            # The session gets them without a client.
            self._outer.leave_client()
            self._left()
            if self.protocol is None:
                self._begin(self._outer)
            elif self.is_retained:
                asyncio.get_running_loop().call_soon(self.upgraded)
            return
        if not self.is_retained:
            self.forget()
        elif self.is_kept:
            self.is_kept = False
            if not self.memory.is_away:
                self._left()
        if self.protocol is not None:
            self.protocol.connection_lost(exc)
        self._is_lost = True
        if not self.is_retained:
            self.memory.close()

    def abort(self) -> None:
        """Abort the connection: what follows cannot be what it should be."""
        if self._outer is not None:
            self._outer.abort()

    def forget(self) -> None:
        """Keep the connection no longer: it ends with this process."""
        if self._is_stored:
            self.journal.forgotten = True
            self.leave()

    def pass_on(self) -> bool:
        """Have another gateway serve the connection, which is closed here; return True if one does."""
        outer = self._outer
        if not self.is_kept or outer is None or outer.get_write_buffer_size() or not self._passed():
            return False
        self._is_stored = self.is_kept = False
        self.journal.forgotten = True
        outer.abort()
        return True

    def leave(self) -> None:
        """Have the store drop the connection, of which the memory is used on."""
        if self._is_stored:
            self._is_stored = self.is_kept = False
            self._ended()

    def release(self) -> None:
        """Close the memory with the connection, at once if that is lost."""
        if self.is_retained:
            self.is_retained = False
            if self._is_lost:
                self.leave()
                self.memory.close()


class KeptTransport(asyncio.Transport):
    """The transport of a kept connection's protocol."""

    def __init__(self, inner: asyncio.Transport, connection: KeptConnection):
        super().__init__()
        self._inner, self._connection = inner, connection
        self._memory = connection.memory
        self._journal = connection.journal
        self._requests = 0  # since all requests were answered
        state = self._memory.state
        # The last write of the gateway before: those up to it are rendered again, and dropped.
        self._rendered = (state.cursor, state.writes)
        self._was_open = connection.adopted and self._memory.is_open
        self._is_rendering = connection.adopted and state.writes > 0
        self.was_answered = connection.adopted and self._memory.is_answered
        self._at = (0, 0)
        self._is_socket = False
        self.is_admitted = connection.adopted  # by the gateway that has served it before
        self.is_greeted_before = connection.adopted and self._memory.is_socket
        self._is_greeted = self.is_greeted_before
        self.events = state.writes if self._is_greeted else 0  # of a session, that were rendered
        self.is_adopting = False  # True: the protocol gets what another gateway has received

    # ------------------------------------------------------------------------------------------------------- requests
    @property
    def journal(self) -> Journal:
        return self._journal

    def draws(self) -> Draws:
        """Return the draws of the current request."""
        return Draws(self._memory.secret, self._memory.state.generation, self._journal.time)

    def next_request(self) -> None:
        """Forget the request so far: it is answered, and nothing else has come."""
        if self._connection.is_kept:
            self._is_rendering = self._was_open = self.was_answered = False
            self._at = (0, 0)
            self._journal.reset()
            self._memory.next_request()

    def forget(self) -> None:
        """Keep the connection no longer."""
        self._connection.forget()

    def pass_on(self) -> bool:
        """Have another gateway serve the connection; return True if one does."""
        return self._connection.pass_on()

    def retain(self) -> None:
        """Keep the memory when the client leaves, until `release`."""
        self._connection.is_retained = True
        self._memory.set_lasting()
        self._connection.known()
        if self.is_away:
            # An upgrade that a closing connection did not take is not repeated.
            asyncio.get_running_loop().call_soon(self._connection.upgraded)
            self._inner.close()

    def leave_client(self) -> None:
        """Go on without a connection."""
        self._inner = AbsentTransport(self._connection)

    @property
    def is_away(self) -> bool:
        """Return True if the client had left before this gateway got the session."""
        return self._connection.adopted and self._memory.is_away

    def release(self) -> None:
        self._connection.release()

    @property
    def identity(self) -> bytes:
        """Return what the draws of the current request are derived from."""
        return self._memory.secret + self._memory.state.generation.to_bytes(8)

    def draws_of(self, identity: bytes) -> Draws:
        """Return the draws of a request over another connection, by its `identity`."""
        return Draws(identity[:-8], int.from_bytes(identity[-8:]), self._journal.time)

    def move(self, other: KeptTransport, handled: int, place: Place) -> None:
        """Have the session go on over another connection.

        handled: messages of the client over this one. Raises BadMemory if it does not fit there.
        """
        connection = other._connection
        self._journal.move(
            connection.memory,
            islice(messages(self._memory.received()), handled),
            place,
            connection.forget,
            connection.abort,
        )
        other._journal = connection.journal = self._journal
        other.events = place.sent
        connection.is_retained = True
        other._memory.set_lasting()
        self._connection.leave()
        self._connection.release()

    @property
    def recorded(self) -> int:
        """Return the bytes that the next gateway would handle again, a checkpoint included."""
        return self._memory.size

    @property
    def checkpoint_size(self) -> int:
        """Return the bytes of the last checkpoint, with what came with it."""
        return self._memory.state.checkpoint

    def begin_again(self, checkpoint: Checkpoint, handled: int) -> None:
        """Have the next gateway begin with a checkpoint.

        handled: messages of the client since the last one, or since the upgrade. Raises BadMemory,
        and changes nothing, if it does not fit.
        """
        self._memory.state.writes = self.events
        rest = without_messages(self._memory.received(), handled)
        self._journal.begin_again(checkpoint, rest)

    def write(self, data: Any) -> None:
        """Write a whole response, or messages of a WebSocket."""
        if self._is_socket:
            self._write_messages(data)
        else:
            self.render(data)

    def _write_messages(self, data: bytes) -> None:
        """Write messages; the answer to the upgrade is written once, by the first gateway."""
        if self._is_greeted:
            self._is_greeted = False
            asyncio.get_running_loop().call_soon(self._connection.upgraded)
            return
        if self._connection.is_kept and not (self._inner.is_closing() or self.is_away):
            self._memory.set_socket()
            self._memory.state.writes = self.events
            self._put(data)
        self._inner.write(data)

    def _put(self, data: bytes) -> None:
        """Put bytes into the memory, and the state in use."""
        try:
            self._memory.render(data, self._inner.get_write_buffer_size())
        except BadMemory as error:
            log.warning("a connection is kept no longer: %s", error)
            self._connection.forget()

    def render(self, data: Any, *, begins: bool = False, goes_on: bool | None = False) -> None:
        """Write bytes of a response, unless the gateway before has rendered them.

        begins: they contain the head of the response. goes_on: the response ends with a later
        write; None: it has not begun. If what is rendered now cannot be what was rendered then, the
        connection is aborted.
        """
        if self.was_answered:
            return
        cursor = self._journal.cursor
        writes = self._at[1] + 1 if cursor == self._at[0] else 1
        self._at = (cursor, writes)
        if self._is_rendering:
            is_known = self._at <= self._rendered
            if self._was_open and (begins > is_known or (is_known and goes_on is False)):
                log.warning("a reply cannot go on: it was rendered differently")
                self.abort()
                return
            if is_known:
                return
            self._is_rendering = self._was_open = False
        if self._connection.is_kept and not self._inner.is_closing():
            state = self._memory.state
            state.cursor, state.writes = cursor, writes
            if goes_on is not None:
                self._memory.set_open(goes_on)
            self._put(data)
        self._inner.write(data)

    def resend(self, data: bytes) -> None:
        """Write bytes that the gateway before has rendered."""
        self._inner.write(data)

    # ------------------------------------------------------------------------------------------------------ transport
    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Have the protocol of a WebSocket take over."""
        self._connection.protocol = protocol  # type: ignore[assignment]
        self._is_socket = True

    def get_protocol(self) -> asyncio.BaseProtocol:
        if self._connection.protocol is None:
            raise RuntimeError("the connection is not made yet")
        return self._connection.protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def is_reading(self) -> bool:
        return self._inner.is_reading()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._inner.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        return self._inner.can_write_eof()

    def write_eof(self) -> None:
        self._inner.write_eof()
