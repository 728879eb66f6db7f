"""Decode pictures to 8-bit pixels, or refuse them with the cause. For decoding children.

Sizes and scans are checked before anything is decoded. Only formats that Pillow decodes within its
own process are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

from motet_shared.errors import BadRequest, PayloadTooLarge

from .child import Payload, Task
from .confine import within
from .scans import check_scans

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# modes with one channel of more than eight bits
_WIDE = ("I", "I;16", "I;16L", "I;16B", "I;16N", "F")
_OPEN_CPU = 1.0  # seconds for reading everything before the pixels; usual are milliseconds
_LOAD_CPU, _PIXELS_PER_CPU = 2.0, 5_000_000  # seconds for pixels and what follows; pixels a second
_PAPER = (255, 255, 255)  # background of transparent pictures

# Pillow's own limit is per process and first only warns; `max_pixels` is checked on every call
# instead.
Image.MAX_IMAGE_PIXELS = None


def open_picture(data: bytes, max_pixels: int, param: str) -> Image.Image:
    """Return the picture in `data`: RGB, upright (EXIF), first frame, transparency on white.

    Grey and colour of 16 bits are scaled to 8 bits, CMYK and palettes are converted. `param` is the
    request's field for errors. Raises BadRequest for data that is no picture or is truncated,
    PayloadTooLarge for more than `max_pixels`.
    """
    return _on_paper(_decode(data, max_pixels, param))


def open_mask(data: bytes, max_pixels: int, param: str) -> Image.Image:
    """Return the mask in `data`: mode L, 255 where a picture should be repainted.

    That is where it is transparent, as in OpenAI's API; a mask without transparency marks white
    areas. Raises the errors of `open_picture`.
    """
    picture = _decode(data, max_pixels, param)
    if picture.has_transparency_data:
        return ImageOps.invert(picture.convert("RGBA").getchannel("A"))
    return _on_paper(picture).convert("L")


def _decode(data: bytes, max_pixels: int, param: str) -> Image.Image:
    if not data:
        raise BadRequest(f"{param}: is empty; send a picture ({', '.join(FORMATS)})", param=param)
    try:
        with within(_OPEN_CPU, lambda: _too_costly(_OPEN_CPU, param)):
            picture = Image.open(BytesIO(data), formats=FORMATS)
        with picture:
            return _loaded(picture, data, max_pixels, param)
    except (BadRequest, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise BadRequest(
            f"{param}: {len(data)} bytes of no known picture format; send {known}",
            param=param,
        ) from None
    except Exception as error:  # decoders of untrusted bytes may raise anything
        message = f"{param}: the picture cannot be read ({error}); it may be cut short or damaged, send it again"
        raise BadRequest(message, param=param) from None


def _loaded(picture: ImageFile, data: bytes, max_pixels: int, param: str) -> Image.Image:
    _check_size(picture, max_pixels, param)
    cpu = _LOAD_CPU + picture.width * picture.height / _PIXELS_PER_CPU
    with within(cpu, lambda: _too_costly(cpu, param)):
        if picture.format in ("JPEG", "MPO"):
            check_scans(data, picture.size, param)
        picture.load()
        return _upright(picture)


def _too_costly(cpu: float, param: str) -> BadRequest:
    message = f"{param}: a picture of its size is read in less than {cpu:.1f} s of processor time"
    return BadRequest(f"{message}; save it again, without metadata", param=param)


def _check_size(picture: ImageFile, max_pixels: int, param: str) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise BadRequest(
            f"{param}: {width}×{height} pixels; a picture has at least one", param=param
        )
    if width * height > max_pixels:
        message = f"{param}: {width}×{height} pixels are more than {max_pixels} (max_pixels); send a smaller picture"
        raise PayloadTooLarge(message, param=param)


def _upright(picture: Image.Image) -> Image.Image:
    """Return a copy, rotated by its EXIF orientation; unrotated if the EXIF data are damaged."""
    try:
        turned = ImageOps.exif_transpose(picture)
    except BadRequest:  # its time is up
        raise
    except Exception:  # Pillow reads EXIF lazily: a decoder may raise anything
        return picture.copy()
    return picture.copy() if turned is picture else turned


def _on_paper(picture: Image.Image) -> Image.Image:
    """Return the picture in RGB, composed on white where it is transparent."""
    if picture.mode in _WIDE:
        return _narrow(picture).convert("RGB")
    if picture.has_transparency_data:
        paper = Image.new("RGBA", picture.size, (*_PAPER, 255))
        return Image.alpha_composite(paper, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


def _narrow(picture: Image.Image) -> Image.Image:
    """Return a wide channel in eight bits.

    Integers are assumed to have 16 bits, fractions to lie between 0 and 1.
    """
    is_fraction = picture.mode == "F"
    scale = 255.0 if is_fraction else 255.0 / 65535.0
    wide = picture if is_fraction else picture.convert("I").convert("F")
    return wide.point(lambda value: value * scale + 0.5).convert("L")  # convert clips and truncates


def picture(data: bytes, max_pixels: int, param: str) -> Iterator[Payload]:
    """Yield `open_picture`'s pixels."""
    yield _pixels(open_picture(data, max_pixels, param))


def mask(data: bytes, max_pixels: int, param: str) -> Iterator[Payload]:
    """Yield `open_mask`'s pixels."""
    yield _pixels(open_mask(data, max_pixels, param))


def warm() -> None:
    """Read a picture of each format and mode, so that nothing has to be imported later."""
    Image.init()
    exif = Image.Exif()
    exif[0x0112] = 6
    for format in FORMATS:
        for mode in ("RGB", "L", "P"):
            if (format, mode) != ("JPEG", "P"):
                out = BytesIO()
                Image.new(mode, (4, 4)).save(
                    out, format, **({} if format in ("GIF", "BMP") else {"exif": exif})
                )
                open_picture(out.getvalue(), 16, "image")
    for mode in ("RGBA", "LA", "I;16"):
        out = BytesIO()
        Image.new(mode, (4, 4)).save(out, "PNG")
        open_mask(out.getvalue(), 16, "mask")


def _pixels(picture: Image.Image) -> Payload:
    return {"width": picture.width, "height": picture.height}, picture.tobytes()


TASKS: dict[str, Task] = {"picture": picture, "mask": mask}
