"""The decoded sound of all files that a process is hearing: bounded, and given up as soon as nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from motet_shared.errors import Cancelled, Overloaded
from motet_shared.sound_file import read_parts

from .engine import Audio


class AudioMemory:
    """`limit`: bytes of decoded sound at a time."""

    def __init__(self, limit: int):
        self.limit = limit
        self.held = 0
        self.lock = threading.Lock()

    @asynccontextmanager
    async def reading(self, data: bytes | memoryview, longest: float) -> AsyncIterator[Audio]:
        """The samples of a file of at most `longest` seconds, for as long as the block runs.

        BadRequest for what cannot be read, Overloaded if there is no room for it. Who leaves ends the decoding.
        """
        room = _Room(self)
        try:
            yield await asyncio.to_thread(_decode, data, longest, room)
        finally:
            room.leave()


class _Room:
    """What one file holds."""

    def __init__(self, memory: AudioMemory):
        self._memory = memory
        self._nbytes = 0
        self._left = False

    def take(self, nbytes: int) -> None:
        memory = self._memory
        with memory.lock:
            if self._left:
                raise Cancelled("nobody waits for this file any more")
            if memory.held + nbytes > memory.limit:
                held = f"{memory.held >> 20} MB of decoded sound are being heard"
                raise Overloaded(f"{held}, at most {memory.limit >> 20} MB can be (audio_memory); try again later")
            memory.held += nbytes
            self._nbytes += nbytes

    def leave(self) -> None:
        with self._memory.lock:
            self._left = True
            self._memory.held -= self._nbytes


def _decode(data: bytes | memoryview, longest: float, room: _Room) -> Audio:
    sound = bytearray()  # it grows without a second copy of it all
    for part in read_parts(data, longest):
        room.take(part.nbytes)
        sound += part.tobytes()
    return np.frombuffer(sound, np.float32)
