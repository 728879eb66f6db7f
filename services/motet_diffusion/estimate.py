"""What a picture will be, as far as one can tell in the middle of it: the finished latents, and colours of them.

A denoiser says with every step where it takes the picture to go. `estimate` is that, by the formulas of the scheduler's
own kind. `Colours` makes a small picture of latents with one matrix, thousands of times cheaper than the VAE.
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
    """The finished latents, as the denoiser's `output` for the noisy `sample` at `time` tells them."""
    if output.shape[1] != sample.shape[1] and output.ndim == 4:
        output = output[:, : sample.shape[1]]  # the rest is a variance
    kind = getattr(scheduler.config, "prediction_type", None)
    if kind == "sample":
        return output
    if not hasattr(scheduler, "alphas_cumprod") or kind == "flow_prediction":
        return sample - _sigma(scheduler, time) * output  # flow matching
    if hasattr(scheduler, "is_scale_input_called"):  # Euler and its kin: noise is added, not mixed in
        sigma = _sigma(scheduler, time)
        if kind == "v_prediction":
            return sample / (sigma**2 + 1) - output * sigma / (sigma**2 + 1) ** 0.5
        return sample - sigma * output
    alpha = scheduler.alphas_cumprod[int(torch.as_tensor(time).round())].to(sample)
    if kind == "v_prediction":
        return alpha**0.5 * sample - (1 - alpha) ** 0.5 * output
    return (sample - (1 - alpha) ** 0.5 * output) / alpha**0.5


def _sigma(scheduler: Any, time: Any) -> Tensor:
    """How much noise there is at a time of the schedule."""
    times = torch.as_tensor(scheduler.timesteps)
    index = getattr(scheduler, "step_index", None)
    if index is None:
        found = (times == torch.as_tensor(time).to(times)).nonzero()
        index = int(found[0]) if len(found) else 0
    return scheduler.sigmas[index]


class Colours:
    """Latents to colours by one matrix, fitted to what the VAE itself makes of soft coloured pictures."""

    def __init__(self, vae: Any, scale: int):
        """`scale`: pixels per latent. Encodes a few small pictures."""
        first = next(vae.parameters())
        pictures = _probes(scale).to(first)
        with torch.no_grad():
            encoded = vae.encode(pictures)
        latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0]
        colours = avg_pool2d(pictures.float(), pictures.shape[-1] // latents.shape[-1])
        known = _flat(latents.float().cpu())
        known = torch.cat([known, known.new_ones(len(known), 1)], 1)
        ridge = 1e-4 * len(known) * torch.eye(known.shape[1])  # without it, channels that say nothing say anything
        self._matrix = torch.linalg.solve(known.T @ known + ridge, known.T @ _flat(colours.cpu()))

    def picture(self, latents: Tensor, size: tuple[int, int]) -> Image.Image:
        """`latents` `[1, channels, h, w]` in the scale of the VAE, as a picture of `size` (width, height)."""
        cells = latents[0].float().cpu()
        colours = torch.einsum("chw,cd->dhw", cells, self._matrix[:-1]) + self._matrix[-1, :, None, None]
        pixels = ((colours.clamp(-1, 1) + 1) * 127.5).nan_to_num().round().to(torch.uint8)
        small = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        return small.resize(size, Image.Resampling.BICUBIC)


def _probes(scale: int) -> Tensor:
    """Pictures in -1 to 1 whose colours change slowly, always the same: `[_PROBES, 3, side, side]`."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(_PROBES, 3, 3, 3, generator=generator) * 2 - 1
    side = scale * _PROBE_CELLS
    return interpolate(corners, size=(side, side), mode="bilinear", align_corners=True)


def _flat(maps: Tensor) -> Tensor:
    """`[n, channels, h, w]` as `[n h w, channels]`."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2)
