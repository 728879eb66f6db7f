"""Define cases of audio: log-mel spectra and the convolutions of codecs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.audio.codec_conv import convolve
from motet_kernels.audio.log_mel import log_mel, log_mel_torch
from motet_kernels.audio.mel_tables import MelTables
from motet_kernels.audio.packed_conv import Activation, PackedConv

from .case import Case, Sizes, compiled, nbytes_of, random

RATE, WINDOW, HOP, BANDS = 16_000, 400, 160, 128


def spectra(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    samples_BN = torch.randn(sizes.encoders, sizes.seconds * RATE or 2 * WINDOW, device=device)
    filters_FM = torch.rand(WINDOW // 2 + 1, BANDS, device=device)
    tables = MelTables.of(torch.hann_window(WINDOW, device=device), filters_FM, HOP)
    frames = samples_BN.numel() // HOP
    operations = 2 * frames * (2 * WINDOW + BANDS) * len(filters_FM)
    peers = compiled(device, log_mel_torch, samples_BN, tables)
    name = f"{sizes.encoders} x {sizes.seconds} s"
    yield Case(
        name,
        partial(log_mel, samples_BN, tables),
        peers,
        nbytes_of(samples_BN) + 4 * frames * BANDS,
        operations,
    )


def convolutions(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield convolutions of Mimi's decoder: ELU, then 7 taps, or upsampling by 4."""
    channels = min(sizes.channels, 256)
    x_BNC = random(device, sizes.encoders, sizes.rows, channels)
    for name, module in (
        ("ELU, 7 taps", nn.Conv1d(channels, channels, 7, padding=3)),
        ("ELU, 4 steps of one", nn.ConvTranspose1d(channels, channels // 2, 8, stride=4)),
    ):
        conv = module.to(device, torch.bfloat16)
        packed = PackedConv.of(conv)
        out = convolve(x_BNC, packed, Activation("elu"))
        operations = 2 * sizes.encoders * sizes.rows * packed.taps.numel()
        run = partial(convolve, x_BNC, packed, Activation("elu"))
        yield Case(
            name,
            run,
            compiled(device, _by_torch, conv, x_BNC),
            nbytes_of(x_BNC, out, packed.taps),
            operations,
        )


@torch.no_grad()
def _by_torch(conv: nn.Module, x_BNC: Tensor) -> Tensor:
    convolved: Tensor = conv(F.elu(x_BNC.mT))
    return convolved.mT
