"""Read pictures from outside as 8-bit pixels, decoded in child processes.

picture = open_picture(data, max_pixels=4_000_000)  # PIL.Image in RGB; on a thread

Errors name the cause and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Literal

from PIL import Image

from motet_shared.errors import BadRequest

from .pool import pool
from .wire import Value
from .worker import Data, JobLimits

Format = Literal["png", "jpeg", "webp"]  # output formats
_MEMORY, _MEMORY_PER_PIXEL = 256 << 20, 24  # bytes: several copies of four bytes per pixel


def open_picture(data: Data, *, max_pixels: int, param: str = "image") -> Image.Image:
    """Return the picture: RGB, upright (EXIF), first frame of an animation, transparency on white.

    Grey and colour of 16 bits are scaled to 8 bits, CMYK and palettes are converted. `param` is the
    request's field for errors. Raises BadRequest for data that is no picture, is truncated or costs
    more than its limits, PayloadTooLarge for more than `max_pixels`. Blocks: run it on a thread.
    """
    return _decoded("picture", "RGB", data, max_pixels, param)


def open_mask(data: Data, *, max_pixels: int, param: str = "mask") -> Image.Image:
    """Return the mask: mode L, 255 where a picture should be repainted.

    That is where it is transparent, as in OpenAI's API; a mask without transparency marks white
    areas. Raises the errors of `open_picture`.
    """
    return _decoded("mask", "L", data, max_pixels, param)


def to_file(picture: Image.Image, format: Format = "png", quality: int = 90) -> bytes:
    """Return the picture as a file, optimized for speed rather than size.

    `quality`, 1 to 100, applies to jpeg and webp.
    """
    out = BytesIO()
    options = {"compress_level": 1} if format == "png" else {"quality": quality}
    picture.save(out, format.upper(), **options)
    return out.getvalue()


def from_pixels(
    mode: str, meta: Mapping[str, Value], payload: bytes, refused: Callable[[str], BadRequest]
) -> Image.Image:
    """Return a child's `payload` as a picture.

    The size it reports is checked, since the child may be compromised.
    """
    width, height = meta.get("width"), meta.get("height")
    if not (isinstance(width, int) and isinstance(height, int) and width > 0 and height > 0):
        raise refused("its decoder sent an invalid result")
    if len(payload) != width * height * len(mode):
        raise refused("its decoder sent an invalid result")
    return Image.frombytes(mode, (width, height), payload)


def _decoded(task: str, mode: str, data: Data, max_pixels: int, param: str) -> Image.Image:
    def refused(reason: str) -> BadRequest:
        return BadRequest(
            f"{param}: the picture cannot be read ({reason}); send another, or a smaller one",
            param=param,
        )

    args: dict[str, Value] = {"max_pixels": max_pixels, "param": param}
    results = list(pool("picture").run(task, data, _limits(len(data), max_pixels), refused, **args))
    if len(results) != 1:
        raise refused("its decoder sent an invalid result")
    return from_pixels(mode, *results[0], refused)


def _limits(nbytes: int, max_pixels: int) -> JobLimits:
    cpu = 3.0 + max_pixels / 5_000_000
    return JobLimits(cpu, 5.0 + 4 * cpu, _MEMORY + 3 * nbytes + _MEMORY_PER_PIXEL * max_pixels)
