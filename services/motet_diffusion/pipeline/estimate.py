"""Estimate the finished picture in the middle of its loop: its latents, and their colours.

At every step a denoiser predicts where the picture is heading. `estimate` turns that into latents,
by the formulas of the scheduler's kind. `RGBPreview` turns latents into a small picture with one
matrix, thousands of times cheaper than the VAE.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

_PROBES = 8  # pictures that the matrix is fitted to
_PROBE_CELLS = 8  # latents of each side


def estimate(scheduler: Any, output: Tensor, time: Any, sample: Tensor) -> Tensor:
    """Return the finished latents predicted by the `output` for the noisy `sample` at `time`."""
    if output.shape[1] != sample.shape[1] and output.ndim == 4:
        output = output[:, : sample.shape[1]]  # further channels are a variance
    kind = getattr(scheduler.config, "prediction_type", None)
    if kind == "sample":
        return output
    if not hasattr(scheduler, "alphas_cumprod") or kind == "flow_prediction":
        return sample - _sigma(scheduler, time) * output  # flow matching
    if hasattr(scheduler, "is_scale_input_called"):  # Euler and similar: noise is added, not mixed
        sigma = _sigma(scheduler, time)
        if kind == "v_prediction":
            return sample / (sigma**2 + 1) - output * sigma / (sigma**2 + 1) ** 0.5
        return sample - sigma * output
    alpha: Tensor = scheduler.alphas_cumprod[int(torch.as_tensor(time).round())].to(sample)
    if kind == "v_prediction":
        return alpha**0.5 * sample - (1 - alpha) ** 0.5 * output
    return (sample - (1 - alpha) ** 0.5 * output) / alpha**0.5


def _sigma(scheduler: Any, time: Any) -> Tensor:
    """Return the noise level at a time of the schedule."""
    times = torch.as_tensor(scheduler.timesteps)
    index = getattr(scheduler, "step_index", None)
    if index is None:
        found = (times == torch.as_tensor(time).to(times)).nonzero()
        index = int(found[0]) if len(found) else 0
    sigma: Tensor = scheduler.sigmas[index]
    return sigma


class RGBPreview:
    """Convert latents to colours by a matrix, fitted to the VAE's latents of smooth pictures."""

    def __init__(self, vae: Any, scale: int):
        """Fit the matrix by encoding a few small pictures. `scale`: pixels per latent."""
        first = next(vae.parameters())
        pictures = _probes(scale).to(first)
        is_video = any(isinstance(module, torch.nn.Conv3d) for module in vae.modules())
        # HunyuanVideo 1.5's VAE reads one video at a time.
        batches = pictures[:, :, None].split(1) if is_video else [pictures]
        with torch.no_grad():
            latents = torch.cat([_mode(vae.encode(batch)) for batch in batches])
        latents = latents[:, :, 0] if is_video else latents
        rgb_preview = avg_pool2d(pictures.float(), pictures.shape[-1] // latents.shape[-1])
        known = _flat(latents.float().cpu())
        known = torch.cat([known, known.new_ones(len(known), 1)], 1)
        # Without the ridge, the factors of channels that carry no information are arbitrary.
        ridge = 1e-4 * len(known) * torch.eye(known.shape[1])
        self._matrix = torch.linalg.solve(
            known.T @ known + ridge, known.T @ _flat(rgb_preview.cpu())
        )

    def picture(self, latents: Tensor, size: tuple[int, int]) -> Image.Image:
        """Return `latents` `[1, channels, h, w]`, in VAE scale, as a picture of (width, height)."""
        cells = latents[0].float().cpu()
        rgb_preview = (
            torch.einsum("chw,cd->dhw", cells, self._matrix[:-1]) + self._matrix[-1, :, None, None]
        )
        pixels = ((rgb_preview.clamp(-1, 1) + 1) * 127.5).nan_to_num().round().to(torch.uint8)
        small = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        return small.resize(size, Image.Resampling.BICUBIC)


def _mode(encoded: Any) -> Tensor:
    """Return the latents of what a VAE has encoded."""
    mode: Tensor = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0]
    return mode


def _probes(scale: int) -> Tensor:
    """Return fixed pictures in -1 to 1 with slowly changing colours: `[_PROBES, 3, side, side]`."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(_PROBES, 3, 3, 3, generator=generator) * 2 - 1
    side = scale * _PROBE_CELLS
    return interpolate(corners, size=(side, side), mode="bilinear", align_corners=True)


def _flat(maps: Tensor) -> Tensor:
    """Return `[n, channels, h, w]` as `[n h w, channels]`."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2)
