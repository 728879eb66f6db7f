"""Detect work of a realtime session that is out of date.

A session numbers the replies that write its conversation, and every stream that is opened for a
reply carries its `Epoch`, from the gateway through the tokenizer to decode. An interrupted reply
has its streams cancelled; the epoch is the fence behind that cancel: a worker that sees a newer
reply of the same session ends its work for older ones and refuses late opens for them, whichever
process opened them and whether or not the cancel arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

REMEMBERED = 8192  # sessions; the least recently used is evicted


class Epoch(NamedTuple):
    """Number of a reply within a session; work without a session never becomes out of date."""

    session: str = ""
    number: int = 0


NO_EPOCH = Epoch()


class Epochs:
    """Track the newest epoch of each session that this process has seen."""

    def __init__(self, most: int = REMEMBERED):
        self._most = most
        self._newest: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._newest)

    def newest(self, session: str) -> int:
        """Return the newest epoch of a session, 0 if the session is unknown."""
        return self._newest.get(session, 0)

    def note(self, epoch: Epoch) -> bool:
        """Record the epoch of new work; return True if it is the newest of its session so far."""
        if not epoch.session or epoch.number < max(self.newest(epoch.session), 1):
            return False  # 0 is what an unknown session has
        is_first = epoch.number > self.newest(epoch.session)
        self._newest[epoch.session] = epoch.number
        self._newest.move_to_end(epoch.session)
        if len(self._newest) > self._most:
            self._newest.popitem(last=False)
        return is_first

    def is_over(self, epoch: Epoch) -> bool:
        """Return True if a newer reply of the session has begun."""
        return bool(epoch.session) and epoch.number < self.newest(epoch.session)
