"""Synthesize samples from a pitch and the loudness of pulses and noise in each band.

A source-filter model: a pulse train and noise, each filtered by a smooth envelope, of minimum phase
for the pulses like a vocal tract. Both are filtered by short Fourier transforms in windows of two
hops that overlap by one; pulses keep their phase from frame to frame, so a sentence sounds the same
however its frames are chunked. Loudness is differentiable, pitch is not; training uses a spectral
loss, which leaves phases free.

Shapes: B sentences, N acoustic frames, M bands, S bins of the spectrum, H samples per hop, L
samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from motet_kernels.spans import upload

LOWEST = 55.0  # Hz
AHEAD = 2  # frames by which a pitch is given before it is heard


class Controls(NamedTuple):
    """Hold the synthesizer's inputs per acoustic frame.

    pitch: Hz, [B, N]; 0: unvoiced.
    harmonic, noise: log amplitudes [B, N, M].
    """

    pitch: Tensor
    harmonic: Tensor
    noise: Tensor


@dataclass(slots=True)
class SynthState:
    """Hold the state of one sentence: last pitch, phase (in cycles), last hop, pending overlap."""

    pitch: Tensor  # [], the last one above 0
    voiced: Tensor  # [], 0 or 1
    phase: Tensor  # []
    pulses: Tensor  # [H]
    tail: Tensor  # [H]
    frames: int = 0


def to_mel(hertz: Tensor) -> Tensor:
    """Convert Hz to mel."""
    return 2595 * torch.log10(1 + hertz / 700)


class Synth:
    """Render samples of many sentences; the state of each is in its `SynthState`."""

    def __init__(self, sample_rate: int, hop: int, bands: int) -> None:
        self.rate, self.hop, self.bands = sample_rate, hop, bands
        self.window = torch.hann_window(2 * hop).sqrt()
        self.weights = self._interpolation(torch.linspace(0, sample_rate / 2, hop + 1))
        # The cepstrum of minimum phase: its acausal half is folded onto the causal one.
        self.causal = torch.cat(
            [torch.ones(1), torch.full((hop - 1,), 2.0), torch.ones(1), torch.zeros(hop - 1)]
        )

    def to(self, device: torch.device) -> None:
        """Move the tables to `device`."""
        self.window, self.weights = self.window.to(device), self.weights.to(device)
        self.causal = self.causal.to(device)

    def begin(self) -> SynthState:
        """Return the state before the first frame of a sentence."""
        silence, nothing = self.window.new_zeros(self.hop), self.window.new_zeros(())
        return SynthState(nothing + 120.0, nothing, nothing.double(), silence, silence)

    def _interpolation(self, hertz_S: Tensor) -> Tensor:
        """Return `[M, S]`: the weight of each band at these frequencies."""
        place = to_mel(hertz_S) / to_mel(hertz_S[-1]) * (self.bands - 1)
        return (1 - (place - torch.arange(self.bands)[:, None]).abs()).clamp(min=0)

    def render(self, states: list[SynthState], controls: Controls, seeds: list[int]) -> Tensor:
        """Return the samples `[B, N * H]` of the next N frames of each sentence; updates states."""
        frames = controls.pitch.shape[1]
        white_noise = [
            _white_noise(seed, state.frames, frames, self.hop)
            for seed, state in zip(seeds, states, strict=True)
        ]
        pulses = torch.fft.rfft(self._pulses(states, controls.pitch.detach()) * self.window)
        noise_spectrum = torch.fft.rfft(
            upload(torch.stack(white_noise), self.window.device) * self.window
        )
        spectrum = (
            pulses * self._vocal_tract(controls.harmonic)
            + noise_spectrum * (controls.noise @ self.weights).exp()
        )
        pieces = torch.fft.irfft(spectrum, 2 * self.hop) * self.window
        early, late = pieces.unflatten(-1, (2, self.hop)).unbind(2)
        tails = torch.stack([state.tail for state in states])[:, None]
        for row, state in enumerate(states):
            state.tail = late[row, -1].detach()
            state.frames += frames
        output: Tensor = (early + torch.cat([tails, late[:, :-1]], dim=1)).flatten(1)
        return output

    def _vocal_tract(self, harmonic_BNM: Tensor) -> Tensor:
        """Return the complex minimum-phase response `[B, N, S]` of these log amplitudes."""
        cepstrum = torch.fft.irfft(harmonic_BNM @ self.weights, 2 * self.hop)
        output: Tensor = torch.fft.rfft(cepstrum * self.causal).exp()
        return output

    def _pulses(self, states: list[SynthState], pitch_BN: Tensor) -> Tensor:
        """Return cosines of all harmonics, equally loud: `[B, N, 2 H]`.

        For each frame, the hop before it and its own.
        """
        voiced_BN = (pitch_BN > 0).float()
        before_B = torch.stack([state.pitch for state in states])
        held_BN = _fill_unvoiced(before_B, pitch_BN)
        pitch_BL = self._ramp(before_B, held_BN)
        cycles_BL = (pitch_BL.double() / self.rate).cumsum(1) + torch.stack(
            [state.phase for state in states]
        )[:, None]
        voicing_BL = self._ramp(torch.stack([state.voiced for state in states]), voiced_BN)
        pulses_BL = (
            _cosines((cycles_BL % 1.0).float(), (self.rate / 2 / pitch_BL).floor()) * voicing_BL
        )
        kept_BH = torch.stack([state.pulses for state in states])
        for row, state in enumerate(states):
            state.pitch, state.voiced, state.phase = (
                held_BN[row, -1],
                voiced_BN[row, -1],
                cycles_BL[row, -1] % 1.0,
            )
            state.pulses = pulses_BL[row, -self.hop :]
        return torch.cat([kept_BH, pulses_BL], dim=1).unfold(1, 2 * self.hop, self.hop)

    def _ramp(self, before_B: Tensor, values_BN: Tensor) -> Tensor:
        """Interpolate linearly to each frame's value from the previous one: `[B, N * H]`."""
        previous = torch.cat([before_B[:, None], values_BN[:, :-1]], dim=1)[..., None]
        fraction = torch.arange(1, self.hop + 1, device=before_B.device) / self.hop
        return (previous + (values_BN[..., None] - previous) * fraction).flatten(1)


def _cosines(cycles: Tensor, count: Tensor) -> Tensor:
    """Return the sum of the cosines of the first `count` harmonics (the Dirichlet kernel)."""
    angle = 2 * math.pi * cycles
    denominator = (angle / 2).sin()
    at_peak = denominator.abs() < 1e-4
    kernel = ((count + 0.5) * angle).sin() / torch.where(at_peak, 1.0, denominator)
    return torch.where(at_peak, count, (kernel - 1) / 2)


def _fill_unvoiced(before_B: Tensor, pitch_BN: Tensor) -> Tensor:
    """Fill frames without a pitch with the previous pitch."""
    filled, last = [], before_B
    for value in pitch_BN.unbind(1):
        last = torch.where(value > 0, value.clamp(min=LOWEST), last)
        filled.append(last)
    return torch.stack(filled, dim=1)


def _white_noise(seed: int, first: int, frames: int, hop: int) -> Tensor:
    """Return noise `[frames, 2 hop]` that depends on the seed and the frame alone."""
    rows = [
        torch.randn(2 * hop, generator=torch.Generator().manual_seed(seed * 1_000_003 + first + i))
        for i in range(frames)
    ]
    return torch.stack(rows)
