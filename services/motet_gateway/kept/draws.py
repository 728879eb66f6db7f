"""Draw ids, seeds and the time of a request so that another process draws the same.

Behind no descriptor store they are random; behind one they are derived from the secret of the
connection, and the time is journaled. The request is that of the current task.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from motet_pipelines.draws import current, randbits, token_hex, use

__all__ = ["Draws", "now", "randbits", "token_hex", "use"]


class Draws:
    """The draws of one request: the request `number` of a connection with this secret.

    `time`: returns the Unix time at which the request was first served, in seconds.
    """

    def __init__(self, secret: bytes, number: int, time: Callable[[], int]):
        self._key, self._number, self.time = secret, number, time
        self.drawn = 0  # without a name

    def bytes(self, size: int, name: str = "") -> bytes:
        """Return the next `size` bytes, 64 at most, or those of a name."""
        if name:
            text = b"%d:%b" % (self._number, name.encode())
        else:
            self.drawn += 1
            text = b"%d.%d" % (self._number, self.drawn)
        return hashlib.blake2b(text, key=self._key, digest_size=size).digest()


def now() -> int:
    """Return the Unix time of the request in whole seconds."""
    draws = current()
    return draws.time() if isinstance(draws, Draws) else int(time.time())
