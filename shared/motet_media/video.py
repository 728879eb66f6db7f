"""Decode a few frames of a video, evenly spread, or refuse it with the cause.

For decoding children. Packets are counted before anything is decoded, so that finding the length is
cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError

from motet_shared.errors import BadRequest, PayloadTooLarge

from .child import Payload, Task

_FPS = 2.0  # most frames per second: more show little that is new
_LEAST = 2
# Excludes formats that refer to other files, such as playlists: FFmpeg would open them.
_SAFE = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,ogg,flv,asf,gif",
    "protocol_whitelist": "none",
}


def frames(
    data: bytes, count: int, max_pixels: int, max_length: int, param: str
) -> Iterator[Payload]:
    """Yield at most `count` frames, including first and last: RGB with `width` and `height`.

    The last item has the length of the file in `seconds`, without a payload. Raises BadRequest for
    data that is no video or is truncated, PayloadTooLarge for more than `max_pixels` per frame or
    `max_length` frames; both name `param`.
    """
    shown = 0
    try:
        length = _length(data, max_pixels, max_length, param)
        with _open(data) as container:
            stream = container.streams.video[0]
            seconds = length / float(stream.average_rate or _FPS)
            wanted = _places(length, min(count, max(round(seconds * _FPS), _LEAST)))
            for payload in _frames(container, stream, wanted, max_pixels):
                shown += 1
                yield payload
    except (FFmpegError, ValueError, IndexError) as error:
        message = f"{param}: cannot be read as a video ({error}); it may be cut short or damaged, send mp4 or webm"
        raise BadRequest(message, param=param) from None
    if not shown:
        raise BadRequest(
            f"{param}: has no frame that can be decoded; send mp4 or webm", param=param
        )
    yield {"seconds": seconds}, b""


def warm() -> None:
    """Decode a video of one frame, so that nothing has to be imported later."""
    buffer = BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream: Any = out.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))))
        out.mux(stream.encode(None))
    list(frames(buffer.getvalue(), 1, 1 << 20, 10, "video"))


def _open(data: bytes) -> InputContainer:
    return av.open(BytesIO(data), mode="r", options=dict(_SAFE), metadata_errors="ignore")


def _length(data: bytes, max_pixels: int, max_length: int, param: str) -> int:
    """Return the number of frames; raise BadRequest or PayloadTooLarge if it is not acceptable."""
    with _open(data) as container:
        if not container.streams.video:
            raise BadRequest(
                f"{param}: has no video stream; send a video, such as mp4 or webm", param=param
            )
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        if width < 1 or height < 1:
            raise BadRequest(
                f"{param}: {width}×{height} pixels; a frame has at least one", param=param
            )
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
    """Return the indices of `count` evenly spread frames."""
    return {round(place) for place in np.linspace(0, length - 1, min(count, length)).tolist()}


def _frames(container: Any, stream: Any, wanted: set[int], max_pixels: int) -> Iterator[Payload]:
    """Yield frames in the size of the first one, since a video may change its size midway."""
    stream.codec_context.thread_count = 1  # the child must not start threads
    size: tuple[int, int] | None = None
    for number, frame in enumerate(container.decode(stream)):
        if frame.width * frame.height > max_pixels:
            raise ValueError(f"frame {number} has {frame.width}×{frame.height} pixels")
        if number in wanted:
            picture = frame.to_image()
            size = size or picture.size
            shown = picture if picture.size == size else picture.resize(size)
            yield {"width": size[0], "height": size[1]}, shown.tobytes()
        if number >= max(wanted):
            break


TASKS: dict[str, Task] = {"frames": frames}
