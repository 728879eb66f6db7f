"""Draw ids and seeds so that a process that goes on with the request of another one draws the same.

A process that keeps a request beyond its death sets a `Source` for its tasks with `use`; elsewhere
they are random.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from typing import Protocol


class Source(Protocol):
    """Describe what draws in place of chance."""

    def bytes(self, size: int, name: str = "") -> bytes:
        """Return `size` bytes, 64 at most: those of this name, or the next ones without a name."""


_current: ContextVar[Source | None] = ContextVar("draws", default=None)
use = _current.set


def current() -> Source | None:
    """Return the source of the current task; None: chance."""
    return _current.get()


def token_hex(size: int, name: str = "") -> str:
    """Return `size` random bytes as hexadecimal digits.

    name: unique among the draws of a request whose tasks draw in no fixed order.
    """
    source = _current.get()
    return secrets.token_hex(size) if source is None else source.bytes(size, name).hex()


def randbits(count: int, name: str = "") -> int:
    """Return a random number of at most `count` bits, 64 at most; `name` as in `token_hex`."""
    source = _current.get()
    if source is None:
        return secrets.randbits(count)
    return int.from_bytes(source.bytes(8, name)) >> (64 - count)
