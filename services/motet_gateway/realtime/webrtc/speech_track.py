"""Send speech as an audio track: an Opus packet every 20 ms, silence included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import Packet

from motet_pipelines.voice.speak import RATE

from .opus import FRAME_MS, Encoder

_CLOCK = 48_000  # Hz of Opus' timestamps
_TICKS = _CLOCK * FRAME_MS // 1000
_TIME_BASE = Fraction(1, _CLOCK)
_LATE = 0.2  # seconds; a later clock starts anew instead of hurrying


class SpeechTrack(MediaStreamTrack):
    """Encode the frames of `frame`, which takes their size in bytes, at the pace of the clock."""

    kind = "audio"

    def __init__(self, frame: Callable[[int], bytes]) -> None:
        super().__init__()
        self._frame = frame
        self._encoder = Encoder(RATE)
        self._due: float | None = None  # of the loop's clock
        self._pts = 0

    async def recv(self) -> Packet[Any]:
        """Return the next packet when it is due. Raises MediaStreamError after the end."""
        if self.readyState != "live":
            raise MediaStreamError
        now = asyncio.get_running_loop().time()
        if self._due is None or now - self._due > _LATE:
            self._due = now
        await asyncio.sleep(self._due - now)
        self._due += FRAME_MS / 1000
        packet = Packet(self._encoder.encode(self._frame(self._encoder.frame_bytes)))
        packet.pts, packet.time_base = self._pts, _TIME_BASE
        self._pts += _TICKS
        return packet
