"""Compute Whisper's log-mel features, with transformers' own extractor or on a GPU.

M mel bins · F feature frames of 10 ms · N samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from motet_asr.engine.engine import SAMPLE_RATE, Audio
from motet_kernels import gpu
from motet_kernels.audio.log_mel import log_mel
from motet_kernels.audio.mel_tables import MelTables
from motet_kernels.spans import upload

_RANGE = 8.0  # decades of power below the maximum at which features are clamped


class WhisperFeatures:
    """Compute features as a `WhisperFeatureExtractor` does, on the device of the model."""

    def __init__(self, extractor: Any, device: torch.device):
        self._extractor, self._device = extractor, device
        self._tables: MelTables | None = None
        if gpu.takes(torch.empty(0, device=device)) and not extractor.dither:
            filters_FM = torch.from_numpy(np.asarray(extractor.mel_filters)).to(device)
            self._tables = MelTables.of(
                torch.hann_window(extractor.n_fft, device=device), filters_FM, extractor.hop_length
            )

    def __call__(self, audio: Audio, samples: int) -> Tensor:
        """Return features [M, F] of a recording, padded with silence or cut to `samples`."""
        if self._tables is not None:
            audio_N = upload(
                F.pad(torch.tensor(audio[:samples]), (0, max(0, samples - len(audio)))),
                self._device,
            )
            return normalized(log_mel(audio_N[None], self._tables)[0])
        features: Tensor = self._extractor(
            audio,
            sampling_rate=SAMPLE_RATE,
            return_tensors="pt",
            padding="max_length",
            max_length=samples,
        ).input_features[0]
        return upload(features, self._device)


def normalized(logs_MF: Tensor) -> Tensor:
    """Normalize as in Whisper's training: relative to the maximum, around zero."""
    return (torch.maximum(logs_MF, logs_MF.amax() - _RANGE) + 4.0) / 4.0
