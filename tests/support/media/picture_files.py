"""Make picture files of many kinds, as clients may send them."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def encoded(picture: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = BytesIO()
    picture.save(out, format, **options)
    return out.getvalue()


def pattern(width: int = 16, height: int = 8) -> Image.Image:
    """Return a picture whose red grows to the right and green downwards, so that turning it shows."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([red, green, np.full_like(red, 128)], -1).astype(np.uint8))


def bomb(width: int, height: int) -> bytes:
    """Return the start of a PNG that claims a huge size."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
    ):
        parts.append(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )
    return b"".join(parts)


def odd_kinds() -> dict[str, tuple[bytes, bytes]]:
    """Return unusual but readable files, each with a plain one of the same content."""
    plain = pattern(64, 48)
    grey = plain.convert("L")
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    red, blue = (Image.new("RGB", (64, 48), colour) for colour in ("red", "blue"))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    cmyk = plain.convert("CMYK")
    dot = Image.new("RGB", (1, 1), (200, 10, 30))
    return {
        "animated": (encoded(red, "GIF", save_all=True, append_images=[blue]), encoded(red)),
        "16-bit": (encoded(wide), encoded(grey)),
        "CMYK": (encoded(cmyk, "TIFF"), encoded(cmyk.convert("RGB"))),
        "rotated by EXIF": (
            encoded(plain, exif=exif),
            encoded(plain.transpose(Image.Transpose.ROTATE_270)),
        ),
        "1x1": (encoded(dot, "BMP"), encoded(dot)),
    }


def unreadable_kinds() -> dict[str, tuple[bytes, int]]:
    """Return files that are refused, with the HTTP status."""
    whole = encoded(pattern(64, 48))
    return {
        "truncated": (whole[: len(whole) // 2], 400),
        "30000x30000": (bomb(30_000, 30_000), 413),
        "a text": (b"I am a picture, believe me.", 400),
        "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 400),
        "a sound": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(28), 400),
    }
