"""Decode sound files to one channel, at 16 kHz unless asked, or refuse them with the cause.

For decoding children.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.container import InputContainer
from av.error import FFmpegError
from numpy.typing import NDArray

from motet_shared.errors import BadRequest

from .child import Payload, Task

RATE = 16_000
_SILENT = 20_000  # packets in succession without a sound; each costs time, and counts no seconds
Samples = NDArray[np.float32]
_PART = 30 * RATE  # samples
# Excludes playlists (concat, hls, dash), session descriptions (sdp, rtp) and devices: anything that
# refers to other resources.
SAFE = {
    "format_whitelist": "wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,ogg,amr,amrnb,amrwb,wv,tta,ape,"
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,asf,avi,flv,mpeg,mpegts",
    "protocol_whitelist": "none",
}
_RATES = (1_000, 768_000)  # Hz that a file may claim
# beyond it the power of a spectrum overflows float32; floats scaled like 16-bit samples are far
# below
_LOUDEST = 1e6


def claimed(data: bytes) -> Iterator[Payload]:
    """Yield the seconds that a file's header claims; 0.0 if absent or unreadable.

    Decodes nothing.
    """
    try:
        with _opened(data) as container:
            seconds = max(container.duration or 0, 0) / av.time_base
    except FFmpegError:
        seconds = 0.0
    yield {"seconds": seconds}, b""


def samples(data: bytes, longest: float, rate: int = RATE) -> Iterator[Payload]:
    """Yield float32 samples at `rate` Hz in native byte order, about `_PART` at a time.

    This takes fewer round trips than single packets.
    """
    held: list[Samples] = []
    count = 0
    for part in read_parts(data, longest, rate):
        held.append(part)
        count += len(part)
        if count >= _PART:
            yield {}, np.concatenate(held).tobytes()
            held, count = [], 0
    if count:
        yield {}, np.concatenate(held).tobytes()


def warm() -> None:
    """Decode a WAV file, so that nothing has to be imported later."""
    pcm = bytes(200)
    form = struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)
    head = (
        b"RIFF"
        + struct.pack("<I", 36 + len(pcm))
        + b"WAVEfmt "
        + form
        + b"data"
        + struct.pack("<I", len(pcm))
    )
    list(samples(head + pcm, 1.0))


def read_parts(data: bytes, longest: float, rate: int = RATE) -> Iterator[Samples]:
    """Yield float32 samples in parts as in the file.

    Yields at least one sample, or raises BadRequest (param "file").
    """
    if not len(data):
        raise _refused("it is empty (0 bytes)")
    try:
        with _opened(data) as container:
            _check_track(container)
            if (container.duration or 0) <= longest * av.time_base:
                yield from _read(container, longest, rate)
                return
            _check_claim(container, longest)
        with _opened(data) as container:
            yield from _read(container, longest, rate)
    except FFmpegError as error:
        raise _refused(
            f"it cannot be read as sound ({error.strerror}); send wav, mp3, flac, ogg, m4a or webm"
        ) from None


def _opened(data: bytes) -> InputContainer:
    return av.open(io.BytesIO(data), mode="r", options=dict(SAFE), metadata_errors="ignore")


def _check_track(container: InputContainer) -> None:
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise _refused(f"it has no audio stream (its streams: {kinds})")
    rate = container.streams.audio[0].codec_context.sample_rate
    if not _RATES[0] <= rate <= _RATES[1]:
        raise _refused(
            f"its header claims a rate of {rate} Hz; {_RATES[0]} to {_RATES[1]} are supported"
        )


def _check_claim(container: InputContainer, longest: float) -> None:
    """Refuse a file that really is longer than `longest`, before any of it is kept.

    A file with a long claim may be truncated, so it is decoded to find out.
    """
    seconds = 0.0
    for frame in _frames(container):
        seconds += frame.samples / frame.rate
        if seconds > longest:
            raise _too_long(longest)


def _read(container: InputContainer, longest: float, rate: int) -> Iterator[Samples]:
    count = 0
    for chunk in _chunks(container, rate):
        count += len(chunk)
        if count > longest * rate:
            raise _too_long(longest)
        _check_level(float(np.abs(chunk).max(initial=0.0)))
        yield chunk
    if not count:
        raise _refused("it has no complete sample; it may be truncated, send it again")


def _check_level(peak: float) -> None:
    if not math.isfinite(peak):
        raise _refused("some of its samples are not finite (NaN or infinite)")
    if peak > _LOUDEST:
        raise _refused(f"its samples reach {peak:.3g} where full scale is 1; divide them by that")


def _chunks(container: InputContainer, rate: int) -> Iterator[Samples]:
    """Yield samples of one channel; a file may change its rate or channels midway."""
    resampler, shape = None, None
    for frame in _frames(container):
        if resampler is None or shape != (
            shape := (frame.rate, frame.format.name, frame.layout.name)
        ):
            yield from _resampled(resampler, None)
            resampler = AudioResampler(format="flt", layout="mono", rate=rate)
        yield from _resampled(resampler, frame)
    yield from _resampled(resampler, None)


def _frames(container: InputContainer) -> Iterator[av.AudioFrame]:
    """Yield all intact frames: damaged packets are skipped, a truncated file ends early.

    Raises BadRequest for more than `_SILENT` packets in succession of which none gives a frame.
    """
    silent = 0
    try:
        for packet in container.demux(container.streams.audio[0]):
            silent += 1
            if silent > _SILENT:
                raise _refused(f"{_SILENT} of its packets in succession hold no sound")
            try:
                for frame in packet.decode():
                    silent = 0
                    yield frame
            except FFmpegError:
                continue
    except FFmpegError:
        return


def _resampled(resampler: AudioResampler | None, frame: av.AudioFrame | None) -> Iterator[Samples]:
    """Yield resampled parts; `frame` None flushes the resampler."""
    if resampler is not None:
        for part in resampler.resample(frame):
            yield part.to_ndarray()[0]


def _too_long(longest: float) -> BadRequest:
    return _refused(f"it is longer than {longest:g} s (max_audio); send it in parts")


def _refused(reason: str) -> BadRequest:
    return BadRequest(f"the audio file cannot be transcribed: {reason}", param="file")


TASKS: dict[str, Task] = {"claimed": claimed, "samples": samples}
