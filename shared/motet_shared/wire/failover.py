"""Fail over: continue a stream at another instance when its instance dies, drains or is full.

    moves = Failover(bus, "tts", request.model, outcome, lambda: outcome.samples, patience=5.0)
    while True:
        async with moves as instance:  # a retryable error ends this attempt, any other ends all
            stream = bus.open("tts", request, instance=instance, deadline=moves.left())
            async with stream:
                ...
                return
        request = ...  # what is still to be done

Each pipeline knows how its request is resumed; this module decides only where and how often it is
tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from motet_shared.errors import (
    DeadlineExceeded,
    NoAllowedSite,
    Overloaded,
    StreamBroken,
    Unavailable,
)
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory

from .instances import check_served, pick

MOVES = 6  # most moves of one stream: bounds the damage of a request that kills its instances
RETRY_DELAY = 0.05  # seconds between two attempts
MIN_PROGRESS = 1.0  # seconds after which an endless stream counts as having worked
RETRYABLE = (StreamBroken, Unavailable, Overloaded)


@dataclass(slots=True, kw_only=True)
class StreamMoves:
    """Current instance of a stream, and how many instances it has lost."""

    instance: str | None = None
    moves: int = 0


class EndlessFailover:
    """Retry a stream that lasts as long as its caller wants; a working period renews the patience.

    `patience`: minimum seconds without progress, in which an instance may appear or restart, before
    the last retryable error is raised; longer where its start was measured to take longer. `check`:
    raises if no instance serves the model; by default, if no instance of the role announces it.
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
        self._began = self._now()  # time of this attempt
        self._since = self._began  # time of the last progress

    async def __aenter__(self) -> str:
        """Return the instance to try: the least busy, other than the last if there is a choice."""
        while True:
            try:
                self._check(self._bus.directory)
                patience = self._time_left()
                self.instance = await pick(
                    self._bus, self._role, self._model, avoid=self.instance, patience=patience
                )
                self._began = self._now()
                return self.instance
            except RETRYABLE as error:
                if not await self._wait_to_retry(error):
                    raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return isinstance(error, RETRYABLE) and await self._wait_to_retry(error)

    async def _wait_to_retry(self, error: Exception) -> bool:
        """Return True if there is to be another attempt; wait PAUSE seconds before it."""
        if self._progressed(error):
            self._since = self._now()
        if self._is_final(error) or (self._time_left() <= 0 and not self._is_starting()):
            return False
        await self._bus.clock.sleep(RETRY_DELAY)
        return True

    def _time_left(self) -> float:
        """Return the seconds in which an instance may still appear."""
        presence = self._bus.directory.presence
        return (
            self._since + presence.patience(self._role, self._model, self._patience) - self._now()
        )

    def _is_starting(self) -> bool:
        """Return True to wait beyond the patience, bounded by a deadline alone."""
        return False

    def _progressed(self, error: Exception) -> bool:
        return isinstance(error, StreamBroken) and self._now() - self._began > MIN_PROGRESS

    def _is_final(self, error: Exception) -> bool:
        return isinstance(error, NoAllowedSite)  # `pick` has waited


class Failover(EndlessFailover):
    """Retry a stream with an end, MOVES times at most.

    Overloaded is raised at once unless there was progress. `progress` returns how much has arrived,
    as a number that grows. `outcome` is kept up to date. `deadline`: seconds for all attempts
    together; `what` names the result in the error after it.
    """

    def __init__(
        self,
        bus: Bus,
        role: str,
        model: str,
        outcome: StreamMoves,
        progress: Callable[[], int],
        *,
        patience: float = 5.0,
        deadline: float | None = None,
        what: str = "reply",
        check: Callable[[Directory], None] | None = None,
        behind: tuple[str, ...] = (),
    ):
        """Set up the attempts.

        `behind`: roles that the called role needs for the model; their starts are waited for too.
        """
        super().__init__(bus, role, model, patience=patience, check=check)
        self.instance = outcome.instance
        self._outcome = outcome
        self._progress = progress
        self._known = 0
        self._expires = None if deadline is None else self._now() + deadline
        self._what = what
        self._roles = (role, *behind)

    async def __aenter__(self) -> str:
        try:
            self._outcome.instance = await super().__aenter__()
        except RETRYABLE:
            self.left()
            raise
        return self._outcome.instance

    def left(self) -> float | None:
        """Return the seconds until the deadline, or None without one.

        Raises DeadlineExceeded after it.
        """
        if self._expires is None:
            return None
        left = self._expires - self._now()
        if left <= 0:
            raise DeadlineExceeded(f"the deadline passed before the {self._what} was complete")
        return left

    def _time_left(self) -> float:
        left = super()._time_left()
        return left if self._expires is None else min(left, self._expires - self._now())

    def _is_starting(self) -> bool:
        if self._expires is None or self._now() >= self._expires:
            return False
        return any(self._bus.directory.is_starting(role, self._model) for role in self._roles)

    def _progressed(self, error: Exception) -> bool:
        self._outcome.moves += isinstance(error, StreamBroken)
        before, self._known = self._known, self._progress()
        return self._known > before

    def _is_final(self, error: Exception) -> bool:
        return (
            self._outcome.moves > MOVES
            or isinstance(error, NoAllowedSite)  # `pick` has waited
            or (isinstance(error, Overloaded) and not self._known)
        )
