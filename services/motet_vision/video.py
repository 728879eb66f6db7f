"""Videos from outside, read safely: a few frames of them, evenly spread, or an error that says what to do.

Packets are counted before anything is decoded, so that how long a file is costs nothing to find out.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from PIL import Image

from motet_shared.errors import BadRequest, PayloadTooLarge

_FPS = 2.0  # frames of a second at the most: more show little that is new
_LEAST = 2
# Nothing that names other files, as playlists do: FFmpeg would open them.
_SAFE = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,ogg,flv,asf,gif",
    "protocol_whitelist": "none",
}


@dataclass(frozen=True, slots=True)
class Video:
    """Frames in RGB, in order and of one size, and how many of them there are to a second."""

    frames: list[Image.Image]
    fps: float


def open_video(data: bytes, *, count: int, max_pixels: int, max_length: int, param: str = "video") -> Video:
    """At most `count` frames of the file `data`, the first and the last among them.

    BadRequest for what is no video or breaks off, PayloadTooLarge for more than `max_pixels` of a frame or `max_length`
    frames; both name `param`.
    """
    try:
        length = _length(data, max_pixels, max_length, param)
        with _open(data) as container:
            stream = container.streams.video[0]
            seconds = length / float(stream.average_rate or _FPS)
            wanted = _places(length, min(count, max(round(seconds * _FPS), _LEAST)))
            frames = _frames(container, stream, wanted)
    except (FFmpegError, ValueError, IndexError) as error:
        message = f"{param}: cannot be read as a video ({error}); it may be cut short or damaged, send mp4 or webm"
        raise BadRequest(message, param=param) from None
    if not frames:
        raise BadRequest(f"{param}: has no frame that can be decoded; send mp4 or webm", param=param)
    return Video(frames, max(len(frames) / seconds, 1e-3))


def _open(data: bytes) -> InputContainer:
    return av.open(BytesIO(data), mode="r", options=dict(_SAFE), metadata_errors="ignore")


def _length(data: bytes, max_pixels: int, max_length: int, param: str) -> int:
    """How many frames there are."""
    with _open(data) as container:
        if not container.streams.video:
            raise BadRequest(f"{param}: has no pictures in it; send a video, such as mp4 or webm", param=param)
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        if width < 1 or height < 1:
            raise BadRequest(f"{param}: {width}×{height} pixels; a frame has at least one", param=param)
        if width * height > max_pixels:
            message = f"{param}: frames of {width}×{height} pixels are more than {max_pixels} (--max-picture)"
            raise PayloadTooLarge(f"{message}; send a smaller video", param=param)
        length = 0
        for packet in container.demux(stream):
            length += packet.size > 0
            if length > max_length:
                message = f"{param}: has more than {max_length} frames (--max-video); send a shorter video"
                raise PayloadTooLarge(message, param=param)
    if not length:
        raise BadRequest(f"{param}: has no frames; send a video, such as mp4 or webm", param=param)
    return length


def _places(length: int, count: int) -> set[int]:
    """Which frames, evenly spread."""
    return {round(place) for place in np.linspace(0, length - 1, min(count, length)).tolist()}


def _frames(container: Any, stream: Any, wanted: set[int]) -> list[Image.Image]:
    """In the size of the first: a video may change it on the way."""
    frames: list[Image.Image] = []
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            picture = frame.to_image()
            same = not frames or picture.size == frames[0].size
            frames.append(picture if same else picture.resize(frames[0].size))
        if number >= max(wanted):
            break
    return frames
