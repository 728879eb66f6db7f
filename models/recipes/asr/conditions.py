"""Simulate recording conditions of whole batches on a device, as `speech.noise` does of one clip.

Every function takes waves [B, N] at 16 kHz, float32, and a generator on their device, and waits for
nothing: each effect is computed for all clips and kept for those that draw it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipes.speech.noise import RATE, Conditions

HARMONICS = 7
CROWD = 6  # voices of a babble at most
TAIL = 0.8  # seconds of the longest room


class Draw:
    """Draw random numbers, one per clip, on a device."""

    def __init__(self, generator: torch.Generator, count: int) -> None:
        self.generator, self.count = generator, count

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return [B, 1] numbers between two bounds."""
        drawn = torch.rand(self.count, 1, generator=self.generator, device=self.generator.device)
        return low + (high - low) * drawn

    def chance(self, share: float) -> Tensor:
        """Return [B, 1], True for about a share of the clips."""
        return self.uniform() < share

    def normal(self, length: int) -> Tensor:
        """Return [B, length] of white noise."""
        return torch.randn(
            self.count, length, generator=self.generator, device=self.generator.device
        )


def unit(waves: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Scale waves to unit power over `lengths` [B, 1] samples, over all by default."""
    energy = waves.square().sum(1, keepdim=True)
    return waves / ((energy / (waves.shape[1] if lengths is None else lengths)).sqrt() + 1e-9)


def fast_length(count: int) -> int:
    """Return the next multiple of 8,000, whose FFT is fast."""
    return -(-count // 8000) * 8000


def coloured(draw: Draw, length: int) -> Tensor:
    """Return unit noise that falls by 0 to 6.6 dB per octave."""
    size = fast_length(length)
    spectrum = torch.fft.rfft(draw.normal(size))
    place = torch.arange(spectrum.shape[1], device=spectrum.device).clamp(min=1)
    spectrum = spectrum * torch.exp(-draw.uniform(0, 2.2) / 2 * place.log())
    spectrum[:, 0] = 0
    return unit(torch.fft.irfft(spectrum, size)[:, :length])


def hum(draw: Draw, length: int) -> Tensor:
    """Return mains hum: 50 or 60 Hz and its harmonics."""
    time = torch.arange(length, device=draw.generator.device) / RATE
    base = 50.0 + 10.0 * draw.chance(0.5)
    total = torch.zeros(draw.count, length, device=time.device)
    for harmonic in range(1, HARMONICS + 1):
        phase = 2 * math.pi * (base * harmonic * time + draw.uniform())
        total += phase.sin() / harmonic
    return unit(total)


def babble(draw: Draw, speech: Tensor) -> Tensor:
    """Return three to six other clips of the batch at once, each turned by a random time."""
    count, length = speech.shape
    places = torch.arange(length, device=speech.device)
    rows = torch.arange(count, device=speech.device)[:, None]
    voices = 3 + 4 * draw.uniform()
    total = torch.zeros_like(speech)
    for voice in range(CROWD):
        other = (rows + 1 + (draw.uniform() * max(1, count - 1)).long()) % count
        turned = (places + (draw.uniform() * length).long()) % length
        total += speech[other, turned] * (voice < voices.floor())
    return unit(total)


def background(draw: Draw, speech: Tensor) -> Tensor:
    """Return noise of a random kind and unit power, sometimes with a varying level."""
    length, kind = speech.shape[1], draw.uniform()
    noise = torch.where(
        kind < 0.6,
        coloured(draw, length),
        torch.where(kind < 0.92, babble(draw, speech), hum(draw, length)),
    )
    time = torch.arange(length, device=speech.device) / RATE
    swell = (2 * math.pi * (draw.uniform(0.2, 2.0) * time + draw.uniform())).sin()
    return unit(noise * (1 + 0.8 * swell * draw.chance(0.25)))


def reverberate(draw: Draw, waves: Tensor, chosen: Tensor) -> Tensor:
    """Convolve the chosen clips with room responses: an impulse and a noise tail up to TAIL s."""
    tail = torch.arange(int(TAIL * RATE), device=waves.device) / RATE
    seconds = draw.uniform(0.08, TAIL)
    response = draw.normal(len(tail)) * 10 ** (-3 * tail / seconds)
    response = response * (tail > draw.uniform(0.001, 0.012)) * (tail < seconds)
    response = response / (response.square().sum(1, keepdim=True).sqrt() + 1e-9)
    response = response * draw.uniform(0.15, 0.95) * chosen
    response[:, 0] = 1.0
    size = fast_length(waves.shape[1] + len(tail))
    spectrum = torch.fft.rfft(waves, size) * torch.fft.rfft(response, size)
    return torch.fft.irfft(spectrum, size)[:, : waves.shape[1]]


def telephone_band(waves: Tensor) -> Tensor:
    """Limit clips to 300 to 3,400 Hz and quantize them by mu-law."""
    size = fast_length(waves.shape[1])
    hertz = torch.fft.rfftfreq(size, 1 / RATE, device=waves.device)
    spectrum = torch.fft.rfft(waves, size) * ((hertz >= 300) & (hertz <= 3400))
    narrow = torch.fft.irfft(spectrum, size)[:, : waves.shape[1]]
    scale = narrow.abs().amax(1, keepdim=True) + 1e-9
    steps = 255 / 2
    law = (narrow / scale).abs().mul(255).log1p() / math.log(256)
    law = (law * steps).round() / steps
    return narrow.sign() * scale * torch.expm1(law * math.log(256)) / 255


def record(
    waves: Tensor,
    speech_lengths: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    conditions: Conditions,
) -> Tensor:
    """Return clips as recorded: in rooms, with noise, over telephones, too loud or too quiet.

    speech_lengths, lengths: [B, 1] samples of the speech, and of the whole clip, after which
    everything is silent.
    """
    draw = Draw(generator, len(waves))
    inside = torch.arange(waves.shape[1], device=waves.device) < lengths
    speech = unit(waves, speech_lengths)
    clips = reverberate(draw, speech, draw.chance(conditions.room))
    low, high = conditions.snr
    level = 10 ** (-draw.uniform(low, high) / 20) * draw.chance(conditions.noise)
    clips = (clips + level * background(draw, speech)) * inside
    clips = torch.where(draw.chance(conditions.telephone), telephone_band(clips) * inside, clips)
    clips = clips / (clips.abs().amax(1, keepdim=True) + 1e-9)
    louder = 1 + draw.uniform(0.5, 4.0) * draw.chance(conditions.clipping)
    clips = (clips * louder).clamp(-1, 1) * 10 ** (draw.uniform(*conditions.peak) / 20)
    return (clips * 32767).round() / 32767
