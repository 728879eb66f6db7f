"""Sound files of all kinds: read right, or refused with the cause."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from motet_media.audio import wav_header
from motet_media.sound_file import claimed_seconds, read_audio, read_blocks
from motet_shared.errors import BadRequest
from support.checkpoints.asr_checkpoints import RATE, noise, wav
from support.media.sound_files import EXACT, LOSSY, encoded, float_wav, picture, tone
from support.running.refusals import refuses


def pitch_of(sound: Any) -> float:
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    return float(np.argmax(spectrum) * RATE / len(sound))


@pytest.mark.parametrize("kind", [*LOSSY, *EXACT])
@pytest.mark.parametrize("rate", [16_000, 48_000])
def test_common_formats_become_16_khz_mono(kind: str, rate: int) -> None:
    data = encoded(tone(rate=rate), *(LOSSY | EXACT)[kind], rate=rate, channels=2)
    sound = read_audio(data, 60.0)
    assert sound.dtype == np.float32
    assert sound.ndim == 1
    assert len(sound) == pytest.approx(2 * RATE, abs=0.15 * RATE)
    assert pitch_of(sound) == pytest.approx(440, abs=2)
    assert 0.2 < np.abs(sound).max() < 0.6


@pytest.mark.parametrize("kind", [*LOSSY, *EXACT])
def test_a_file_says_how_long_it_is(kind: str) -> None:
    data = encoded(tone(), *(LOSSY | EXACT)[kind], rate=16_000, channels=1)
    assert claimed_seconds(data) == pytest.approx(2.0, abs=0.2)


def test_what_is_no_sound_does_not_say_how_long_it_is() -> None:
    assert claimed_seconds(b"no sound") == claimed_seconds(b"") == 0.0


def test_wav_at_16_khz_is_exact() -> None:
    sound = noise(1.0)
    wanted = (np.clip(sound, -1, 1) * 32767).astype("<i2") / np.float32(32768)
    assert np.array_equal(read_audio(wav(sound), 60.0), wanted)


def test_rates_and_widths() -> None:
    for rate in (8_000, 11_025, 44_100, 96_000):
        sound = read_audio(wav(tone(1.0, rate), rate), 60.0)
        assert len(sound) == pytest.approx(RATE, abs=64)
        assert pitch_of(sound) == pytest.approx(440, abs=2)


def test_what_breaks_off_gives_what_is_whole() -> None:
    for kind in ("wav", "mp3", "flac", "ogg"):
        data = encoded(tone(4.0), *(LOSSY | EXACT)[kind])
        sound = read_audio(data[: len(data) // 2], 60.0)
        assert len(sound) == pytest.approx(2 * RATE, abs=0.8 * RATE), kind
        assert pitch_of(sound) == pytest.approx(440, abs=3)


def test_damage_in_the_middle_costs_only_that() -> None:
    data = bytearray(encoded(tone(4.0), *EXACT["flac"]))
    middle = len(data) // 2
    data[middle : middle + 64] = b"\xff" * 64
    assert len(read_audio(bytes(data), 60.0)) > 2.5 * RATE


def test_silence_clipping_and_one_sample_are_sound() -> None:
    assert not read_audio(wav(np.zeros(RATE)), 60.0).any()
    assert np.abs(read_audio(wav(noise(1.0) * 100), 60.0)).max() >= 0.99
    assert len(read_audio(wav(np.ones(1)), 60.0)) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"this is no sound at all, but a letter to a friend\n" * 50,
        bytes(range(256)) * 64,
        wav_header(RATE, 0),
        wav(tone())[:30],
        encoded(tone(), "mp4", "aac")[:400],
        b"RIFF\x24\x00\x00\x00WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, 0, 0, 2, 16)
        + b"data\0\0\0\0",
    ],
)
def test_what_is_no_sound_is_refused(data: bytes) -> None:
    with refuses(BadRequest, "file"):
        read_audio(data, 60.0)


def test_a_picture_under_a_sound_s_name() -> None:
    with refuses(BadRequest, "file"):
        read_audio(picture(), 60.0)


def test_too_long_is_noticed_without_decoding_all() -> None:
    """Five hours that claim to be there, of which only the beginning is looked at."""
    data = wav(tone(3.0))
    with refuses(BadRequest, "file"):
        read_audio(data, 2.0)
    quiet = encoded(np.zeros(600 * 8000, np.float32), *EXACT["flac"], rate=8000)
    with refuses(BadRequest, "file"):
        read_audio(quiet, 60.0)


def test_a_file_that_claims_more_than_it_has_is_read() -> None:
    """A recorder that died has not written how long it is: 18 hours by the header, three seconds by the content."""
    data = bytearray(wav(tone(3.0)))
    data[40:44] = struct.pack("<I", 2**31 - 1)
    assert len(read_audio(bytes(data), 60.0)) == 3 * RATE
    flac = encoded(tone(100.0, 8000), *EXACT["flac"], rate=8000)
    assert len(read_audio(flac[: len(flac) // 4], 60.0)) == pytest.approx(25 * RATE, abs=3 * RATE)


@pytest.mark.parametrize("level", [3e38, 1.1e6])
def test_samples_far_beyond_full_scale_are_refused(level: float) -> None:
    with refuses(BadRequest, "file"):
        read_audio(float_wav(np.sign(tone()) * np.float32(level)), 60.0)


def test_samples_that_are_no_numbers() -> None:
    sound = np.ones(RATE, "<f4")
    sound[100] = np.nan
    with refuses(BadRequest, "file"):
        read_audio(float_wav(sound), 60.0)


@pytest.mark.parametrize("size", [1, 999, RATE, 10 * RATE])
def test_blocks_are_the_whole_in_parts(size: int) -> None:
    data = wav(noise(0.3 if size == 1 else 3.3))
    whole, blocks = read_audio(data, 60.0), list(read_blocks(data, 60.0, size))
    assert np.array_equal(np.concatenate(blocks), whole)
    assert {len(block) for block in blocks[:-1]} <= {size}
    assert 0 < len(blocks[-1]) <= size


def test_blocks_refuse_what_the_whole_refuses() -> None:
    for data in (b"", b"no sound" * 99, wav(noise(3.0))):
        with refuses(BadRequest, "file"):
            list(read_blocks(data, 2.0, RATE))
