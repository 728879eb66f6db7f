"""Journal what the services answer to a connection's requests, and give it to their handlers again.

Each record has an effect, such as a write to the client, only behind its commit; and the effect
comes before the next record. So a handler that gets the same records renders the same writes.

A session over a WebSocket is tasks beside each other. Its journal also has the order in which the
client's messages were handled among the answers, and each record says how many events had been
rendered: the next gateway gives it to the session once that has rendered as many.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum

import msgspec

from .memory import BadMemory, ConnectionMemory
from .moves import Message, Place

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode_events = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, bool]]]).decode

Writable = Callable[[], Awaitable[None]]  # waits until the client reads
_REPLAY = 30.0  # seconds in which what is recorded has to be read before something else comes
_LATE = 3.0  # seconds that a session has for the events before a record; tasks may render fewer
_EFFECTS = 16  # turns of the loop in which a session's tasks pass on what a record has
# Behind a record of a session: the events that had been rendered, and those that are no deltas. How
# many deltas a text is cut into may differ between two processes; the others do not.
_TICK = struct.Struct("<II")
_MOST_STREAMS = 2**16 - 1


class Record(IntEnum):
    """Name the kinds of records."""

    TIME = 1  # at which the request was first served
    BATCH = 2  # of a stream
    END = 3  # of a stream
    ERROR = 4  # at the end of a stream
    STREAM = 5  # its number belongs to the request with this digest
    MEMO = 6  # a name, a zero and a value
    INPUT = 7  # a message of the client is handled
    EVENTS = 8  # number of the first one; of each its sequence, and whether it is a delta
    MESSAGE = 9  # of the client, over an earlier connection
    MOVED = 10  # the client has come to this connection, with this `Place`
    LASTING = 11  # as MEMO, and kept by checkpoints
    CHECKPOINT = 12  # the state of a session, in place of what was recorded before


class Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    """The state of a session that nothing runs for.

    numbered: events that have a number. drawn: as in `Draws`. state: of the session itself.
    """

    numbered: int
    drawn: int
    state: bytes


_decode_checkpoint = msgspec.msgpack.Decoder(Checkpoint).decode
_ORDERED = (Record.TIME, Record.BATCH, Record.END, Record.ERROR, Record.INPUT)


class Journal:
    """The journal of one connection's requests; `cursor` counts the records consumed so far.

    `full` is called when no more fits; `forgotten` then tells that nothing is recorded any more.
    `strayed` is called when the handler does not ask for what is recorded.
    """

    def __init__(
        self,
        memory: ConnectionMemory,
        full: Callable[[], None],
        strayed: Callable[[], None] = lambda: None,
    ):
        """Begin with the records in memory. Raises BadMemory."""
        self._memory, self._full, self._strayed = memory, full, strayed
        self._records: list[tuple[int, int, bytes]] = []
        self._numbers: dict[bytes, list[int]] = {}  # of recorded streams that nothing has asked for
        self._streams = 0  # the highest number
        self._memos: dict[str, bytes] = {}
        self._lasting: dict[str, bytes] = {}  # memos that checkpoints keep
        self.checkpoint: Checkpoint | None = None  # before all that is recorded
        self.events: dict[int, tuple[str, bool]] = {}  # by number
        self.earlier: list[Message | None] = []  # over earlier connections; None: a move
        self.place = Place()  # of the last move
        for kind, stream, data in memory.records():
            self._streams = max(self._streams, stream)
            if kind == Record.STREAM:
                self._numbers.setdefault(data, []).append(stream)
            elif kind in (Record.MEMO, Record.LASTING):
                name, _, value = data.partition(b"\0")
                self._memos[name.decode()] = value
                if kind == Record.LASTING:
                    self._lasting[name.decode()] = value
            elif kind == Record.CHECKPOINT:
                self.checkpoint = _checkpoint(data)
            elif kind == Record.EVENTS:
                first, events = _decode_events(data)
                self.events |= enumerate(events, first)
            elif kind == Record.MESSAGE:
                self.earlier.append(Message.decode(data))
            elif kind == Record.MOVED:
                self.earlier.append(None)
                self.place = Place.decode(data)
            else:
                self._records.append((kind, stream, data))
        self._left = Counter(stream for _, stream, _ in self._records)
        self._waiting: list[asyncio.Future[None]] = []
        self.is_session = False  # False: these are requests
        self._generation = 0  # of the session
        self._rendered = self._steps = 0  # events of the session, and those that are no deltas
        self._sent = b""  # what an earlier process has sent, as behind a record
        self._fewer = (0, 0)  # of both, that were rendered before, and not here
        self._abandoned: set[int] = set()  # streams
        self._settled = 0  # turns of the loop since the last record
        self.cursor = 0
        self.forgotten = False

    @property
    def is_replaying(self) -> bool:
        """Return True while there are records of an earlier process."""
        return self.cursor < len(self._records)

    def reset(self) -> None:
        """Begin again: all requests are answered."""
        self._records = []
        self._numbers.clear()
        self._left.clear()
        self._memos.clear()
        self.cursor = self._streams = 0

    def time(self) -> int:
        """Return the Unix time at which the current request was first served, in seconds."""
        if self.is_replaying and self._records[self.cursor][0] == Record.TIME:
            return int.from_bytes(self._advance())
        now = int(time.time())
        self.append_now(Record.TIME, 0, now.to_bytes(8))
        return now

    def open(self, digest: bytes, writable: Writable) -> JournaledStream:
        """Return the stream of a request to a service; its response can go on in another process."""
        numbers = self._numbers.get(digest)
        self._memory.set_journaled()
        return JournaledStream(self, digest, numbers.pop(0) if numbers else None, writable)

    def memo(self, name: str) -> bytes | None:
        """Return the value that was noted under a name, None without any."""
        return self._memos.get(name)

    def note(self, name: str, value: bytes, *, lasts: bool = False) -> None:
        """Note a value under a name, once. lasts: beyond checkpoints."""
        if lasts:
            self._lasting[name] = value
        self._put(Record.LASTING if lasts else Record.MEMO, 0, _memo(name, value))

    # ---------------------------------------------------------------------------------------------- for a session
    def begin_session(self, sent: int) -> None:
        """Record a session from now on, or give back what was recorded of it.

        sent: events that an earlier process has sent.
        """
        self.is_session = True
        self._generation = self._memory.state.generation
        told = [is_delta for number, (_, is_delta) in self.events.items() if number <= sent]
        self._sent = _TICK.pack(len(told), told.count(False))

    def render(self, first: int, events: list[tuple[str, bool]]) -> None:
        """Record events that are about to be sent: their sequences, and whether they are deltas.

        first: number of the first one.
        """
        self._put(Record.EVENTS, 0, _encode((first, events)))

    def tick(self, count: int, steps: int) -> None:
        """Count events that were rendered, in this process or in an earlier one; `steps` are no deltas."""
        self._rendered += count
        self._steps += steps
        if self._waiting:
            self._wake()

    async def input(self) -> None:
        """Wait for the turn of the client's next message, and record that it is handled."""
        if self.is_replaying and self._left[0]:
            await self.next(0)
        else:
            await self.turn()
            self.append_now(Record.INPUT, 0, b"")

    async def replayed(self) -> None:
        """Wait until all records were consumed, and all that was sent is rendered again."""
        while self.is_replaying:
            await self._moved()
        if self._sent:
            self._settled = 0
            await self._due(Record.INPUT, self._sent)
            self._sent = b""

    def begin_again(self, checkpoint: Checkpoint, received: bytes) -> None:
        """Record what follows a checkpoint, in place of everything until it.

        received: what is left of the client's bytes. What runs still records nothing any more.
        Raises BadMemory, and changes nothing, if it does not fit.
        """
        lasting = [(Record.LASTING, 0, _memo(*one)) for one in self._lasting.items()]
        record = (Record.CHECKPOINT, 0, _encode(checkpoint))
        self._memory.replace([record, *lasting], received)
        self.reset()
        self.checkpoint = None
        self._memos |= self._lasting
        self.events.clear()
        self.earlier.clear()
        self._abandoned.clear()
        self._generation = self._memory.state.generation
        self._rendered = self._steps = 0
        self._fewer = (0, 0)

    # -------------------------------------------------------------------------------------------- for its streams
    @property
    def generation(self) -> int:
        """Return a number that changes when all requests are answered, and with a checkpoint."""
        return self._generation or self._memory.state.generation

    def next_number(self, digest: bytes) -> int:
        """Return the number of a stream that is not recorded yet."""
        self._streams += 1
        if self._streams > _MOST_STREAMS:
            self._full()
        self._put(Record.STREAM, self._streams, digest)
        return self._streams

    async def next(self, stream: int, writable: Writable | None = None) -> tuple[int, bytes] | None:
        """Return the kind and data of a stream's next record, None if there is none.

        A record of a request is consumed once its effect need not wait: the next one comes behind that.
        """
        while self._left[stream]:
            kind, number, data = self._records[self.cursor]
            if number != stream:
                await self._moved()
            elif self.is_session:
                await self._due(kind, data)
                return kind, self._advance()[: -_TICK.size]
            else:
                if writable is not None:
                    await writable()  # the record is this stream's, so it is still the next
                return kind, self._advance()
        if self.is_session:  # what was cancelled is cancelled again before it goes on
            await self.replayed()
        return None

    async def _due(self, kind: int, data: bytes) -> None:
        """Wait until a record of a session may have its effect: all that came before it have had theirs."""
        while self._settled < _EFFECTS:
            self._settled += 1
            await asyncio.sleep(0)
        self._settled = _EFFECTS if kind == Record.INPUT else 0
        rendered, steps = _TICK.unpack_from(data, len(data) - _TICK.size)
        try:
            async with asyncio.timeout(_LATE):
                while (
                    self._rendered + self._fewer[0] < rendered
                    or self._steps + self._fewer[1] < steps
                ):
                    await self._moved()
        except TimeoutError:
            self._fewer = max(rendered - self._rendered, 0), max(steps - self._steps, 0)
            log.info("a session has rendered %d events fewer than before", self._fewer[0])

    def abandon(self, stream: int) -> None:
        """Pass over what is recorded of a stream: what asked for it was cancelled."""
        if self.is_replaying:
            self._abandoned.add(stream)
            self._pass_over()

    def _pass_over(self) -> None:
        while self.is_replaying and self._records[self.cursor][1] in self._abandoned:
            self._left[self._records[self.cursor][1]] -= 1
            self.cursor += 1
            self._wake()

    @property
    def is_new(self) -> bool:
        """Return True if nothing of an earlier process is left."""
        return not (self.is_replaying or self._sent)

    async def turn(self) -> None:
        """Wait for the turn of something new, behind everything that was recorded."""
        if self.is_replaying:
            try:
                async with asyncio.timeout(_REPLAY):
                    while self.is_replaying:
                        await self._moved()
            except TimeoutError:
                log.warning("a reply cannot go on: its request asks the services something else")
                self._strayed()
        if self._sent:
            await self.replayed()

    def append_now(self, kind: Record, stream: int, data: bytes) -> None:
        """Record something new, unless there are records of an earlier process."""
        if not (self.forgotten or self.is_replaying):
            self._put(kind, stream, data)
            self.cursor += 1

    def _put(self, kind: Record, stream: int, data: bytes) -> None:
        if self.forgotten:
            return
        if self.is_session and kind in _ORDERED:
            data += _TICK.pack(self._rendered, self._steps)
        try:
            self._memory.append(kind, stream, data)
        except BadMemory:
            self.forgotten = True
            self._full()

    # --------------------------------------------------------------------------------------------- for its moves
    def move(
        self,
        memory: ConnectionMemory,
        said: Iterable[Message],
        place: Place,
        full: Callable[[], None],
        strayed: Callable[[], None],
    ) -> None:
        """Go on in the memory of another connection, with all that is recorded, at once.

        said: what the client has sent over this connection. Raises BadMemory if it does not fit.
        """
        records = [
            *self._memory.records(),
            *((Record.MESSAGE, 0, message.encode()) for message in said),
            (Record.MOVED, 0, place.encode()),
        ]
        memory.replace(records, memory.received())
        self._memory, self._full, self._strayed = memory, full, strayed

    def _advance(self) -> bytes:
        """Consume a record, and return its data."""
        _, stream, data = self._records[self.cursor]
        self.cursor += 1
        self._left[stream] -= 1
        self._wake()
        self._pass_over()
        return data

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def _moved(self) -> None:
        """Wait until a record is consumed, or an event of a session rendered."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


def _memo(name: str, value: bytes) -> bytes:
    return b"%b\0%b" % (name.encode(), value)


def _checkpoint(data: bytes) -> Checkpoint:
    """Return a checkpoint. Raises BadMemory."""
    try:
        return _decode_checkpoint(data)
    except msgspec.MsgspecError as error:
        raise BadMemory(f"a checkpoint: {error}") from None


class JournaledStream:
    """What the services answer to one request: a `RecordedStream` of the pipelines."""

    def __init__(self, journal: Journal, digest: bytes, number: int | None, writable: Writable):
        """`number`: of the records of an earlier process. `writable`: that of the response."""
        self._journal, self._digest, self._number = journal, digest, number
        self._writable, self._generation = writable, journal.generation
        self.end: bytes | None = None
        self.error: bytes | None = None

    def __del__(self) -> None:
        if self._number is not None and self._journal.is_session:
            self._journal.abandon(self._number)

    async def next(self) -> bytes | None:
        """Return the next recorded batch, None behind the last."""
        if self._number is None:
            if self._journal.is_session:
                await self._journal.replayed()
            return None
        found = await self._journal.next(self._number, self._writable)
        if found is None:
            return None
        kind, data = found
        if kind == Record.BATCH:
            return data
        if kind == Record.END:
            self.end = data
        else:
            self.error = data
        return None

    async def append(self, data: bytes) -> None:
        """Record a batch once the client reads: what is recorded can be written at once."""
        await self._writable()
        if self._has_ended:
            return
        number = self._numbered()
        if not self._journal.is_new:
            await self._journal.turn()
            await self._writable()  # the client may have stopped reading behind what was recorded
        if not self._has_ended:
            self._journal.append_now(Record.BATCH, number, data)

    @property
    def is_live(self) -> bool:
        """Return True if `append_now` may be called. Tasks of a session are recorded in their turns."""
        return self._journal.is_new and not (self._journal.is_session or self._has_ended)

    def append_now(self, data: bytes) -> None:
        """Record a batch that can have its effect at once."""
        self._journal.append_now(Record.BATCH, self._numbered(), data)

    async def close(self, data: bytes, *, failed: bool) -> None:
        """Record the end, or an error."""
        if not self._has_ended:
            number = self._numbered()
            await self._journal.turn()
            self._journal.append_now(Record.ERROR if failed else Record.END, number, data)

    @property
    def _has_ended(self) -> bool:
        """Return True if the response ended, and what comes is recorded no more."""
        return self._generation != self._journal.generation

    def _numbered(self) -> int:
        """Return the number of the stream, a new one for one that is not recorded yet."""
        if self._number is None:
            self._number = self._journal.next_number(self._digest)
        return self._number
