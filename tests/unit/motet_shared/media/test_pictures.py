"""Pictures that clients send: every kind becomes 8-bit RGB, and what cannot be read says why."""

from __future__ import annotations

import tracemalloc
import warnings
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from motet_media.pictures import Format, open_mask, open_picture, to_file
from motet_shared.errors import BadRequest, PayloadTooLarge
from support.media.picture_files import bomb, encoded, pattern

LIMIT = 1_000_000


def opened(data: bytes) -> np.ndarray:
    picture = open_picture(data, max_pixels=LIMIT)
    assert picture.mode == "RGB"
    return np.asarray(picture).astype(int)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF"])
def test_lossless_formats_keep_every_pixel(format: str) -> None:
    plain = Image.fromarray(
        (np.asarray(pattern(4, 4)) // 85 * 85).astype(np.uint8)
    )  # few colours: GIF holds them all
    assert (opened(encoded(plain, format)) == np.asarray(plain)).all()


@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_lossy_formats_are_near(format: str) -> None:
    assert (
        np.abs(
            opened(encoded(pattern(64, 64), format, quality=95)) - np.asarray(pattern(64, 64))
        ).mean()
        < 6
    )


def test_one_pixel() -> None:
    assert opened(encoded(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_an_animation_shows_its_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert (opened(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(format: str) -> None:
    grey = np.array([[0, 257, 32768, 65535]], np.uint16)
    values = opened(encoded(Image.fromarray(grey), format))
    assert values[0, :, 0].tolist() == [0, 1, 128, 255]
    assert (values[..., 0] == values[..., 2]).all()


def test_fractions() -> None:
    values = opened(encoded(Image.fromarray(np.array([[0.0, 0.5, 1.0, 7.0]], np.float32)), "TIFF"))
    assert values[0, :, 0].tolist() == [0, 128, 255, 255]


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk(format: str) -> None:
    values = opened(
        encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), format)
    )  # no red ink is missing: red
    assert np.abs(values - np.array([255, 0, 0])).max() <= 6


def test_palette_grey_and_one_bit() -> None:
    assert (
        opened(encoded(Image.new("RGB", (4, 4), (255, 0, 0)).convert("P"))) == (255, 0, 0)
    ).all()
    assert (opened(encoded(Image.new("L", (4, 4), 7))) == 7).all()
    assert (opened(encoded(Image.new("1", (4, 4), 1))) == 255).all()


def test_what_is_transparent_lies_on_white() -> None:
    picture = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    picture.putpixel((1, 0), (0, 0, 0, 0))
    assert opened(encoded(picture)).tolist() == [[[255, 0, 0], [255, 255, 255]]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_it_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turns = {
        2: 0,
        3: 3,
        4: 1,
        5: 5,
        6: 4,
        7: 6,
        8: 2,
    }  # Pillow's transposes that undo each orientation
    plain = pattern(64, 32)
    wanted = plain.transpose(Image.Transpose(turns[orientation])) if orientation in turns else plain
    values = opened(encoded(plain, "PNG", exif=exif))
    assert values.shape[:2] == ((64, 32) if orientation > 4 else (32, 64))
    if orientation in (1, 2, 3, 4):
        assert (values == np.asarray(wanted)).all()


def test_damaged_exif_is_overlooked() -> None:
    data = encoded(pattern(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Pillow tells of it, and goes on
        assert opened(data).shape == (8, 16, 3)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "BMP"])
def test_a_truncated_picture_says_so(format: str) -> None:
    data = encoded(pattern(64, 64), format)
    with pytest.raises(BadRequest) as caught:
        open_picture(data[: len(data) // 2], max_pixels=LIMIT)
    assert caught.value.param == "image"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\0" * 4096,
    ],
)
def test_no_picture_at_all(data: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        open_picture(data, max_pixels=LIMIT, param="image[1]")
    assert caught.value.param == "image[1]"


def test_a_bomb_costs_nothing() -> None:
    tracemalloc.start()
    with pytest.raises(PayloadTooLarge):
        open_picture(bomb(30_000, 30_000), max_pixels=LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@given(st.binary(max_size=64), st.integers(0, 400))
@settings(max_examples=80)
def test_damage_is_an_error_of_ours_or_a_picture(noise: bytes, at: int) -> None:
    data = encoded(pattern(), "PNG")
    try:
        picture = open_picture(data[:at] + noise + data[at + len(noise) :], max_pixels=LIMIT)
    except (BadRequest, PayloadTooLarge):
        return
    assert picture.mode == "RGB"


def test_a_mask_is_what_is_transparent_else_what_is_white() -> None:
    clear = Image.new("RGBA", (2, 1), (9, 9, 9, 255))
    clear.putpixel((1, 0), (9, 9, 9, 0))
    assert list(open_mask(encoded(clear), max_pixels=9).tobytes()) == [0, 255]
    assert list(open_mask(encoded(Image.new("L", (2, 1), 255)), max_pixels=9).tobytes()) == [
        255,
        255,
    ]
    with pytest.raises(PayloadTooLarge) as caught:
        open_mask(encoded(pattern()), max_pixels=9)
    assert caught.value.param == "mask"


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_files_come_back(format: Format) -> None:
    data = to_file(pattern(64, 64), format, 95)
    assert Image.open(BytesIO(data)).format == format.upper()
    assert np.abs(opened(data) - np.asarray(pattern(64, 64))).mean() <= (
        0 if format == "png" else 6
    )
