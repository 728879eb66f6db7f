"""Defer the charge of a request until it is known whether another attempt of it is charged."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token

from .buckets import Hold


class Deferral:
    """Keep what the tickets of a request hold, within its block, until `settle` or `cancel`.

    Until then the amounts stay held; after `trim`, those that were used.
    """

    def __init__(self) -> None:
        self._holds: list[Hold] = []
        self._token: Token[Deferral | None] | None = None

    def __enter__(self) -> Deferral:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)

    def trim(self) -> None:
        """Give back what was not used; what was used stays held."""
        for hold in self._holds:
            hold.trim()

    def settle(self) -> None:
        """Charge what was used. A second call does nothing."""
        for hold in self._holds:
            hold.settle()
        self._holds.clear()

    def cancel(self) -> None:
        """Charge nothing: another attempt is charged."""
        for hold in self._holds:
            hold.use(-hold.used)
        self.settle()

    def add(self, holds: Sequence[Hold]) -> None:
        """Keep what a ticket holds."""
        self._holds += [hold for hold in holds if hold not in self._holds]


_current: ContextVar[Deferral | None] = ContextVar("deferral", default=None)
current = _current.get
