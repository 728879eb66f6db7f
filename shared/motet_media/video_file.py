"""Write a video as an MP4 or WebM file while its frames come.

    writer = VideoWriter(frame_rate=16, form="mp4")
    for frames in parts:  # `[frames, height, width, 3]`, 8-bit RGB
        writer.add(frames)
    writer.add_sound(samples)  # `[channels, samples]`, if the video has sound
    data = writer.finish()

H.264 and AAC in MP4, VP9 and Opus in WebM, with one thread: the same frames give the same bytes,
whichever threads call the methods. All methods block: run them on a thread.
"""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from motet_shared.messages import VideoForm

# Encoder and options by format. x264's macroblock tree depends on what a thread's stack held before,
# in videos below 128 pixels. VP9 has a constant quality only where no bit rate is set.
_ENCODERS: dict[VideoForm, tuple[str, dict[str, str]]] = {
    "mp4": ("libx264", {"crf": "18", "preset": "veryfast", "x264-params": "mbtree=0"}),
    "webm": (
        "libvpx-vp9",
        {"crf": "24", "b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "0"},
    ),
}
_SOUND: dict[VideoForm, tuple[str, int]] = {  # encoder, bits per second
    "mp4": ("aac", 160_000),
    "webm": ("libopus", 128_000),
}
_STEREO, _OPUS_RATE = "stereo", 48_000  # Opus has no 44100 Hz
_NO_DATE = {"fflags": "+bitexact"}  # nor random identifiers: the bytes depend on frames alone
_LARGEST_DENOMINATOR = 1001  # of frame rates such as 30000/1001


class VideoWriter:
    """Write one video. frame_rate: frames per second; sound_rate: samples, 0: without sound."""

    def __init__(self, frame_rate: float, form: VideoForm = "mp4", sound_rate: int = 0):
        self._rate = Fraction(frame_rate).limit_denominator(_LARGEST_DENOMINATOR)
        self._file = BytesIO()
        self._codec, self._options = _ENCODERS[form]
        self._container = av.open(self._file, "w", format=form, options=_NO_DATE)
        self._form, self._sound_rate = form, sound_rate
        self._stream: Any = None
        self._sound: Any = None
        self.frames = self.width = self.height = 0

    def add(self, frames: NDArray[np.uint8]) -> None:
        """Encode the next frames, all of one size with even sides."""
        if self._stream is None:
            self._begin(*frames.shape[1:3])
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            self._container.mux(self._stream.encode(frame))
        self.frames += len(frames)

    def add_sound(self, samples: NDArray[np.float32]) -> None:
        """Encode the whole sound, one or two channels in -1 to 1, after the first frames."""
        pair = np.broadcast_to(samples.clip(-1, 1), (2, samples.shape[1]))
        sound = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(pair, np.float32), format="fltp", layout=_STEREO
        )
        sound.sample_rate, sound.pts = self._sound_rate, 0
        resampler = av.AudioResampler(
            format=self._sound.format.name, layout=_STEREO, rate=self._sound.rate
        )
        for frame in (*resampler.resample(sound), *resampler.resample(None)):
            self._container.mux(self._sound.encode(frame))

    def finish(self) -> bytes:
        """Return the file."""
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))
        if self._sound is not None:
            self._container.mux(self._sound.encode(None))
        self._container.close()
        return self._file.getvalue()

    def _begin(self, height: int, width: int) -> None:
        self.width, self.height = width, height
        self._stream = self._container.add_stream(
            self._codec, rate=self._rate, options=self._options
        )
        self._stream.width, self._stream.height = width, height
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.thread_count = 1
        if self._sound_rate:
            encoder, bit_rate = _SOUND[self._form]
            rate = self._sound_rate if self._form == "mp4" else _OPUS_RATE
            self._sound = self._container.add_stream(encoder, rate=rate, layout=_STEREO)
            self._sound.bit_rate = bit_rate
            self._sound.codec_context.thread_count = 1
