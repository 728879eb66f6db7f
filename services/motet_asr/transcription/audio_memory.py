"""Bound the decoded audio of all files in progress; free it as soon as its caller leaves."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from motet_asr.engine.engine import Audio
from motet_media.pool import decoding
from motet_media.sound_file import read_parts
from motet_shared.errors import Cancelled, Overloaded


class AudioMemory:
    """Account for the decoded audio of all files.

    limit: most bytes at a time.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.held = 0
        self.lock = threading.Lock()

    @asynccontextmanager
    async def reading(self, data: bytes | memoryview, longest: float) -> AsyncIterator[Audio]:
        """Decode a file of at most `longest` seconds and hold its samples while the block runs.

        Raises BadRequest for unreadable files and Overloaded if there is no room. Leaving the block
        ends the decoding.
        """
        reservation = _Reservation(self)
        try:
            yield await decoding(_decode, data, longest, reservation)
        finally:
            reservation.release()


class _Reservation:
    """Account for the bytes that one file holds."""

    def __init__(self, memory: AudioMemory):
        self._memory = memory
        self._nbytes = 0
        self._released = False

    def reserve(self, nbytes: int) -> None:
        memory = self._memory
        with memory.lock:
            if self._released:
                raise Cancelled("the caller of this file has left")
            if memory.held + nbytes > memory.limit:
                message = f"{memory.held >> 20} MB of decoded audio are held"
                raise Overloaded(
                    f"{message}, at most {memory.limit >> 20} MB can be (audio_memory); try again later"
                )
            memory.held += nbytes
            self._nbytes += nbytes

    def release(self) -> None:
        with self._memory.lock:
            self._released = True
            self._memory.held -= self._nbytes


def _decode(data: bytes | memoryview, longest: float, reservation: _Reservation) -> Audio:
    sound = bytearray()  # grows in place, without a second copy of everything
    for part in read_parts(data, longest):
        reservation.reserve(part.nbytes)
        sound += part.tobytes()
    return np.frombuffer(sound, np.float32)
