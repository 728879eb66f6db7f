"""Read a few evenly spread frames of a video, decoded in a child process."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from motet_media.pictures import from_pixels
from motet_media.pool import pool
from motet_media.wire import Value
from motet_media.worker import JobLimits
from motet_shared.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Video:
    """Hold frames of a video in RGB, in order and of one size, and their number per second."""

    frames: list[Image.Image]
    fps: float


def open_video(
    data: bytes, *, count: int, max_pixels: int, max_length: int, param: str = "video"
) -> Video:
    """Return at most `count` frames of the file `data`, the first and the last among them.

    Blocks: run it in a thread. Raises BadRequest for a file that is no video, is truncated, or
    exceeds its limits of time and memory; PayloadTooLarge for more than `max_pixels` per frame or
    `max_length` frames; both name `param`.
    """

    def refused(reason: str) -> BadRequest:
        return BadRequest(
            f"{param}: cannot be read as a video ({reason}); send a shorter or smaller one",
            param=param,
        )

    args: dict[str, Value] = {
        "count": count,
        "max_pixels": max_pixels,
        "max_length": max_length,
        "param": param,
    }
    frames, seconds = [], 0.0
    for meta, payload in pool("video").run(
        "frames", data, _limits(len(data), max_pixels), refused, **args
    ):
        if payload:
            frames.append(from_pixels("RGB", meta, payload, refused))
        else:
            seconds = float(meta["seconds"])
    return Video(frames, max(len(frames) / max(seconds, 1e-3), 1e-3))


def _limits(nbytes: int, max_pixels: int) -> JobLimits:
    cpu = 10.0 + nbytes / 500_000
    return JobLimits(cpu, 5.0 + 4 * cpu, (1 << 30) + 3 * nbytes + 24 * max_pixels)
