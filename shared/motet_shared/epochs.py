"""Epochs: which work of a realtime session is out of date.

A session numbers the replies that write its conversation, and everything that is opened for one of them carries its
`Epoch`, from the gateway through the tokenizer to decode. Whoever interrupts a reply cancels its streams; the epoch is
the fence behind that cancel: a worker that sees a newer reply of the same session ends what it still does for older
ones, and refuses what comes late for them, whichever process opened it and whatever became of the cancel.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

REMEMBERED = 8192  # sessions; the one that was silent for longest is forgotten first


class Epoch(NamedTuple):
    """A reply of a session. Without a session it is work that no other work makes out of date."""

    session: str = ""
    number: int = 0


NO_EPOCH = Epoch()


class Epochs:
    """The newest epoch of each session that a process has seen."""

    def __init__(self, most: int = REMEMBERED):
        self._most = most
        self._newest: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._newest)

    def newest(self, session: str) -> int:
        """0 for a session that is not known."""
        return self._newest.get(session, 0)

    def note(self, epoch: Epoch) -> bool:
        """Take notice of work. True if it is the first of its epoch, so that older work of its session is over."""
        if not epoch.session or epoch.number < self.newest(epoch.session):
            return False
        is_first = epoch.number > self.newest(epoch.session)
        self._newest[epoch.session] = epoch.number
        self._newest.move_to_end(epoch.session)
        if len(self._newest) > self._most:
            self._newest.popitem(last=False)
        return is_first

    def is_over(self, epoch: Epoch) -> bool:
        """Whether a newer reply of its session has begun."""
        return bool(epoch.session) and epoch.number < self.newest(epoch.session)
