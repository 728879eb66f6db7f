"""Turn the RTP packets of an Opus stream into continuous sound, whatever was lost or delayed.

For a recognizer no playout clock is needed: packets in order are decoded as they arrive, and a
missing one is waited for while few others overtake it. A lost packet is recovered from the copy in
its successor (RFC 6716, section 2.1.7), or concealed.
"""

from __future__ import annotations

from typing import Protocol

from motet_media.audio import SAMPLE_BYTES

from .opus import FRAME_MS, Decoder

OVERTAKING = 4  # later packets after whose arrival a missing one counts as lost
_RTP_RATE = 48_000  # Hz of Opus' timestamps (RFC 7587, section 4.1)
_FAR = 100  # packets; a longer jump is another stream
_LONGEST_GAP_MS = 500  # of silence that one packet may stand for
_SEQUENCES, _TIMESTAMPS = 1 << 16, 1 << 32


class Packet(Protocol):
    """Describe what is needed of an RTP packet."""

    @property
    def ssrc(self) -> int: ...

    @property
    def sequence_number(self) -> int: ...

    @property
    def timestamp(self) -> int:
        """Return the time of its first sample, in units of 1/48000 s."""

    @property
    def payload(self) -> bytes: ...


class JitterBuffer:
    """Decode one stream. `rate`: of the PCM, in Hz."""

    def __init__(self, rate: int):
        self.rate = rate
        self.lost = 0  # packets that were recovered or concealed
        self._begin(None)

    def _begin(self, ssrc: int | None) -> None:
        self._ssrc = ssrc
        self._decoder = Decoder(self.rate)
        self._waiting: dict[int, Packet] = {}
        self._next = 0  # sequence number
        self._expected = 0  # timestamp of what follows the sound so far
        self._frame = self.rate * FRAME_MS // 1000  # samples of the last packet

    def duration_ms(self, packet: Packet) -> float:
        """Return how much sound a packet has; 0 if it is not Opus."""
        return self._decoder.samples_of(packet.payload) * 1000 / self.rate

    def push(self, packet: Packet) -> bytes:
        """Return the PCM that a packet completes."""
        ahead = (packet.sequence_number - self._next) % _SEQUENCES
        behind = _SEQUENCES - ahead
        if packet.ssrc != self._ssrc or min(ahead, behind) > _FAR:
            self._begin(packet.ssrc)
            self._next, self._expected = packet.sequence_number, packet.timestamp
        elif behind <= _FAR:
            return b""  # too late, or a second copy
        self._waiting[packet.sequence_number] = packet
        return self._take(OVERTAKING)

    def pause(self, ms: float) -> bytes:
        """Return silence for a time in which nothing arrived, behind what was waited for."""
        rest = self._take(1)
        samples = round(ms * self.rate / 1000)
        self._advance(samples)
        return rest + bytes(samples * SAMPLE_BYTES)

    def _take(self, overtaking: int) -> bytes:
        """Return the sound up to a packet that is missing and not yet given up."""
        parts: list[bytes] = []
        while self._waiting:
            packet = self._waiting.pop(self._next, None)
            if packet is not None:
                parts.append(self._decode(packet))
            elif max(map(self._ahead, self._waiting)) >= overtaking:
                parts.append(self._replace())
            else:
                break
            self._next = (self._next + 1) % _SEQUENCES
        return b"".join(parts)

    def _ahead(self, number: int) -> int:
        return (number - self._next) % _SEQUENCES

    def _decode(self, packet: Packet) -> bytes:
        gap = (packet.timestamp - self._expected) % _TIMESTAMPS
        gap_ms = gap * 1000 / _RTP_RATE if gap < _TIMESTAMPS // 2 else 0.0
        silence = round(min(gap_ms, _LONGEST_GAP_MS) * self.rate / 1000) * SAMPLE_BYTES
        try:
            pcm = self._decoder.decode(packet.payload)
        except ValueError:
            pcm = self._decoder.conceal(self._frame)
        self._frame = len(pcm) // SAMPLE_BYTES or self._frame
        self._expected = packet.timestamp
        self._advance(self._frame)
        return bytes(silence) + pcm

    def _replace(self) -> bytes:
        """Return sound in place of the packet that comes next, which is lost."""
        self.lost += 1
        self._advance(self._frame)
        following = self._waiting.get((self._next + 1) % _SEQUENCES)
        try:
            if following is not None:
                return self._decoder.recover(following.payload, self._frame)
        except ValueError:
            pass
        return self._decoder.conceal(self._frame)

    def _advance(self, samples: int) -> None:
        self._expected = (self._expected + samples * _RTP_RATE // self.rate) % _TIMESTAMPS
