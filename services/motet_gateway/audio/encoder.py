"""Encode speech incrementally in the client's format: PCM in, bytes out that can be played at once.

The gateway encodes, not the speech service: a stream that fails over to another instance continues
in the same file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import av
from av.audio.stream import AudioStream

from motet_gateway.kept import draws
from motet_media.audio import SAMPLE_BYTES, Resampler, a_law_encode, mu_law_encode, wav_header

RATE = 24_000  # Hz of the PCM input
G711_RATE = 8_000


class Encoder(Protocol):
    """Encode PCM to `content_type`.

    `heavy`: encoding is slow and belongs on a thread of its own.
    """

    content_type: str
    heavy: bool

    def push(self, pcm: bytes) -> bytes:
        """Return the bytes that these samples complete; the first call includes the header."""

    def finish(self) -> bytes:
        """Return the remaining bytes."""


class Pcm:
    content_type = "audio/pcm"
    heavy = False

    def push(self, pcm: bytes) -> bytes:
        return pcm

    def finish(self) -> bytes:
        return b""


class Wav:
    """Write WAV with a header that leaves the length open, as players accept it from a pipe."""

    content_type = "audio/wav"
    heavy = False

    def __init__(self) -> None:
        self._header = wav_header(RATE)

    def push(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm

    def finish(self) -> bytes:
        return self.push(b"")


_G711 = {"pcmu": "audio/PCMU", "pcma": "audio/PCMA"}


class G711:
    """Encode G.711 at 8 kHz, one byte per sample, without a header."""

    heavy = True

    def __init__(self, law: str) -> None:
        self.content_type = _G711[law]
        self._encode = mu_law_encode if law == "pcmu" else a_law_encode
        self._resampler = Resampler(RATE, G711_RATE)

    def push(self, pcm: bytes) -> bytes:
        return self._encode(self._resampler.feed(pcm))

    def finish(self) -> bytes:
        return self._encode(self._resampler.flush())


@dataclass(frozen=True)
class FFmpegSettings:
    """FFmpeg settings of a format; nothing may be held back, no header rewritten at the end."""

    content_type: str
    container: str
    codec: str
    bit_rate: int = 0
    options: tuple[tuple[str, str], ...] = ()


_FFMPEG = {
    "mp3": FFmpegSettings(
        "audio/mpeg", "mp3", "libmp3lame", 64_000, (("write_xing", "0"), ("id3v2_version", "0"))
    ),
    "opus": FFmpegSettings("audio/ogg", "ogg", "libopus", 32_000, (("page_duration", "20000"),)),
    "aac": FFmpegSettings("audio/aac", "adts", "aac", 64_000),
    "flac": FFmpegSettings("audio/flac", "flac", "flac"),
}
FORMATS = (*_FFMPEG, "wav", "pcm", *_G711)


def content_types() -> list[str]:
    """Return the content types of all formats."""
    coded = [coding.content_type for coding in _FFMPEG.values()]
    return [*coded, Wav.content_type, Pcm.content_type, *_G711.values()]


class FFmpegEncoder:
    """Encode with FFmpeg through PyAV."""

    heavy = True

    def __init__(self, coding: FFmpegSettings) -> None:
        self.content_type = coding.content_type
        self._sink = _Sink()
        options = {"flush_packets": "1", **dict(coding.options)}
        if coding.container == "ogg":
            # FFmpeg would draw the serial number itself; another gateway has to draw the same.
            options |= {"fflags": "+bitexact", "serial_offset": str(draws.randbits(31))}
        self._container = av.open(self._sink, "w", format=coding.container, options=options)
        stream = self._container.add_stream(coding.codec, rate=RATE, layout="mono")
        assert isinstance(stream, AudioStream)
        self._stream = stream
        if coding.bit_rate:
            stream.bit_rate = coding.bit_rate
        self._samples = 0

    def push(self, pcm: bytes) -> bytes:
        count = len(pcm) // SAMPLE_BYTES
        if count:
            frame = av.AudioFrame(format="s16", layout="mono", samples=count)
            frame.sample_rate = RATE
            frame.pts = self._samples
            memoryview(frame.planes[0]).cast("B")[: len(pcm)] = pcm
            self._samples += count
            self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def finish(self) -> bytes:
        if self._samples:
            self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()


class _Sink:
    """Collect written bytes; without `seek`, FFmpeg knows that it cannot go back."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data, self._parts = b"".join(self._parts), []
        return data


def make_encoder(audio_format: str) -> Encoder:
    """Return a new encoder for one of `FORMATS`."""
    if audio_format == "pcm":
        return Pcm()
    if audio_format == "wav":
        return Wav()
    if audio_format in ("pcmu", "pcma"):
        return G711(audio_format)
    return FFmpegEncoder(_FFMPEG[audio_format])
