"""Compute the codec's features every 10 ms: log-mel bands, and pitch by autocorrelation."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torchaudio.compliance.kaldi import get_mel_banks
from torchaudio.functional import spectrogram

Wave = NDArray[np.float32]
WINDOW = 960  # samples per band frame
TWO_PERIODS = 1320  # samples per pitch frame
BRIEF = 3  # frames; shorter voiced runs count as unvoiced
LOWEST, HIGHEST = 60.0, 420.0  # Hz
CANDIDATES = 5


@cache
def filters(rate: int, size: int, bands: int) -> Tensor:
    """Return triangular filters `[size // 2 + 1, bands]`, equally wide on the mel scale."""
    found, _ = get_mel_banks(bands, size, rate, 0.0, rate / 2, 100.0, -500.0, 1.0)
    filters: Tensor = functional.pad(found, (0, 1)).T.contiguous()  # its last frequency has none
    return filters


def bands(samples: Tensor, rate: int, hop: int, count: int) -> Tensor:
    """Return log band energies `[…, frames, count]` of samples `[…, L]`, a frame per hop."""
    size, window = 1024, torch.hann_window(WINDOW)
    power = spectrogram(samples, 0, window, size, hop, WINDOW, 2.0, False)
    power = power[..., : samples.shape[-1] // hop].mT
    return (power @ filters(rate, size, count) + 1e-6).log()


def pitch(samples: Wave, rate: int, hop: int) -> Wave:
    """Return Hz per frame, 0 where unvoiced: the smoothest path through autocorrelation peaks."""
    count, size = len(samples) // hop, 2048
    padded, taper = np.pad(samples, TWO_PERIODS // 2), np.hanning(TWO_PERIODS).astype(np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(padded, TWO_PERIODS)[::hop][:count] * taper
    window, shape = _autocorrelation(taper, size), _autocorrelation(frames, size)
    lags = np.arange(int(rate / HIGHEST), int(rate / LOWEST) + 1)
    energy = shape[:, 0]
    curve = shape[:, lags] / (energy[:, None] + 1e-9) * (window[0] / window[lags])
    score = curve - 0.08 * np.log2(
        lags / lags[0]
    )  # penalizes lower octaves, which correlate equally
    voiced = (curve.max(1) > 0.55) & (energy > 1e-3 * energy.max())
    return _path(score, lags, _lasting(voiced), rate)


def _autocorrelation(frames: Wave, size: int) -> Wave:
    """Return the autocorrelation of the last axis, by an FFT of `size`."""
    found: Wave = torch.fft.irfft(
        torch.fft.rfft(torch.from_numpy(frames), size).abs().square()
    ).numpy()
    return found


def _lasting(voiced: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Drop runs of voiced frames shorter than BRIEF."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], voiced, [False]))))
    kept = np.zeros_like(voiced)
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        kept[start:end] = end - start >= BRIEF
    return kept


def _path(
    score: NDArray[np.float32], lags: NDArray[np.int64], voiced: NDArray[np.bool_], rate: int
) -> Wave:
    """Choose among a few peaks per frame by the Viterbi algorithm."""
    peaks = np.zeros_like(score, bool)
    peaks[:, 1:-1] = (score[:, 1:-1] >= score[:, :-2]) & (score[:, 1:-1] > score[:, 2:])
    ranked = np.where(peaks, score, score - 10.0)
    best = np.argpartition(-ranked, CANDIDATES, axis=1)[:, :CANDIDATES]
    value = np.take_along_axis(ranked, best, 1)
    octave = np.log2(lags[best])
    jumps = (
        2.0
        * np.abs(octave[1:, :, None] - octave[:-1, None])
        * (voiced[1:] & voiced[:-1])[:, None, None]
    )
    total, back = value[0], np.zeros(best.shape, int)
    for i, jump in enumerate(jumps, start=1):
        paths = total - jump
        back[i] = paths.argmax(1)
        total = value[i] + paths.max(1)
    found, index = np.zeros(len(best), np.float32), int(total.argmax())
    for i in range(len(best) - 1, -1, -1):
        found[i] = rate / lags[best[i, index]] if voiced[i] else 0.0
        index = int(back[i, index])
    return found
