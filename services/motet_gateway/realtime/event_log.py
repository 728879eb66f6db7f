"""Keep a session's server events until its client surely has them, so they can be sent again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from motet_shared.errors import BadRequest

_BATCH = 2**18  # bytes; at most this, and one event more, per `take`
_ASK_EVERY = 2**16  # bytes after which the connection is asked whether they have arrived
_TAIL = 2**16  # bytes kept though arrived: clients may not have read all they received
_HEAD = 128  # bytes of an event that contain its id, which follows its type


class EventNotFound(BadRequest):
    code = "event_not_found"


class LogState(msgspec.Struct, frozen=True):
    """Events that are kept, the number of the first of them, sent or not."""

    first: int
    events: list[bytes]


class EventLog:
    """Log the events of one session in sending order; counts are of all events since the first."""

    def __init__(self, limit: int, count: int = 0):
        """Keep up to `limit` bytes; a client with more in flight cannot get all of it again.

        count: events that an earlier process has sent.
        """
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()  # the most recent events that were sent
        self._waiting_size = self._sent_size = self._unasked = 0  # bytes
        self.count = count  # events that were sent
        self._arrived = count  # of these, events that the client surely has
        self._earlier: dict[int, bytes] = {}  # events of the earlier process, by number
        self._earlier_size = 0  # bytes

    def state(self) -> LogState:
        self._join()
        return LogState(self.count - len(self._sent) + 1, [*self._sent, *self._waiting])

    def resume(self, state: LogState) -> None:
        """Keep the events of a state, of which those up to `count` were sent."""
        for number, event in enumerate(state.events, state.first):
            if number <= self.count:
                self.restore(number, event)
            else:
                self.add((event,))

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        """Return True if no more events may wait for a client."""
        return self._waiting_size >= self._limit

    @property
    def unsure(self) -> bool:
        """Return True, once, when enough was sent to ask what has arrived."""
        if self._unasked < _ASK_EVERY:
            return False
        self._unasked = 0
        return True

    def add(self, events: Iterable[bytes]) -> None:
        for event in events:
            self._waiting.append(event)
            self._waiting_size += len(event)

    def restore(self, number: int, event: bytes) -> None:
        """Keep an event that an earlier process has sent."""
        self._earlier[number] = event
        self._earlier_size += len(event)
        while self._earlier_size > self._limit:
            self._earlier_size -= len(self._earlier.pop(next(iter(self._earlier))))

    def take(self) -> list[bytes]:
        """Return the next events to send, about `_BATCH` bytes at most, and count them as sent."""
        taken: list[bytes] = []
        size = 0
        while self._waiting and size < _BATCH:
            event = self._waiting.popleft()
            taken.append(event)
            size += len(event)
        self._sent += taken
        self._waiting_size -= size
        self._sent_size += size
        self._unasked += size
        self.count += len(taken)
        self._forget()
        return taken

    def arrived(self, count: int) -> None:
        """Note that the client has the first `count` events."""
        self._arrived = max(self._arrived, count)
        self._forget()

    def check(self, after: str | None) -> None:
        """Raise EventNotFound unless `rewind` could go back to `after`."""
        self._place(after)

    def rewind(self, after: str | None) -> None:
        """Continue after the event with this id; None: after the last that has surely arrived.

        Raises EventNotFound if what follows it is not kept any more.
        """
        place = self._place(after)
        for event in [self._sent.pop() for _ in range(self.count - place)]:
            self._waiting.appendleft(event)
        for event in [self._waiting.popleft() for _ in range(place - self.count)]:
            self._sent.append(event)
        self._waiting_size, self._sent_size = (
            sum(map(len, self._waiting)),
            sum(map(len, self._sent)),
        )
        self.count = self._arrived = place
        self._unasked = 0

    def _place(self, after: str | None) -> int:
        """Return the number of events before those to send next."""
        self._join()
        begin = self.count - len(self._sent)
        if after is None:
            if self._arrived < begin:
                raise EventNotFound(
                    "what was sent last is not kept any more; open another session",
                    param="session_id",
                )
            return self._arrived
        marker = b'"event_id":"%s"' % after.encode("ascii", "replace")
        for index, event in enumerate((*self._sent, *self._waiting)):
            if marker in event[:_HEAD]:
                return begin + index + 1
        message = f"event {after[:60]!r} is not among those that are kept; leave `after` out, or open another session"
        raise EventNotFound(message, param="after")

    def _join(self) -> None:
        """Put the events of an earlier process before those of this one."""
        number = self.count - len(self._sent)
        while (event := self._earlier.pop(number, None)) is not None:
            self._sent.appendleft(event)
            self._sent_size += len(event)
            number -= 1
        self._earlier.clear()
        self._earlier_size = 0

    def _forget(self) -> None:
        while self._sent_size > self._limit or (
            self._sent_size > _TAIL and self.count - len(self._sent) < self._arrived
        ):
            self._sent_size -= len(self._sent.popleft())
