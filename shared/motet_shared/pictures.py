"""Pictures from outside, read safely: whatever a client sends becomes 8-bit pixels, or an error that says what to do.

    picture = open_picture(data, max_pixels=4_000_000)  # PIL.Image in RGB

Sizes are looked at before anything is decoded, so a small file that unfolds into gigabytes costs nothing. Only formats
that Pillow decodes within its own process are tried.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Literal

from PIL import Image, ImageOps

from .errors import BadRequest, PayloadTooLarge

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
Format = Literal["png", "jpeg", "webp"]  # that pictures are written in
_WIDE = ("I", "I;16", "I;16L", "I;16B", "I;16N", "F")  # one channel of more than eight bits
_PAPER = (255, 255, 255)  # what shows through where a picture is transparent

# Pillow's own limit is the process's and only warns at first; ours below comes with every call.
Image.MAX_IMAGE_PIXELS = None


def open_picture(data: bytes, *, max_pixels: int, param: str = "image") -> Image.Image:
    """The picture in `data`: RGB, upright (EXIF), the first frame of an animation, what is transparent on white.

    Grey and colour of 16 bits are scaled to 8, CMYK and palettes converted. `param` is the request's field, which
    errors name: BadRequest for what is no picture or breaks off, PayloadTooLarge for more than `max_pixels`.
    """
    return _on_paper(_decode(data, max_pixels, param))


def open_mask(data: bytes, *, max_pixels: int, param: str = "mask") -> Image.Image:
    """The mask in `data`: mode L, 255 where a picture is to be painted anew.

    That is where it is transparent, as in OpenAI's API; where it has no transparency at all, where it is white. Errors
    are those of `open_picture`.
    """
    picture = _decode(data, max_pixels, param)
    if picture.has_transparency_data:
        return ImageOps.invert(picture.convert("RGBA").getchannel("A"))
    return _on_paper(picture).convert("L")


def to_file(picture: Image.Image, format: Format = "png", quality: int = 90) -> bytes:
    """The picture as a file, quick rather than smallest. `quality`, 1 to 100, is that of jpeg and webp."""
    out = BytesIO()
    options = {"compress_level": 1} if format == "png" else {"quality": quality}
    picture.save(out, format.upper(), **options)
    return out.getvalue()


def _decode(data: bytes, max_pixels: int, param: str) -> Image.Image:
    if not data:
        raise BadRequest(f"{param}: is empty; send a picture ({', '.join(FORMATS)})", param=param)
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as picture:
            _check_size(picture, max_pixels, param)
            picture.load()
            return _upright(picture)
    except (BadRequest, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise BadRequest(
            f"{param}: its {len(data)} bytes are no picture that is known; send {known}", param=param
        ) from None
    except Exception as error:  # decoders of foreign bytes raise whatever they stumble over
        message = f"{param}: the picture cannot be read ({error}); it may be cut short or damaged, send it again"
        raise BadRequest(message, param=param) from None


def _check_size(picture: ImageFile, max_pixels: int, param: str) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise BadRequest(f"{param}: {width}×{height} pixels; a picture has at least one", param=param)
    if width * height > max_pixels:
        message = f"{param}: {width}×{height} pixels are more than {max_pixels} (max_pixels); send a smaller picture"
        raise PayloadTooLarge(message, param=param)


def _upright(picture: Image.Image) -> Image.Image:
    """A copy, turned as its EXIF orientation tells; as it is where the EXIF data are damaged."""
    try:
        turned = ImageOps.exif_transpose(picture)
    except Exception:  # Pillow reads EXIF lazily: anything that a decoder raises
        return picture.copy()
    return picture.copy() if turned is picture else turned


def _on_paper(picture: Image.Image) -> Image.Image:
    if picture.mode in _WIDE:
        return _narrow(picture).convert("RGB")
    if picture.has_transparency_data:
        paper = Image.new("RGBA", picture.size, (*_PAPER, 255))
        return Image.alpha_composite(paper, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


def _narrow(picture: Image.Image) -> Image.Image:
    """Eight bits of a wide channel. Whole numbers are taken to have 16 bits, fractions to lie between 0 and 1."""
    is_fraction = picture.mode == "F"
    scale = 255.0 if is_fraction else 255.0 / 65535.0
    wide = picture if is_fraction else picture.convert("I").convert("F")
    return wide.point(lambda value: value * scale + 0.5).convert("L")  # convert clips, and cuts the fraction off
