"""Harmonics and noise: samples from a pitch, and from how loud the harmonics and the noise are in each band.

A voice is a pulse train through the throat plus air: both are one smooth envelope each. The harmonics go on in phase
from frame to frame and the noise is added with overlap, so a sentence sounds the same however its frames are cut. It is
differentiable, and its loss is one of spectra: phases are free.

Shapes: B sentences, N acoustic frames, M bands, K harmonics, L samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MOST_HARMONICS = 120
TOGETHER = 24  # harmonics that are computed at once
LOWEST = 55.0  # Hz
QUIET = -12.0  # a log amplitude that is silence


class Controls(NamedTuple):
    """What the synthesizer is told per acoustic frame: pitch in Hz [B, N] (0: unvoiced), log amplitudes [B, N, M]."""

    pitch: Tensor
    harmonic: Tensor
    noise: Tensor


@dataclass(slots=True)
class SynthState:
    """Of one sentence: the last frame's controls, the phase (in turns), and the noise that is not yet all out."""

    pitch: Tensor  # [], the last one there was
    voiced: Tensor  # [], 0 or 1
    harmonic: Tensor  # [M]
    phase: Tensor  # []
    tail: Tensor  # [hop]
    frames: int = 0


def to_mel(hertz: Tensor) -> Tensor:
    return 2595 * torch.log10(1 + hertz / 700)


class Synth:
    """Stateless itself: what it must remember of a sentence is a `SynthState`."""

    def __init__(self, sample_rate: int, hop: int, bands: int) -> None:
        self.rate, self.hop, self.bands = sample_rate, hop, bands
        self.top = float(to_mel(torch.tensor(sample_rate / 2)))
        self.window = torch.hann_window(2 * hop).sqrt()
        self.weights = self._interpolation(torch.linspace(0, sample_rate / 2, hop + 1))

    def begin(self) -> SynthState:
        start = torch.full((self.bands,), QUIET)
        return SynthState(
            torch.tensor(120.0), torch.zeros(()), start, torch.zeros((), dtype=torch.double), torch.zeros(self.hop)
        )

    def _interpolation(self, hertz: Tensor) -> Tensor:
        """`[M, …]`: how much each band counts at these frequencies."""
        place = to_mel(hertz) / self.top * (self.bands - 1)
        centres = torch.arange(self.bands).view(-1, *[1] * hertz.ndim)
        return (1 - (place - centres).abs()).clamp(min=0)

    def render(self, states: list[SynthState], controls: Controls, seeds: list[int]) -> Tensor:
        """The samples `[B, N * hop]` of the next N frames of each sentence; its state goes on."""
        voiced = (controls.pitch > 0).float()
        before = torch.stack([state.pitch for state in states])
        pitch = _held(before, controls.pitch.detach())
        samples = self._harmonics(states, before, pitch, controls.harmonic, voiced)
        samples = samples + self._noise(states, controls, seeds)
        for row, state in enumerate(states):
            state.pitch, state.voiced = pitch[row, -1], voiced[row, -1]
            state.harmonic = controls.harmonic[row, -1].detach()
            state.frames += pitch.shape[1]
        return samples

    def _ramp(self, before: Tensor, values: Tensor) -> Tensor:
        """Linear from each frame's value [B, N, …] to the next, from the one before the first: [B, N * hop, …]."""
        previous = torch.cat([before[:, None], values[:, :-1]], dim=1)[:, :, None]
        share = (torch.arange(1, self.hop + 1) / self.hop).view(-1, *[1] * (values.ndim - 2))
        return (previous + (values[:, :, None] - previous) * share).flatten(1, 2)

    def _harmonics(
        self, states: list[SynthState], before_B: Tensor, pitch_BN: Tensor, harmonic_BNM: Tensor, voiced_BN: Tensor
    ) -> Tensor:
        pitch_BL = self._ramp(before_B, pitch_BN)
        turns_BL = (pitch_BL.double() / self.rate).cumsum(1) + torch.stack([state.phase for state in states])[:, None]
        for row, state in enumerate(states):
            state.phase = turns_BL[row, -1] % 1.0
        phase_BL = (2 * math.pi * (turns_BL % 1.0)).float()
        kept_BM = torch.stack([state.harmonic for state in states])
        gate_B = torch.stack([state.voiced for state in states])
        most = min(MOST_HARMONICS, int(self.rate / 2 / float(pitch_BL.min())))
        total_BL = torch.zeros_like(phase_BL)
        for first in range(1, most + 1, TOGETHER):
            orders = torch.arange(first, min(first + TOGETHER, most + 1))
            loud_BNK = self._loudness(pitch_BN, harmonic_BNM, orders) * voiced_BN[..., None]
            last_BK = self._loudness(before_B[:, None], kept_BM[:, None], orders)[:, 0] * gate_B[:, None]
            waves_BLK = torch.sin(phase_BL[..., None] * orders)
            total_BL = total_BL + (self._ramp(last_BK, loud_BNK) * waves_BLK).sum(-1)
        return total_BL

    def _loudness(self, pitch_BN: Tensor, harmonic_BNM: Tensor, orders_K: Tensor) -> Tensor:
        """The amplitudes `[B, N, K]` of the harmonics; those beyond half the sample rate are silent."""
        hertz = pitch_BN[..., None] * orders_K
        place = (to_mel(hertz) / self.top * (self.bands - 1)).clamp(0, self.bands - 1.001)
        low = place.long()
        share = place - low
        log = harmonic_BNM.gather(-1, low) * (1 - share) + harmonic_BNM.gather(-1, low + 1) * share
        return log.exp() * (hertz < self.rate / 2)

    def _noise(self, states: list[SynthState], controls: Controls, seeds: list[int]) -> Tensor:
        """White noise through the noise bands, windows of two hops that overlap by one."""
        frames = controls.noise.shape[1]
        raw = torch.stack(
            [_white(seed, state.frames, frames, self.hop) for seed, state in zip(seeds, states, strict=True)]
        )
        spectrum = torch.fft.rfft(raw * self.window)
        shaped = spectrum * (controls.noise @ self.weights).exp()
        pieces = torch.fft.irfft(shaped, 2 * self.hop) * self.window
        early, late = pieces[..., : self.hop], pieces[..., self.hop :]
        tails = torch.stack([state.tail for state in states])[:, None]
        for row, state in enumerate(states):
            state.tail = late[row, -1].detach()
        return (early + torch.cat([tails, late[:, :-1]], dim=1)).flatten(1)


def _held(before_B: Tensor, pitch_BN: Tensor) -> Tensor:
    """Frames without a pitch keep the one before."""
    held, last = [], before_B
    for value in pitch_BN.unbind(1):
        last = torch.where(value > 0, value.clamp(min=LOWEST), last)
        held.append(last)
    return torch.stack(held, dim=1)


def _white(seed: int, first: int, frames: int, hop: int) -> Tensor:
    """Noise `[frames, 2 hop]` that depends on the seed and the frame alone."""
    rows = [
        torch.randn(2 * hop, generator=torch.Generator().manual_seed(seed * 1_000_003 + first + i))
        for i in range(frames)
    ]
    return torch.stack(rows)
