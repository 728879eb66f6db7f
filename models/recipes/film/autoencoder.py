"""Run Wan's autoencoder over all frames of films at once, which trains several times as fast.

diffusers runs it in parts of four frames with cached features. Causal convolutions give the same
over the whole film; only the steps that change the number of frames are written again here.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify
from torch import Tensor, nn


class _WholeResample(WanResample):
    """Halve or double all frames but the first, which is kept."""

    def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = (0,)) -> Tensor:
        """Return `[B, C, F, H, W]` at its new size, as in parts where there is a cache."""
        if feat_cache is not None or not self.mode.endswith("3d"):
            result: Tensor = super().forward(x, feat_cache, feat_idx)
            return result
        is_film = x.shape[2] > 1
        if self.mode == "upsample3d" and is_film:
            doubled = self.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))
            x = torch.cat([x[:, :, :1], doubled.movedim(1, 3).flatten(2, 3)], 2)
        frames = x.shape[2]
        x = self.resample(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, frames))
        x = x.transpose(1, 2)
        if self.mode == "downsample3d" and is_film:
            x = torch.cat([x[:, :, :1], self.time_conv(x)], 2)
        return x


def _prepare(vae: AutoencoderKLWan) -> None:
    for module in vae.modules():
        if type(module) is WanResample:
            module.__class__ = _WholeResample


def time_kernels(vae: AutoencoderKLWan) -> list[nn.Conv3d]:
    """Return the convolutions that change the number of frames; a single picture needs none."""
    return [
        module.time_conv
        for module in vae.modules()
        if isinstance(module, WanResample) and module.mode.endswith("3d")
    ]


@torch.no_grad()
def start_still(vae: AutoencoderKLWan) -> None:
    """Set the steps that change the number of frames to keep the last frame, and to repeat it.

    What the autoencoder has learnt from pictures then holds for films in which nothing moves.
    """
    for kernel in time_kernels(vae):
        channels, weight = kernel.in_channels, kernel.weight
        weight.mul_(0.1)
        for first in range(0, len(weight), channels):
            weight[first : first + channels, :, -1, 0, 0] += torch.eye(channels)
        kernel.bias.zero_()


def encode(vae: AutoencoderKLWan, films: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance of the latents `[B, C, f, h, w]` of films `[B, 3, F, H, W]`."""
    _prepare(vae)
    moments = vae.quant_conv(vae.encoder(patchify(films, vae.config.patch_size)))
    mean, logvar = moments.chunk(2, dim=1)
    return mean, logvar


def decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Return films `[B, 3, F, H, W]`, about -1 to 1 and not clamped, of latents."""
    _prepare(vae)
    films: Tensor = unpatchify(vae.decoder(vae.post_quant_conv(latents)), vae.config.patch_size)
    return films
