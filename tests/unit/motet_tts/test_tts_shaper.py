"""Speed at the same pitch, and PCM that can be joined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_tts.shaper import WIRE_RATE, Shaper
from motet_tts.stretch import Samples, Stretch

RATE = 24_000


def tone(hertz: float, seconds: float, rate: int = RATE) -> Samples:
    """A voice-like sound: a tone with harmonics."""
    at = np.arange(int(seconds * rate)) / rate
    return sum(np.sin(2 * np.pi * hertz * k * at) / k for k in (1, 2, 3)).astype(np.float32) * 0.3  # type: ignore[union-attr]


def pitch(samples: Samples, rate: int = RATE) -> float:
    """Hz of the strongest tone in the middle of the sound."""
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle)), 1 << 18))
    return float(spectrum.argmax() * rate / (1 << 18))


def stretched(samples: Samples, speed: float, cuts: list[int] | None = None) -> Samples:
    stretch = Stretch(speed, RATE)
    parts = [stretch.push(part) for part in np.split(samples, sorted(cuts or []))]
    return np.concatenate([*parts, stretch.finish()])


@pytest.mark.parametrize("hertz", [110.0, 220.0])
@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.25, 2.0, 4.0])
def test_the_pitch_stays_and_the_length_follows(hertz: float, speed: float) -> None:
    sound = tone(hertz, 2.0)
    result = stretched(sound, speed)
    assert len(result) == round(len(sound) / speed)
    assert pitch(result) == pytest.approx(hertz, rel=0.01)
    inner = result[len(result) // 8 : -len(result) // 8]
    level = float(np.sqrt(np.mean(sound**2)))
    assert float(np.sqrt(np.mean(inner**2))) == pytest.approx(level, rel=0.1)
    # Without a click: no step between samples is larger than the sound itself has.
    assert float(np.abs(np.diff(inner)).max()) < 1.5 * float(np.abs(np.diff(sound)).max())


@settings(max_examples=20)
@given(data=st.data(), speed=st.sampled_from([0.25, 0.7, 1.5, 4.0]))
def test_however_it_is_cut_it_is_the_same(data: st.DataObject, speed: float) -> None:
    length = data.draw(st.integers(0, 12_000))
    sound = np.random.default_rng(length).normal(0, 0.2, length).astype(np.float32)
    cuts = data.draw(st.lists(st.integers(0, length), max_size=8))
    assert np.array_equal(stretched(sound, speed, cuts), stretched(sound, speed))


# ----------------------------------------------------------------------------------------------------------- shaper
def shaped(samples: Samples, rate: int, speed: float, size: int) -> bytes:
    shaper = Shaper(rate, speed)
    parts = [shaper.push(samples[at : at + size]) for at in range(0, len(samples), size)]
    data = b"".join([*parts, shaper.finish()])
    assert shaper.samples == len(data) // 2
    return data


@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000])
@pytest.mark.parametrize("speed", [1.0, 1.3])
def test_it_leaves_at_24_khz(rate: int, speed: float) -> None:
    sound = tone(200.0, 1.0, rate)
    data = shaped(sound, rate, speed, 1000)
    assert data == shaped(sound, rate, speed, 333)
    samples = (np.frombuffer(data, "<i2") / 32767).astype(np.float32)
    assert len(samples) == pytest.approx(WIRE_RATE / speed, abs=2)
    assert pitch(samples, WIRE_RATE) == pytest.approx(200.0, rel=0.01)
    assert abs(samples[0]) < 0.01 > abs(samples[-1])


def test_at_the_wires_rate_only_the_ends_are_touched() -> None:
    sound = tone(200.0, 0.5)
    samples = np.frombuffer(shaped(sound, RATE, 1.0, 700), "<i2")
    assert np.array_equal(samples[72:-72], np.rint(sound[72:-72] * 32767))


@pytest.mark.parametrize("length", [0, 1, 50, 100])
def test_a_very_short_sound(length: int) -> None:
    assert len(shaped(np.ones(length, np.float32), RATE, 1.0, 40)) == 2 * length
    assert len(shaped(np.full(length, 9.0, np.float32), RATE, 2.0, 40)) == 2 * round(length / 2)


def test_what_is_too_loud_is_clipped() -> None:
    samples = np.frombuffer(shaped(np.full(1000, 3.0, np.float32), RATE, 1.0, 1000), "<i2")
    assert samples.max() == 32767
