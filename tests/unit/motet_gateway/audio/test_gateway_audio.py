"""Encoded while it comes: each part can be decoded as it arrives, and the whole has the right length."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from motet_gateway.audio.encoder import FORMATS, RATE, make_encoder
from motet_media.audio import a_law_decode, mu_law_decode

SECONDS = 2.0
CHUNK = 7680 * 2  # 320 ms
TONE = (np.sin(np.arange(int(SECONDS * RATE)) * 2 * np.pi * 440 / RATE) * 12_000).astype("<i2")
CONTAINERS = {"mp3": "mp3", "opus": "ogg", "aac": "aac", "flac": "flac", "wav": "wav"}
DELAY = 0.08  # seconds that an encoder may add at the beginning and the end


def parts(audio_format: str) -> list[bytes]:
    encoder, pcm = make_encoder(audio_format), TONE.tobytes()
    chunks = [encoder.push(pcm[at : at + CHUNK]) for at in range(0, len(pcm), CHUNK)]
    return [*chunks, encoder.finish()]


def decoded(data: bytes, audio_format: str) -> NDArray[np.float64]:
    """The samples of a file at 24 kHz, however much of it there is."""
    if audio_format == "pcm":
        return np.frombuffer(data, "<i2").astype(float)
    if audio_format in ("pcmu", "pcma"):
        pcm = (mu_law_decode if audio_format == "pcmu" else a_law_decode)(data)
        return np.repeat(np.frombuffer(pcm, "<i2").astype(float), 3)
    found = []
    with av.open(io.BytesIO(data), "r", format=CONTAINERS[audio_format]) as container:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
        for frame in container.decode(audio=0):
            found += [part.to_ndarray()[0] for part in resampler.resample(frame)]
        found += [part.to_ndarray()[0] for part in resampler.resample(None)]
    return np.concatenate(found).astype(float)


@pytest.mark.parametrize("audio_format", FORMATS)
def test_the_whole_is_the_tone(audio_format: str) -> None:
    sound = decoded(b"".join(parts(audio_format)), audio_format)
    assert len(sound) == pytest.approx(len(TONE), abs=2 * DELAY * RATE)
    if audio_format in ("pcm", "wav", "flac"):
        assert np.array_equal(sound, TONE)
    middle = sound[RATE // 2 : RATE]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert spectrum.argmax() * RATE / len(middle) == pytest.approx(440, abs=4)
    assert float(np.sqrt(np.mean(middle**2))) == pytest.approx(12_000 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize("audio_format", FORMATS)
def test_every_part_can_be_heard_as_it_arrives(audio_format: str) -> None:
    """What came so far decodes to nearly all of the sound that went in so far."""
    data = b""
    for number, part in enumerate(parts(audio_format)[:-1], start=1):
        data += part
        heard = len(decoded(data, audio_format)) / RATE
        given = min(number * CHUNK / 2, len(TONE)) / RATE
        # FLAC has frames of 4608 samples, and a decoder may keep one back.
        assert given - 0.45 < heard < given + DELAY, audio_format


@pytest.mark.parametrize("audio_format", FORMATS)
def test_nothing_is_a_file_too(audio_format: str) -> None:
    encoder = make_encoder(audio_format)
    data = encoder.push(b"") + encoder.finish()
    if audio_format == "wav":
        assert data[:4] == b"RIFF"
        assert len(data) == 44
