"""Draw ids, seeds and the time of a request so that another process draws the same.

Behind no descriptor store they are random; behind one they are derived from the secret of the
connection, and the time is journaled. The request is that of the current task.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar


class Draws:
    """The draws of one request: the request `number` of a connection with this secret.

    `time`: returns the Unix time at which the request was first served, in seconds.
    """

    def __init__(self, secret: bytes, number: int, time: Callable[[], int]):
        self._key, self._number, self.time = secret, number, time
        self._drawn = 0

    def bytes(self, size: int) -> bytes:
        """Return the next `size` bytes, 64 at most."""
        self._drawn += 1
        text = b"%d.%d" % (self._number, self._drawn)
        return hashlib.blake2b(text, key=self._key, digest_size=size).digest()


_current: ContextVar[Draws | None] = ContextVar("draws", default=None)
use = _current.set


def token_hex(size: int) -> str:
    """Return `size` random bytes as hexadecimal digits."""
    draws = _current.get()
    return secrets.token_hex(size) if draws is None else draws.bytes(size).hex()


def randbits(count: int) -> int:
    """Return a random number of at most `count` bits, 64 at most."""
    draws = _current.get()
    if draws is None:
        return secrets.randbits(count)
    return int.from_bytes(draws.bytes(8)) >> (64 - count)


def now() -> int:
    """Return the Unix time of the request in whole seconds."""
    draws = _current.get()
    return int(time.time()) if draws is None else draws.time()
