"""Any sound file that FFmpeg reads, as one channel at 16 kHz; or an error that says what is wrong with it.

For services whose extra brings `av` and numpy: nothing else in this package imports it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.container import InputContainer
from av.error import FFmpegError
from numpy.typing import NDArray

from .errors import BadRequest

RATE = 16_000
Samples = NDArray[np.float32]
_RATES = (1_000, 768_000)  # Hz that a file may claim
_LOUDEST = 1e6  # beyond it the power of a spectrum is no float32; floats that count like 16-bit samples are far below


def claimed_seconds(data: bytes | memoryview) -> float:
    """How long a file says that it is; 0.0 if it does not say, or cannot be read. Blocks, but decodes nothing."""
    try:
        with _opened(data) as container:
            return max(container.duration or 0, 0) / av.time_base
    except FFmpegError:
        return 0.0


def read_audio(data: bytes | memoryview, longest: float) -> Samples:
    """Samples in float32, full scale is [-1, 1]. Blocks: for a thread.

    A file that breaks off gives what is whole. BadRequest (param "file") for what is empty, no sound, without a sample,
    or longer than `longest` seconds; that is noticed without decoding more.
    """
    return np.concatenate(list(read_parts(data, longest)))


def read_blocks(data: bytes | memoryview, longest: float, size: int) -> Iterator[Samples]:
    """As `read_audio`, `size` samples at a time and the rest at the end: a long file need not be held as a whole."""
    held: list[Samples] = []
    count = 0
    for part in read_parts(data, longest):
        held.append(part)
        count += len(part)
        if count >= size:
            whole = np.concatenate(held)
            for start in range(0, count - count % size, size):
                yield whole[start : start + size]
            held, count = [whole[count - count % size :]], count % size
    if count:
        yield np.concatenate(held)


def read_parts(data: bytes | memoryview, longest: float) -> Iterator[Samples]:
    """As `read_audio`, in parts as the file has them; at least one sample, or BadRequest."""
    if not len(data):
        raise _refused("it is empty (0 bytes)")
    try:
        with _opened(data) as container:
            _check_track(container)
            if (container.duration or 0) <= longest * av.time_base:
                yield from _read(container, longest)
                return
            _check_claim(container, longest)
        with _opened(data) as container:
            yield from _read(container, longest)
    except FFmpegError as error:
        raise _refused(
            f"it cannot be read as sound ({error.strerror}); send wav, mp3, flac, ogg, m4a or webm"
        ) from None


def _opened(data: bytes | memoryview) -> InputContainer:
    return av.open(io.BytesIO(data), mode="r", metadata_errors="ignore")


def _check_track(container: InputContainer) -> None:
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise _refused(f"it has no sound track (it holds: {kinds})")
    rate = container.streams.audio[0].codec_context.sample_rate
    if not _RATES[0] <= rate <= _RATES[1]:
        raise _refused(f"its header claims a rate of {rate} Hz; {_RATES[0]} to {_RATES[1]} are possible")


def _check_claim(container: InputContainer, longest: float) -> None:
    """Refuse a file that is as long as it claims, before anything of it is kept; it may have broken off, too."""
    seconds = 0.0
    for frame in _frames(container):
        seconds += frame.samples / frame.rate
        if seconds > longest:
            raise _too_long(longest)


def _read(container: InputContainer, longest: float) -> Iterator[Samples]:
    count = 0
    for chunk in _chunks(container):
        count += len(chunk)
        if count > longest * RATE:
            raise _too_long(longest)
        _check_level(float(np.abs(chunk).max(initial=0.0)))
        yield chunk
    if not count:
        raise _refused("there is not one whole sample in it; was it cut off?")


def _check_level(peak: float) -> None:
    if not math.isfinite(peak):
        raise _refused("some of its samples are no numbers (NaN or infinite)")
    if peak > _LOUDEST:
        raise _refused(f"its samples reach {peak:.3g} where full scale is 1; divide them by that")


def _chunks(container: InputContainer) -> Iterator[Samples]:
    """Samples of one channel. A file may change its rate or channels on the way."""
    resampler, shape = None, None
    for frame in _frames(container):
        if resampler is None or shape != (shape := (frame.rate, frame.format.name, frame.layout.name)):
            yield from _resampled(resampler, None)
            resampler = AudioResampler(format="flt", layout="mono", rate=RATE)
        yield from _resampled(resampler, frame)
    yield from _resampled(resampler, None)


def _frames(container: InputContainer) -> Iterator[av.AudioFrame]:
    """All frames that are whole: a damaged packet is left out, a file that breaks off ends there."""
    try:
        for packet in container.demux(container.streams.audio[0]):
            try:
                yield from packet.decode()
            except FFmpegError:
                continue
    except FFmpegError:
        return


def _resampled(resampler: AudioResampler | None, frame: av.AudioFrame | None) -> Iterator[Samples]:
    """`frame` None: what the resampler still holds."""
    if resampler is not None:
        for part in resampler.resample(frame):
            yield part.to_ndarray()[0]


def _too_long(longest: float) -> BadRequest:
    return _refused(f"it is longer than {longest:g} s (max_audio); send it in parts")


def _refused(reason: str) -> BadRequest:
    return BadRequest(f"the audio file cannot be transcribed: {reason}", param="file")
