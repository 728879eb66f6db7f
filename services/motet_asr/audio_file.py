"""Any sound file that FFmpeg reads, as one channel at 16 kHz; or an error that says what is wrong with it."""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.container import InputContainer
from av.error import FFmpegError

from motet_shared.errors import BadRequest

from .engine import SAMPLE_RATE, Audio

_RATES = (1_000, 768_000)  # Hz that a file may claim


def read_audio(data: bytes | memoryview, longest: float) -> Audio:
    """Samples in float32, full scale is [-1, 1]. Blocks: for a thread.

    A file that breaks off gives what is whole. BadRequest (param "file") for what is empty, no sound, without a sample,
    or longer than `longest` seconds; that is noticed without decoding more.
    """
    if not len(data):
        raise _refused("it is empty (0 bytes)")
    try:
        with av.open(io.BytesIO(data), mode="r", metadata_errors="ignore") as container:
            return _read(container, longest)
    except FFmpegError as error:
        raise _refused(
            f"it cannot be read as sound ({error.strerror}); send wav, mp3, flac, ogg, m4a or webm"
        ) from None


def _read(container: InputContainer, longest: float) -> Audio:
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise _refused(f"it has no sound track (it holds: {kinds})")
    rate = container.streams.audio[0].codec_context.sample_rate
    if not _RATES[0] <= rate <= _RATES[1]:
        raise _refused(f"its header claims a rate of {rate} Hz; {_RATES[0]} to {_RATES[1]} are possible")
    chunks, count = [], 0
    for chunk in _chunks(container):
        count += len(chunk)
        if count > longest * SAMPLE_RATE:
            raise _refused(f"it is longer than {longest:g} s (max_audio); send it in parts")
        chunks.append(chunk)
    if not count:
        raise _refused("there is not one whole sample in it; was it cut off?")
    samples = np.concatenate(chunks)
    if not np.isfinite(samples).all():
        raise _refused("some of its samples are no numbers (NaN or infinite)")
    return samples


def _chunks(container: InputContainer) -> Iterator[Audio]:
    """Samples of one channel. A file may change its rate or channels on the way."""
    resampler, shape = None, None
    for frame in _frames(container):
        if resampler is None or shape != (shape := (frame.rate, frame.format.name, frame.layout.name)):
            yield from _resampled(resampler, None)
            resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
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


def _resampled(resampler: AudioResampler | None, frame: av.AudioFrame | None) -> Iterator[Audio]:
    """`frame` None: what the resampler still holds."""
    if resampler is not None:
        for part in resampler.resample(frame):
            yield part.to_ndarray()[0]


def _refused(reason: str) -> BadRequest:
    return BadRequest(f"the audio file cannot be transcribed: {reason}", param="file")
