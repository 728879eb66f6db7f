"""Simulate recording conditions: rooms, noise, telephones, gain, clipping, silence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torchaudio import functional
from torchaudio.transforms import Resample

from recipes.speech.espeak import Speech

Wave = NDArray[np.float32]
RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Define the probability of each effect on a clip (0 to 1), and its bounds."""

    room: float = 0.35
    noise: float = 0.65
    telephone: float = 0.08
    clipping: float = 0.06
    snr: tuple[float, float] = (4.0, 35.0)  # dB
    peak: tuple[float, float] = (-30.0, 0.0)  # dB of full scale
    before: tuple[float, float] = (0.02, 0.45)  # seconds of silence
    after: tuple[float, float] = (0.1, 0.55)


NORMAL = Conditions()
CLEAN = Conditions(
    room=0, noise=0, telephone=0, clipping=0, peak=(-6.0, -6.0), before=(0.2, 0.2), after=(0.3, 0.3)
)


@cache
def _resampler(source: int, target: int) -> torch.nn.Module:
    """Return a filter of 64 zero crossings a side under a Kaiser window ("kaiser best")."""
    resampler: torch.nn.Module = Resample(
        source,
        target,
        lowpass_filter_width=64,
        rolloff=0.9475937167399596,
        resampling_method="sinc_interp_kaiser",
        beta=14.769656459379492,
    )
    return resampler


def resample(samples: Wave, source: int, target: int = RATE) -> Wave:
    """Resample a whole clip."""
    wave: Wave = _resampler(source, target)(torch.from_numpy(samples)).numpy()
    return wave[: round(len(samples) * target / source)]


def smooth_length(count: int) -> int:
    """Return the next 5-smooth number, a length whose FFT is fast."""
    while True:
        rest = count
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return count
        count += 1


def coloured(rng: Generator, count: int, slope: float) -> Wave:
    """Return unit-power noise that falls by `slope` times 3 dB/octave: 0 white, 1 pink, 2 brown."""
    size = smooth_length(count)
    spectrum = np.fft.rfft(rng.standard_normal(size, np.float32))
    spectrum[1:] /= np.arange(1, len(spectrum)) ** (slope / 2)
    spectrum[0] = 0
    return _unit(np.fft.irfft(spectrum, size)[:count])


def hum(rng: Generator, count: int) -> Wave:
    """Return mains hum: 50 or 60 Hz and its harmonics."""
    time, base = np.arange(count) / RATE, rng.choice((50.0, 60.0))
    tones = [np.sin(2 * np.pi * (base * k * time + rng.random())) / k for k in range(1, 8)]
    return _unit(np.sum(tones, axis=0))


def _unit(samples: NDArray[np.floating]) -> Wave:
    return (samples / (np.sqrt(np.mean(samples**2)) + 1e-9)).astype(np.float32)


@cache
def babble_voices() -> tuple[Wave, ...]:
    """Return the voices that babble mixes, the same ones in every process."""
    from random import Random

    from recipes.speech.espeak import speak
    from recipes.speech.general import general
    from recipes.speech.voices import draw_voice

    rng = Random("crowd")
    samples = (speak(general(rng), draw_voice(rng)) for _ in range(40))
    return tuple(_unit(resample(speech.samples, speech.rate)) for speech in samples)


def babble(rng: Generator, count: int) -> Wave:
    """Return three to six people talking at once, of unit power."""
    total = np.zeros(count, np.float32)
    for _ in range(int(rng.integers(3, 7))):
        voice = babble_voices()[int(rng.integers(len(babble_voices())))]
        total += np.resize(np.roll(voice, int(rng.integers(len(voice)))), count)
    return _unit(total)


def background(rng: Generator, count: int) -> Wave:
    """Return noise of a random kind and unit power, sometimes with a varying level."""
    kind = rng.random()
    if kind < 0.65:
        noise = coloured(rng, count, float(rng.uniform(0, 2.2)))
    else:
        noise = babble(rng, count) if kind < 0.92 else hum(rng, count)
    if rng.random() < 0.25:
        swell = np.sin(2 * np.pi * (rng.uniform(0.2, 2.0) * np.arange(count) / RATE + rng.random()))
        noise = _unit(noise * (1 + 0.8 * swell))
    return noise


def reverberate(rng: Generator, samples: Wave) -> Wave:
    """Convolve a clip with a room response: an impulse and a noise tail of up to 0.7 s."""
    seconds = float(rng.uniform(0.08, 0.7))
    tail = np.arange(int(seconds * RATE)) / RATE
    response = (
        rng.standard_normal(len(tail))
        * 10 ** (-3 * tail / seconds)
        * (tail > rng.uniform(0.001, 0.01))
    )
    response *= rng.uniform(0.15, 0.9) / (np.sqrt(np.sum(response**2)) + 1e-9)
    response[0] = 1.0
    wet = functional.fftconvolve(
        torch.from_numpy(samples).double(), torch.from_numpy(response)
    ).numpy()
    return wet[: len(samples)].astype(np.float32)


def telephone_band(samples: Wave) -> Wave:
    """Limit a clip to 300 to 3,400 Hz and quantize it by mu-law."""
    size = smooth_length(len(samples))
    spectrum = np.fft.rfft(samples, size)
    hertz = np.fft.rfftfreq(size, 1 / RATE)
    spectrum[(hertz < 300) | (hertz > 3400)] = 0
    narrow = np.fft.irfft(spectrum, size)[: len(samples)]
    scale = np.max(np.abs(narrow)) + 1e-9
    law = functional.mu_law_encoding(torch.from_numpy(narrow / scale), 256)
    return (scale * functional.mu_law_decoding(law, 256).numpy()).astype(np.float32)


def apply_conditions(
    speech: Speech, rng: Generator, conditions: Conditions = NORMAL
) -> tuple[Wave, float]:
    """Return speech as recorded at 16 kHz, and the second at which it starts."""
    samples = resample(speech.samples, speech.rate)
    before = float(rng.uniform(*conditions.before))
    after = float(rng.uniform(*conditions.after))
    clip = np.pad(_unit(samples), (int(before * RATE), int(after * RATE)))
    if rng.random() < conditions.room:
        clip = reverberate(rng, clip)
    if rng.random() < conditions.noise:
        level = 10 ** (-float(rng.uniform(*conditions.snr)) / 20)
        clip = clip + level * background(rng, len(clip))
    if rng.random() < conditions.telephone:
        clip = telephone_band(clip)
    clip = clip / (np.max(np.abs(clip)) + 1e-9)
    if rng.random() < conditions.clipping:
        clip = np.clip(clip * rng.uniform(1.5, 5.0), -1, 1)
    clip = clip * 10 ** (float(rng.uniform(*conditions.peak)) / 20)
    return np.round(clip * 32767).astype(np.float32) / 32768, before


def no_speech(rng: Generator) -> Wave:
    """Return one to six seconds of noise or silence."""
    count = int(rng.uniform(1.0, 6.0) * RATE)
    kind, level = rng.random(), 10 ** (float(rng.uniform(-60, -12)) / 20)
    if kind < 0.25:
        return np.zeros(count, np.float32)
    noise = coloured(rng, count, float(rng.uniform(0, 2.2))) if kind < 0.9 else hum(rng, count)
    return np.clip(noise * level * 0.3, -1, 1).astype(np.float32)
