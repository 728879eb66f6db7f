"""Make short videos in which every frame differs."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import av

from support.checkpoints.vlm_checkpoints import picture

WIDTH, HEIGHT, RATE = (
    84,
    56,
    10,
)  # in pixels: nothing for Qwen's processor to scale; and frames per second


def random_video(frames: int, codec: str = "mpeg4", form: str = "mp4") -> bytes:
    """Return a video of random blots."""
    file = BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_image(picture(number, WIDTH, HEIGHT))))
        container.mux(stream.encode())
    return file.getvalue()
