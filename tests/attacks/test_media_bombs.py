"""Attack decoders with small files that claim, repeat or unpack to much: pictures, sounds, video."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import pytest
from PIL import Image

from motet_encoder.video import open_video
from motet_media.pictures import open_picture
from motet_media.pool import pool
from motet_media.sound_file import claimed_seconds, read_audio
from motet_shared.errors import BadRequest, PayloadTooLarge
from support.checkpoints.asr_checkpoints import noise, wav
from support.media.sound_files import encoded, tone
from support.media.videos import random_video
from support.running.cpu_time import CpuTime

MAX_PIXELS = 50_000_000  # as motet-encoder's
LARGE = 4 << 20  # bytes of a repeated part
READ = (1, 1)
CPU_SECONDS = 8  # usual are less than 3; without limits it would be minutes


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """Start the children before any time is measured."""
    open_picture(png(), max_pixels=MAX_PIXELS)
    read_audio(wav(noise(0.5)), 60.0)
    open_video(random_video(2), count=2, max_pixels=MAX_PIXELS, max_length=100)


# ------------------------------------------------------------------------------------------ pictures
def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(before: bytes = b"", pixels: bytes | None = None, after: bytes = b"") -> bytes:
    """A PNG of one pixel with chunks before and after its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(4)) if pixels is None else pixels)
    return b"\x89PNG\r\n\x1a\n" + head + before + body + after + chunk(b"IEND", b"")


@functools.cache
def bomb(megabytes: int) -> bytes:
    """Zlib data, a thousandth of what they unpack to."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes)) + packer.flush()


def apng(frames: int) -> bytes:
    shape = (1, 1, 0, 0, 1, 10, 0, 0)
    later = (
        chunk(b"fcTL", struct.pack(">IIIIIHHBB", 2 * number + 1, *shape))
        + chunk(b"fdAT", struct.pack(">I", 2 * number + 2) + zlib.compress(bytes(4)))
        for number in range(frames)
    )
    first = chunk(b"acTL", struct.pack(">II", 0x7FFFFFFF, 0))
    return png(first + chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, *shape)), after=b"".join(later))


def gif(extension: bytes = b"", frames: int = 1) -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return head + extension + frame * frames + b"\x3b"


def webp(frames: int, side: int = 1) -> bytes:
    out = BytesIO()
    Image.new("RGB", (1, 1)).save(out, "WEBP", lossless=True)
    body = bytes(12) + b"\1\0\0\0" + out.getvalue()[12:]
    frame = b"ANMF" + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
    canvas = b"VP8X\x0a\0\0\0\x02\0\0\0" + struct.pack("<I", side - 1)[:3] * 2
    whole = b"WEBP" + canvas + b"ANIM\6\0\0\0" + bytes(6) + frame * frames
    return b"RIFF" + struct.pack("<I", len(whole)) + whole


Tag = tuple[int, int, int, int]  # tag, type, count, value or offset


def tiff(*more: Tag, compression: int = 1, strip: int = 300, tail: bytes = bytes(500)) -> bytes:
    """A TIFF of one pixel; tags of `more` come first, and its next directory is itself."""
    tags = [(256, 4, 1, 1), (257, 4, 1, 1), (258, 3, 1, 8), (259, 3, 1, compression)]
    tags += [(262, 3, 1, 2), (273, 4, 1, strip), (277, 3, 1, 3), (278, 4, 1, 1), (279, 4, 1, 3)]
    given = {tag[0] for tag in more}
    tags = [*more, *(tag for tag in tags if tag[0] not in given)]
    packed = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + packed + b"\x08\0\0\0" + tail


def bmp(width: int, height: int, head: int = 40, bits: int = 24, colors: int = 0) -> bytes:
    fields = (head, width, height, 1, bits, 0, 0, 1, 1, colors, 0)
    return b"BM" + struct.pack("<IHHI", 60, 0, 0, 54) + struct.pack("<IiiHHIIiiII", *fields)


def jpeg(insert: bytes) -> bytes:
    out = BytesIO()
    Image.new("RGB", (1, 1)).save(out, "JPEG")
    return out.getvalue()[:2] + insert + out.getvalue()[2:]


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def exif(*tags: Tag) -> bytes:
    packed = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + packed + bytes(4)


PROFILE = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20)))
Outcome = tuple[int, int] | type[BadRequest]
PICTURES: dict[str, tuple[Callable[[], bytes], Outcome]] = {
    "png-ztxt": (lambda: png(chunk(b"zTXt", b"a\0\0" + bomb(100))), BadRequest),
    "png-itxt": (lambda: png(chunk(b"iTXt", b"a\0\1\0\0\0" + bomb(100))), BadRequest),
    "png-iccp": (lambda: png(chunk(b"iCCP", b"a\0\0" + bomb(100))), BadRequest),
    "png-many-ztxt": (lambda: png(chunk(b"zTXt", b"a\0\0" + bomb(1)) * 500), BadRequest),
    "png-many-iccp": (lambda: png(PROFILE * 5000), BadRequest),
    "png-many-iccp-after": (lambda: png(after=PROFILE * 5000), BadRequest),
    "png-idat": (lambda: png(pixels=bomb(100)), READ),
    "png-exif": (lambda: png(chunk(b"eXIf", b"\xff" * 999)), READ),
    "apng-frames": (lambda: apng(20_000), READ),
    "gif-frames": (lambda: gif(frames=300_000), READ),
    "gif-comment": (lambda: gif(b"\x21\xfe" + b"\xff".ljust(256) * 16_384 + b"\0"), READ),
    "webp-frames": (lambda: webp(100_000), READ),
    "webp-canvas": (lambda: webp(1, 16_383), BadRequest),
    "tiff-loop": (lambda: tiff(), READ),
    "tiff-exif-loop": (lambda: tiff((34665, 4, 1, 8), (330, 13, 1, 8)), READ),
    "tiff-strip-bytes": (lambda: tiff((279, 4, 1, 0xFFFFFFFF)), READ),
    "tiff-strip-count": (lambda: tiff((273, 4, 0x7FFFFFFF, 8)), BadRequest),
    "tiff-tags": (lambda: tiff(*[(700, 1, LARGE, 8)] * 60_000, tail=bytes(LARGE)), READ),
    **{
        f"tiff-compression-{kind}": (functools.partial(tiff, compression=kind), BadRequest)
        for kind in (4, 6, 32809, 34661, 34676, 34925, 50000, 65535)
    },
    "bmp-head": (lambda: bmp(1, 1, head=0xFFFFFFFF), BadRequest),
    "bmp-size": (lambda: bmp(0x7FFFFFFF, -0x7FFFFFFF), PayloadTooLarge),
    "bmp-colors": (lambda: bmp(1, 1, bits=8, colors=0xFFFFFFFF), BadRequest),
    "bmp-no-pixels": (lambda: bmp(1, 10_000_000), BadRequest),
    "jpeg-many-exif": (lambda: jpeg(segment(0xE1, exif()) * (2 * LARGE // 24)), BadRequest),
    "jpeg-comments": (lambda: jpeg(segment(0xFE, b"") * (2 * LARGE)), BadRequest),
    "jpeg-fill": (lambda: jpeg(b"\xff" * (4 * LARGE)), BadRequest),
    "jpeg-restarts": (lambda: jpeg(b"\xff\xd0" * (2 * LARGE)), BadRequest),
    "jpeg-exif-counts": (
        lambda: jpeg(segment(0xE1, exif(*[(0x112, 4, 0xFFFFFFFF, 1)] * 4000))),
        READ,
    ),
    "jpeg-exif-garbage": (lambda: jpeg(segment(0xE1, exif((0x112, 3, 1, 60_000)))), READ),
    "jpeg-exif-loop": (lambda: jpeg(segment(0xE1, exif((0x8769, 4, 1, 8)))), READ),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_costs_no_more_than_its_size_allows(kind: str) -> None:
    build, expected = PICTURES[kind]
    data, killed = build(), pool("picture").killed
    with CpuTime() as spent:
        if isinstance(expected, tuple):
            assert open_picture(data, max_pixels=MAX_PIXELS).size == expected
        else:
            with pytest.raises(expected) as error:
                open_picture(data, max_pixels=MAX_PIXELS, param="image[3]")
            assert error.value.param == "image[3]"
    assert spent.seconds < CPU_SECONDS
    assert pool("picture").killed == killed  # refused by the decoder, which goes on
    assert open_picture(png(), max_pixels=1).size == (1, 1)


# -------------------------------------------------------------------------------------------- sounds
def headed(*, kind: int = 1, rate: int = 8000, align: int = 2, bits: int = 16) -> bytes:
    """A WAV file of 4 MiB whose header claims endless sound."""
    form = struct.pack("<IHHIIHH", 16, kind, 1, rate, 16_000, align, bits)
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + form + b"data\xff\xff\xff\xff" + bytes(LARGE)


def box(data: bytes, kind: bytes, body: bytes) -> bytes:
    """Replace the content of an MP4 file's box within a sample table."""
    place = data.index(kind) - 4
    grown = len(body) + 8 - int.from_bytes(data[place : place + 4], "big")
    new = struct.pack(">I", len(body) + 8) + kind + body
    out = bytearray(data[:place] + new + data[place + len(new) - grown :])
    for outer in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        start = data.rindex(outer, 0, place) - 4
        size = int.from_bytes(out[start : start + 4], "big") + grown
        out[start : start + 4] = struct.pack(">I", size)
    return bytes(out)


def tabled(data: bytes, count: int, size: int = 1) -> bytes:
    """An MP4 file that claims `count` samples of `size` bytes each."""
    data = box(data, b"stsz", struct.pack(">III", 0, size, count))
    data = box(data, b"stsc", struct.pack(">IIIII", 0, 1, 1, count, 1))
    return box(data, b"stts", struct.pack(">IIII", 0, 1, count, 1))


def flac(tail: bytes = b"", block: int = 0) -> bytes:
    data = encoded(tone(1.0), "flac", "flac")
    return data[:8] + (struct.pack(">HH", block, block) if block else data[8:12]) + data[12:] + tail


SOUNDS: dict[str, tuple[Callable[[], bytes], bool]] = {  # and whether they are read
    "wav-endless": (headed, True),
    "wav-no-width": (lambda: headed(align=0, bits=0), False),
    "wav-rate": (lambda: headed(rate=0xFFFFFFFF), False),
    "wav-high-rate": (lambda: headed(rate=768_000), True),
    "wav-adpcm": (lambda: headed(kind=2, align=1, bits=4), False),
    "wav-mp3": (lambda: headed(kind=0x55), False),
    "flac-blocks": (lambda: flac(block=65_535), True),
    "flac-tiny-blocks": (lambda: flac(b"\xff\xf8\xc9\x08\0" * (LARGE // 5)), True),
    "flac-metadata": (lambda: b"fLaC" + b"\1\0\0\0" * (LARGE // 4), False),
    "mp3-headers": (lambda: b"\xff\xfb\x10\xc4" * (LARGE // 4), False),
    "amr-empty-packets": (lambda: b"#!AMR\n" + b"\x7c" * LARGE, False),
    "mp4-table": (lambda: tabled(encoded(tone(0.5), "mp4", "aac"), 0x7FFFFFFF), True),
    "mp4-empty-samples": (lambda: tabled(encoded(tone(0.5), "mp4", "aac"), 10**7, 0), False),
}


@pytest.mark.parametrize("kind", SOUNDS)
def test_a_sound_costs_no_more_than_its_length_allows(kind: str) -> None:
    build, is_read = SOUNDS[kind]
    data = build()
    with CpuTime() as spent:
        claimed_seconds(data)
        if is_read:
            assert len(read_audio(data, 3600.0))
        else:
            with pytest.raises(BadRequest) as error:
                read_audio(data, 3600.0)
            assert error.value.param == "file"
    assert spent.seconds < CPU_SECONDS
    assert len(read_audio(wav(noise(0.5)), 60.0)) == 8000


# --------------------------------------------------------------------------------------------- video
FILMS: dict[str, Callable[[], bytes]] = {
    "mp4-table": lambda: tabled(random_video(5), 0x7FFFFFFF),
    "mp4-table-of-millions": lambda: tabled(random_video(5), 10**7),
    "mp4-empty-samples": lambda: tabled(random_video(5), 10**7, 0),
}


@pytest.mark.parametrize("kind", FILMS)
def test_a_video_costs_no_more_than_its_frames_allow(kind: str) -> None:
    data = FILMS[kind]()
    with CpuTime() as spent, pytest.raises(BadRequest) as error:
        open_video(data, count=8, max_pixels=MAX_PIXELS, max_length=10_000, param="video[1]")
    assert error.value.param == "video[1]"
    assert spent.seconds < CPU_SECONDS
    assert open_video(random_video(2), count=2, max_pixels=MAX_PIXELS, max_length=100).frames
