"""Compute log-mel spectra as Whisper does (Radford et al. 2022).

The steps are frames, window, power spectrum, mel bands, logarithm. The Fourier transform is a
product with two tables, which is affordable for frames of a few hundred samples: the window is
folded into the tables, and the mel bands are a third product.

Shapes: B recordings, N samples, T frames, W samples of a frame, F frequencies, M bands.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.audio.mel_tables import FLOOR, MelTables
from motet_kernels.runtime.errors import KernelError


def log_mel(samples_BN: Tensor, tables: MelTables) -> Tensor:
    """Return log10 of the power in each band, float32 `[B, M, T]`, T = N // hop.

    Power is at least FLOOR. Frame t is centred on sample `t · hop`; the signal is reflected at both
    ends. Samples are float32, and more than half a frame. Raises `KernelError` on others.
    """
    width = len(tables.cosines_WF)
    if (
        samples_BN.dtype != torch.float32
        or samples_BN.dim() != 2
        or samples_BN.device != tables.cosines_WF.device
    ):
        found = f"{samples_BN.dtype} {list(samples_BN.shape)} on {samples_BN.device}"
        raise KernelError(
            f"samples_BN: {found} must be float32 [B, N] on {tables.cosines_WF.device}, as the tables"
        )
    if samples_BN.shape[1] <= width // 2:
        raise KernelError(
            f"samples_BN: {samples_BN.shape[1]} samples must be more than {width // 2}, half a frame"
        )
    if gpu.takes(samples_BN):
        from motet_kernels.gpu.audio import log_mel as kernels

        return kernels.log_mel(samples_BN, tables)
    return log_mel_torch(samples_BN, tables)


def log_mel_torch(samples_BN: Tensor, tables: MelTables) -> Tensor:
    """Compute `log_mel` in torch: its twin."""
    width, count = len(tables.cosines_WF), samples_BN.shape[1] // tables.hop
    padded_B1N = F.pad(samples_BN[:, None], (width // 2, width // 2), mode="reflect")
    frames_BTW = padded_B1N[:, 0].unfold(1, width, tables.hop)[:, :count]
    cosines, sines, filters = (
        table.to(samples_BN.dtype)
        for table in (tables.cosines_WF, tables.sines_WF, tables.filters_FM)
    )
    power_BTF = (frames_BTW @ cosines) ** 2 + (frames_BTW @ sines) ** 2
    return (power_BTF @ filters).clamp(min=FLOOR).log10().mT
