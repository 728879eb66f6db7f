"""What a session says, from when it is said until its client surely has it: from there a client can be told again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from motet_shared.errors import BadRequest

_BATCH = 2**18  # bytes; most that is handed out in one go
_ASK_EVERY = 2**16  # bytes, after which the client is asked whether they have arrived
_TAIL = 2**16  # bytes that stay although they have arrived: clients may have received more than they have read
_HEAD = 128  # bytes of an event in which its id stands, behind its type


class EventNotFound(BadRequest):
    code = "event_not_found"


class EventLog:
    """Events of one session, in the order in which they go out. Counts are of all events since the first."""

    def __init__(self, limit: int):
        """`limit`: bytes; a client that has more than this on its way cannot have all of it again."""
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()  # the last of those that went out
        self._waiting_size = self._sent_size = self._unasked = 0  # bytes
        self.count = 0  # of those that went out
        self._arrived = 0  # of those, the ones that the client surely has

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        """Whether no more may be put off until there is a client again."""
        return self._waiting_size >= self._limit

    @property
    def unsure(self) -> bool:
        """Whether so much has gone out that it is time to ask what has arrived. Says so once."""
        if self._unasked < _ASK_EVERY:
            return False
        self._unasked = 0
        return True

    def add(self, events: Iterable[bytes]) -> None:
        for event in events:
            self._waiting.append(event)
            self._waiting_size += len(event)

    def take(self) -> list[bytes]:
        """The next ones to go out."""
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
        """The client has the first `count` events."""
        self._arrived = max(self._arrived, count)
        self._forget()

    def check(self, after: str | None) -> None:
        """EventNotFound unless `rewind` could do it."""
        self._place(after)

    def rewind(self, after: str | None) -> None:
        """Go on behind the event with this id; None: behind the last that has surely arrived.

        EventNotFound if what follows it is not here any more.
        """
        place = self._place(after)
        for event in [self._sent.pop() for _ in range(self.count - place)]:
            self._waiting.appendleft(event)
        for event in [self._waiting.popleft() for _ in range(place - self.count)]:
            self._sent.append(event)
        self._waiting_size, self._sent_size = sum(map(len, self._waiting)), sum(map(len, self._sent))
        self.count = self._arrived = place
        self._unasked = 0

    def _place(self, after: str | None) -> int:
        """How many events come before those that are to go out next."""
        begin = self.count - len(self._sent)
        if after is None:
            if self._arrived < begin:
                raise EventNotFound("what was sent last is not kept any more; open another session", param="session_id")
            return self._arrived
        marker = b'"event_id":"%s"' % after.encode("ascii", "replace")
        for index, event in enumerate((*self._sent, *self._waiting)):
            if marker in event[:_HEAD]:
                return begin + index + 1
        message = f"event {after[:60]!r} is not among those that are kept; leave `after` out, or open another session"
        raise EventNotFound(message, param="after")

    def _forget(self) -> None:
        while self._sent_size > self._limit or (
            self._sent_size > _TAIL and self.count - len(self._sent) < self._arrived
        ):
            self._sent_size -= len(self._sent.popleft())
