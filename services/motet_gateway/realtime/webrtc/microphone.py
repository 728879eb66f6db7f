"""Receive the client's audio track as PCM, at most as fast as time passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from motet_media.audio import pcm_bytes

from .jitter_buffer import JitterBuffer, Packet

_PIECE_MS = 60  # of sound that are given on at a time
_SILENT_AFTER = 1.0  # seconds without a packet that count as silence; less may be a delay
_MOST_SILENCE = 60.0  # seconds; later the client's silence is not heard any more
_SPEED = 1.25  # seconds of sound per second that are accepted for long
_BURST_MS = 3000.0  # of sound that are accepted at once
_MOST_UNREAD_MS = 5000.0  # of sound; more is dropped


class Microphone:
    """Take the place of the jitter buffer in aiortc's receiver, whose own drops lost packets.

    rate: returns the rate of the PCM in Hz, which may change.
    """

    def __init__(self, rate: Callable[[], int], clock: Callable[[], float] = time.monotonic):
        self._rate, self._clock = rate, clock
        self._buffer = JitterBuffer(rate())
        self._heard = False
        self._pcm = bytearray()
        self._enough = asyncio.Event()
        self._allowed_ms, self._since = _BURST_MS, clock()
        self.dropped = 0  # packets beyond what is accepted

    @property
    def lost(self) -> int:
        """Return how many packets were recovered or concealed."""
        return self._buffer.lost

    def add(self, packet: Packet) -> tuple[bool, None]:
        """Receive a packet; returns what aiortc expects of a buffer that completes no frame."""
        if self._buffer.rate != (rate := self._rate()):
            self._buffer = JitterBuffer(rate)
            self._pcm.clear()
        if self._accept(self._buffer.duration_ms(packet)):
            self._heard = True
            self._pcm += self._buffer.push(packet)
            if len(self._pcm) >= self._bytes(_PIECE_MS):
                self._enough.set()
        else:
            self.dropped += 1
        return False, None

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the sound as it arrives, and silence while the client sends nothing."""
        silent = 0.0
        while True:
            try:
                async with asyncio.timeout(_SILENT_AFTER):
                    await self._enough.wait()
                silent = 0.0
            except TimeoutError:
                silent += _SILENT_AFTER
                if not self._heard or silent > _MOST_SILENCE:
                    continue
                self._pcm += self._buffer.pause(_SILENT_AFTER * 1000)
            piece, self._pcm = bytes(self._pcm), bytearray()
            self._enough.clear()
            if piece:
                yield piece

    def _accept(self, ms: float) -> bool:
        now = self._clock()
        earned = (now - self._since) * 1000 * _SPEED
        self._allowed_ms, self._since = min(_BURST_MS, self._allowed_ms + earned), now
        if ms > self._allowed_ms or len(self._pcm) > self._bytes(_MOST_UNREAD_MS):
            return False
        self._allowed_ms -= ms
        return True

    def _bytes(self, ms: float) -> int:
        return pcm_bytes(ms, self._buffer.rate)
