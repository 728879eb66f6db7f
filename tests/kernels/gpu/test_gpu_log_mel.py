"""Log-mel spectra in Triton against the twin in float64, and against what Whisper's extractor hears."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchaudio.transforms import MelSpectrogram
from transformers import WhisperFeatureExtractor

from motet_asr.models.whisper_features import WhisperFeatures
from motet_kernels import gpu
from motet_kernels.audio.log_mel import log_mel, log_mel_torch
from motet_kernels.audio.mel_tables import FLOOR, MelTables
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tables(device: torch.device, width: int, bands: int, hop: int) -> MelTables:
    return MelTables.of(
        torch.hann_window(width, device=device), noise(width // 2 + 1, bands).abs().to(device), hop
    )


@pytest.mark.parametrize(
    ("shape", "width", "bands", "hop"),
    [
        ((1, 11), 20, 3, 4),
        ((2, 100), 20, 17, 7),
        ((3, 65), 40, 5, 65),
        ((1, 500), 34, 20, 10),
        ((0, 50), 8, 2, 5),
    ],
    ids=str,
)
def test_bands_are_those_of_the_twin(
    device: torch.device, shape: tuple[int, int], width: int, bands: int, hop: int
) -> None:
    around = torch.full(
        (shape[0], shape[1] + 4, 2), math.nan
    )  # strided rows between what nobody may read
    around[:, 2:-2, 0] = noise(*shape)
    samples = around.to(device)[:, 2:-2, 0]
    given = tables(device, width, bands, hop)
    due = log_mel_torch(samples.double(), given)
    assert due.shape == (shape[0], bands, shape[1] // hop)
    torch.testing.assert_close(log_mel(samples, given).double(), due, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "bands", "hop", "scale"), [(400, 80, 160, "slaney"), (320, 40, 80, "htk")]
)
def test_the_twin_computes_torchaudio_s_spectrogram(
    width: int, bands: int, hop: int, scale: str
) -> None:
    reference = MelSpectrogram(
        16_000,
        width,
        hop_length=hop,
        n_mels=bands,
        norm=scale.replace("htk", "") or None,
        mel_scale=scale,
    )
    tables = MelTables.of(torch.hann_window(width), reference.mel_scale.fb, hop)
    samples = noise(2, 5000)
    due = reference(samples)[..., : samples.shape[1] // hop].clamp(min=FLOOR).log10()
    torch.testing.assert_close(log_mel_torch(samples, tables), due, rtol=1e-4, atol=1e-4)


def test_silence_is_the_floor(device: torch.device) -> None:
    assert (log_mel(torch.zeros(1, 60, device=device), tables(device, 20, 4, 5)) == -10).all()


def test_whisper_hears_what_its_extractor_hears(device: torch.device) -> None:
    extractor = WhisperFeatureExtractor(chunk_length=1)
    seconds = np.arange(3000) / 16_000
    audio = (np.sin(2 * np.pi * 440 * seconds) * 0.5 + noise(3000).numpy() * 0.01).astype(
        np.float32
    )
    for count in (3200, 1600):  # padded with silence, and cut
        found = WhisperFeatures(extractor, device)(audio, count)
        gpu.select("off")
        due = WhisperFeatures(extractor, torch.device("cpu"))(audio, count)
        gpu.select("on" if device.type == "cuda" else "interpret")
        assert found.shape == (80, count // 160)
        torch.testing.assert_close(found.cpu(), due, rtol=1e-4, atol=1e-4)


def test_bad_arguments_are_refused_by_name(device: torch.device) -> None:
    given = tables(device, 20, 4, 5)
    for samples in (
        torch.zeros(1, 10, device=device),
        torch.zeros(50, device=device),
        torch.zeros(1, 50).double(),
    ):
        with refuses(KernelError, "samples_BN"):
            log_mel(samples, given)
    for width, rows, hop, param in (
        (20, 10, 5, "filters_FM"),
        (21, 11, 5, "filters_FM"),
        (20, 11, 0, "hop"),
    ):
        with refuses(KernelError, param):
            MelTables.of(torch.hann_window(width), torch.zeros(rows, 4), hop)
