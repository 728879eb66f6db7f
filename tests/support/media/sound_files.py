"""Make sound files of all kinds and kinds of damage."""

from __future__ import annotations

import io
import struct
from typing import Any

import av
import numpy as np

from support.checkpoints.asr_checkpoints import RATE

LOSSY = {
    "mp3": ("mp3", "libmp3lame"),
    "ogg": ("ogg", "libopus"),
    "m4a": ("mp4", "aac"),
    "webm": ("webm", "libopus"),
}
EXACT = {"flac": ("flac", "flac"), "wav": ("wav", "pcm_s16le")}
_FLOAT, _MU_LAW = 3, 7  # formats in a WAV header


def tone(seconds: float = 2.0, rate: int = RATE, pitch: float = 440.0) -> Any:
    return (0.4 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(
        np.float32
    )


def encoded(sound: Any, container: str, codec: str, rate: int = RATE, channels: int = 1) -> bytes:
    """Return a file of a container and codec."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=rate)
        stream.layout = "mono" if channels == 1 else "stereo"
        pcm = np.repeat((sound * 32767).astype("<i2")[None], channels, axis=0)
        frame = av.AudioFrame.from_ndarray(pcm.T.reshape(1, -1).copy(), "s16", stream.layout.name)
        frame.rate = rate
        resampler = av.AudioResampler(
            stream.format, stream.layout, rate, frame_size=stream.frame_size or None
        )
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def picture() -> bytes:
    """Return a video without sound track."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        for _ in range(3):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def float_wav(sound: Any, rate: int = RATE) -> bytes:
    """Return a WAV file of 32-bit floats, unchanged."""
    data = np.asarray(sound, "<f4").tobytes()
    return _header(_FLOAT, rate, 32, len(data)) + data


def hours_of_wav(hours: float, rate: int = 1000) -> bytes:
    """Return mu-law silence, a byte per sample."""
    data = b"\xff" * round(hours * 3600 * rate)
    return _header(_MU_LAW, rate, 8, len(data)) + data


def _header(kind: int, rate: int, bits: int, nbytes: int) -> bytes:
    width = bits // 8
    form = struct.pack("<IHHIIHH", 16, kind, 1, rate, rate * width, width, bits)
    return (
        b"RIFF"
        + struct.pack("<I", 36 + nbytes)
        + b"WAVEfmt "
        + form
        + b"data"
        + struct.pack("<I", nbytes)
    )


def claiming(data: bytes, rate: int) -> bytes:
    """Return a WAV file whose header has another rate than the sound."""
    return data[:24] + struct.pack("<II", rate, min(rate * 2, 2**32 - 1)) + data[32:]


def without_serial(ogg: bytes) -> Any:
    """The pages of a file without the serial number of their stream, which is drawn, and the checksum over it."""
    head, *pages = ogg.split(b"OggS")
    assert not head
    assert len({page[10:14] for page in pages}) == 1
    return [page[:10] + page[14:18] + page[22:] for page in pages]
