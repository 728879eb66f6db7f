"""Keep a session over a WebSocket beyond the death of its gateway.

The next gateway handles the client's messages again, in the order in which they came among the
services' answers, and gives each task the answers that it had. Events are numbered for the client
in the order in which they are rendered. That order may differ in another process, as tasks run
beside each other; but each of them makes its sequence of events (of a response, of an item) in one
order. So as many of each sequence as were sent are rendered again and not sent, under the numbers
that they had.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from motet_pipelines.answers import record_in
from motet_shared.errors import MotetError, from_wire
from motet_shared.wire.epochs import Epoch

from . import draws
from .epochs import GatewayEpochs
from .journal import Checkpoint, JournaledStream
from .memory import BadMemory
from .moves import Message, Place
from .transport import KeptTransport

log = logging.getLogger(__name__)

KEPT_SESSION = "motet.websocket.kept"  # in the extensions of a scope: the `KeptSession`
ORIGIN = "origin"  # name under which the request is noted that opened a session that has moved
END = "/end"  # of the sequence whose events end the one of this name

_encode = msgspec.msgpack.Encoder().encode
_decode_refusal = msgspec.msgpack.Decoder(tuple[str, str, bool, str | None]).decode

_DRAWS = "draws"
_REPLAY = 60.0  # seconds in which a session has to be where it was
_CHECKPOINT = 2**20  # bytes since the last checkpoint from which on there is another one
_SHARE = 0.5  # of a larger checkpoint that have to come, so that writing it costs less than they


class KeptSession:
    """What a WebSocket's session records, and what an earlier gateway has recorded of it.

    `begin` comes before the session writes anything; without it the connection is kept no longer.
    `sent`: events that an earlier gateway has sent. `state`: of the session where all else follows,
    None at its begin.
    """

    def __init__(self, transport: KeptTransport):
        self._transport, self._journal = transport, transport.journal
        self.has_begun = False
        self._has_moved = self.memo(ORIGIN) is not None
        self._handled = 0  # messages of the client over this connection, since a checkpoint
        place, checkpoint = self._journal.place, self._journal.checkpoint
        self.state = None if checkpoint is None else checkpoint.state
        stated = 0 if checkpoint is None else checkpoint.numbered
        self.sent = transport.events = max(transport.events, place.sent)
        self.numbered = max(self.sent, place.numbered, stated)
        # Number of the next event to send, up to those numbered; the state has those before it.
        self._next = max(self.sent, stated) + 1
        self._recorded = transport.checkpoint_size  # bytes, at the last checkpoint
        self._early: dict[int, bytes] = {}  # events that wait for the ones before them
        self._numbers: dict[str, deque[int]] = defaultdict(deque)  # of events sent, by sequence
        for number, (sequence, _) in sorted(self._journal.events.items()):
            if number <= self.numbered:
                self._numbers[sequence].append(number)
        self._draws = transport.draws()
        self._ended = {name.removesuffix(END) for name in self._numbers if name.endswith(END)}
        self._epochs = GatewayEpochs(self.memo, partial(self.note, lasts=True))

    def begin(self) -> None:
        """Have the current task, and those that it starts, draw and record for the session."""
        self.has_begun = True
        self._journal.begin_session(self.numbered)
        if (identity := self.memo(_DRAWS)) is None:
            identity = self._transport.identity
            self.note(_DRAWS, identity, lasts=True)
        self._draws = self._transport.draws_of(identity)
        self._enter()
        if self.is_replaying:
            asyncio.get_running_loop().call_later(_REPLAY, self._check)

    def _enter(self) -> None:
        draws.use(self._draws)
        record_in(self)

    @property
    def is_replaying(self) -> bool:
        """Return True while it is not yet where the earlier gateway had brought it."""
        return self._journal.is_replaying

    async def replayed(self) -> None:
        """Wait until it is where the earlier gateway had brought it."""
        await self._journal.replayed()

    @property
    def is_adopted(self) -> bool:
        """Return True if an earlier gateway has begun it."""
        return self._transport.is_greeted_before

    @property
    def is_away(self) -> bool:
        """Return True if its client had left before this gateway got it."""
        return self._transport.is_away

    def forget(self) -> None:
        """Keep the connection no longer."""
        self._transport.forget()

    def pass_on(self) -> bool:
        """Have another gateway serve the connection; return True if one does."""
        return self._transport.pass_on()

    def abort(self) -> None:
        """Abort the connection: what follows cannot be what it should be."""
        if not self._transport.is_closing():
            self._transport.abort()

    # --------------------------------------------------------------------------------------------------- checkpoints
    @property
    def is_due(self) -> bool:
        """Return True if a checkpoint is to be made as soon as nothing runs for the session."""
        journal = self._journal
        if journal.forgotten or self.is_replaying or self._early or self.is_away:
            return False
        more = self._transport.recorded - self._recorded
        return more > max(_CHECKPOINT, _SHARE * self._transport.checkpoint_size)

    def begin_again(self, state: bytes, numbered: int) -> None:
        """Have the next gateway begin with this state of the session, behind the last handled message.

        numbered: events that have a number. If there is no room for it, all goes on as it is.
        """
        checkpoint = Checkpoint(numbered, self._draws.drawn, state)
        try:
            self._transport.begin_again(checkpoint, self._handled)
        except BadMemory as error:
            log.info("a session has no checkpoint: %s", error)
        else:
            self._handled = 0
            self._numbers.clear()
            self._ended.clear()
        self._recorded = self._transport.recorded

    def restored(self) -> None:
        """Draw on as at the checkpoint: the session has its state again."""
        if self._journal.checkpoint is not None:
            self._draws.drawn = self._journal.checkpoint.drawn
        self.state = None

    # ------------------------------------------------------------------------------------- to another connection
    @property
    def earlier(self) -> list[Message | None]:
        """Return what the client sent over earlier connections, None for each of its moves."""
        return self._journal.earlier

    def retain(self) -> None:
        """Keep the session while its client is away, until it moves or is closed."""
        self._transport.retain()

    def close(self) -> None:
        """Keep no more of the session."""
        self._journal.forgotten = True
        self._transport.release()

    def move(self, other: KeptSession | None, sent: int, numbered: int, origin: bytes) -> None:
        """Go on in the current task over the connection of `other`; None: over one that nothing keeps.

        sent, numbered: of the events, as in `Place`. origin: describes the request that opened the
        session.
        """
        if other is None or self._journal.forgotten:
            self.forget()
            self.close()
            if other is not None:
                other.forget()
            return
        if not self._has_moved:
            self.note(ORIGIN, origin, lasts=True)
        self._has_moved = True
        try:
            self._transport.move(other._transport, self._handled, Place(sent, numbered))
        except BadMemory as error:
            log.warning("a session is kept no longer: %s", error)
            other.forget()
            self.close()
        self._transport, self._handled = other._transport, 0
        self._enter()  # the task of the other connection

    def _check(self) -> None:
        if (self.is_replaying or self._early) and not self._transport.is_closing():
            log.warning("a session cannot go on: it is not where it was after %g s", _REPLAY)
            self.abort()

    # ------------------------------------------------------------------------------------------- what it is made of
    def open(self, digest: bytes) -> JournaledStream:
        """Return the stream of a request to a service."""
        return self._journal.open(digest, _at_once)

    def epoch(self, given: Epoch) -> Epoch:
        """Return the epoch of work of the epoch `given` that this gateway asks for."""
        return self._epochs.of(given, self._draws)

    def memo(self, name: str) -> bytes | None:
        """Return the value that was noted under a name, None without any."""
        return self._journal.memo(name)

    def note(self, name: str, value: bytes, *, lasts: bool = False) -> None:
        """Note a value under a name. lasts: beyond checkpoints."""
        self._journal.note(name, value, lasts=lasts)

    async def input(self) -> None:
        """Wait until the client's next message is to be handled."""
        await self._journal.input()
        self._handled += 1

    async def input_again(self) -> None:
        """Wait until the next of `earlier` is to be handled."""
        await self._journal.input()

    @contextmanager
    def deciding(self, name: str, *, is_told: bool = False) -> Iterator[bool]:
        """Decide in the block as an earlier gateway did, whose refusals are noted under `name`.

        Yields True if that has not refused. is_told: its client knows what follows from that.

        Raises the error that was noted; an error of the block is noted.
        """
        if (refusal := self.memo(name)) is not None:
            raise from_wire(*_decode_refusal(refusal))
        is_admitted = self.is_replaying or is_told
        try:
            yield is_admitted
        except MotetError as error:
            if not is_admitted:
                self.note(name, _encode((error.code, error.message, error.retryable, error.param)))
            raise

    # ------------------------------------------------------------------------------------------------------- events
    def known(self, sequence: str) -> int | None:
        """Return the number of the next event of a sequence, None if it was not sent yet.

        0: it was not sent, and cannot be, as the end of its sequence was.
        """
        if numbers := self._numbers.get(sequence):
            return numbers.popleft()
        return 0 if sequence in self._ended else None

    def in_order(self, number: int, event: bytes) -> Sequence[bytes]:
        """Return the events to send after one of this number was rendered that is to be sent."""
        if self._next > self.numbered:
            return (event,)
        self._early[number] = event
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready

    def is_sent(self, sequence: str) -> bool:
        """Return True if the next event of a sequence was sent, or cannot be any more."""
        return bool(self._numbers.get(sequence)) or sequence in self._ended

    def render(self, first: int, events: list[tuple[str, bool]]) -> None:
        """Record new events before they are sent: their sequences, and whether they are deltas.

        first: number of the first one.
        """
        self._journal.render(first, events)

    def tick(self, count: int, steps: int) -> None:
        """Count events that were rendered, sent before or not; `steps` of them are no deltas."""
        self._journal.tick(count, steps)

    def send(self, count: int) -> None:
        """Note that the next write has the events up to this number."""
        self._transport.events = count


async def _at_once() -> None:
    """Record at once: a session waits for its client where it sends."""
