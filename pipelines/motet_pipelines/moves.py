"""Moves: a stream goes on at another instance when the one that serves it dies, drains or is full.

    moves = Moves(bus, "tts", request.model, outcome, lambda: outcome.samples, patience=5.0)
    while True:
        async with moves as instance:  # a retryable error ends this attempt, any other one ends them all
            stream = bus.open("tts", request, instance=instance, deadline=moves.left())
            async with stream:
                ...
                return
        request = ...  # what is still to be done

How a request is resumed is known to its pipeline alone; this is only where and how often it is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from motet_shared.bus import Bus
from motet_shared.discovery import Directory
from motet_shared.errors import DeadlineExceeded, Overloaded, StreamBroken, Unavailable

from .instances import check_served, pick

MOVES = 6  # of one stream: bounds what a request that kills its instances can do
PAUSE = 0.05  # seconds between two attempts
LASTED = 1.0  # seconds after which an endless stream that breaks had been working
RETRYABLE = (StreamBroken, Unavailable, Overloaded)


@dataclass(slots=True, kw_only=True)
class Moved:
    """Where a stream is, and how often it was lost."""

    instance: str | None = None
    moves: int = 0


class EndlessMoves:
    """Attempts at a stream that lasts as long as its caller wants: one that worked for a while renews the patience.

    `patience`: seconds without progress, in which an instance may appear or restart, before the last retryable error
    is raised. `check`: raises if nobody serves the model; by default, if no instance of the role announces it.
    """

    def __init__(
        self,
        bus: Bus,
        role: str,
        model: str,
        *,
        patience: float = 5.0,
        check: Callable[[Directory], None] | None = None,
    ):
        self.instance: str | None = None
        self._bus, self._role, self._model = bus, role, model
        self._check = check or partial(check_served, role=role, model=model)
        self._now = bus.clock.now
        self._patience = patience
        self._began = self._now()  # of this attempt
        self._give_up = self._began + patience

    async def __aenter__(self) -> str:
        """The instance to try now: the least busy one, another one than the last if there is a choice."""
        while True:
            try:
                self._check(self._bus.directory)
                patience = self._give_up - self._now()
                self.instance = await pick(self._bus, self._role, self._model, avoid=self.instance, patience=patience)
                self._began = self._now()
                return self.instance
            except RETRYABLE as error:
                if not await self._bear(error):
                    raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, RETRYABLE) and await self._bear(error)

    async def _bear(self, error: Exception) -> bool:
        """Whether there is to be another attempt; waits a moment before it."""
        if self._progressed(error):
            self._give_up = self._now() + self._patience
        if self._now() >= self._give_up or self._hopeless(error):
            return False
        await self._bus.clock.sleep(PAUSE)
        return True

    def _progressed(self, error: Exception) -> bool:
        return isinstance(error, StreamBroken) and self._now() - self._began > LASTED

    def _hopeless(self, error: Exception) -> bool:
        return False


class Moves(EndlessMoves):
    """Attempts at a stream with an end: MOVES at most; Overloaded is raised at once unless there was progress.

    `progress` tells how much has arrived, as a number that grows. `outcome` is kept up to date. `deadline`: seconds for
    all attempts together; `what` it is that has to be complete then.
    """

    def __init__(
        self,
        bus: Bus,
        role: str,
        model: str,
        outcome: Moved,
        progress: Callable[[], int],
        *,
        patience: float = 5.0,
        deadline: float | None = None,
        what: str = "reply",
        check: Callable[[Directory], None] | None = None,
    ):
        super().__init__(bus, role, model, patience=patience, check=check)
        self.instance = outcome.instance
        self._outcome = outcome
        self._progress = progress
        self._known = 0
        self._expires = None if deadline is None else self._now() + deadline
        self._what = what

    async def __aenter__(self) -> str:
        self._outcome.instance = await super().__aenter__()
        return self._outcome.instance

    def left(self) -> float | None:
        """Seconds until the deadline; DeadlineExceeded after it."""
        if self._expires is None:
            return None
        left = self._expires - self._now()
        if left <= 0:
            raise DeadlineExceeded(f"the deadline passed before the {self._what} was complete")
        return left

    def _progressed(self, error: Exception) -> bool:
        self._outcome.moves += isinstance(error, StreamBroken)
        before, self._known = self._known, self._progress()
        return self._known > before

    def _hopeless(self, error: Exception) -> bool:
        return self._outcome.moves > MOVES or (isinstance(error, Overloaded) and not self._known)
