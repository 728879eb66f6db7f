"""Changing pictures with pipelines that only draw, such as PixArt's: the loop is entered in its middle.

As in SDEdit (Meng et al., 2021): the picture's latents get as much noise as there would be after the first part of the
steps, and the rest of them is made. With a mask, what lies outside it is put back after every step, with the noise of
that step (RePaint's known region, Lugmayr et al., 2022, without its resampling).
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from PIL.Image import Image
from torch import Generator, Tensor
from torch.nn.functional import interpolate

from .drawing import Drawing

STRENGTH = 0.8  # where a request names none, as in diffusers


def can_reenter(pipeline: Any) -> bool:
    """Whether a pipeline takes latents and times, and its scheduler can say how noisy they are."""
    scheduler = pipeline.scheduler
    takes = {"latents", "timesteps"} <= inspect.signature(pipeline.__call__).parameters.keys()
    sets = "timesteps" in inspect.signature(scheduler.set_timesteps).parameters
    return takes and sets and hasattr(scheduler, "add_noise")


class Reentry:
    """One picture that is changed. `vae` encodes it; `generator` gives the noise."""

    def __init__(self, pipeline: Any, vae: Any, drawing: Drawing, generator: Generator):
        self._scheduler = copy.deepcopy(pipeline.scheduler)
        self._scheduler.set_timesteps(drawing.steps)
        count = max(int(drawing.steps * (drawing.strength or STRENGTH)), 1)
        self._times = self._scheduler.timesteps[-count:]
        self._known = _latents(pipeline, vae, drawing)
        noise = torch.randn(self._known.shape, generator=generator, dtype=torch.float32)
        self._noise = noise.to(self._known)
        self._mask = None if drawing.mask is None else _where(drawing.mask, self._known)

    def arguments(self) -> dict[str, Any]:
        """What the pipeline is called with besides."""
        return {"latents": self._noisy(0), "timesteps": self._times.tolist()}

    def after(self, step: int, latents: Tensor) -> Tensor:
        """`latents` after so many steps, with the picture itself outside the mask."""
        if self._mask is None:
            return latents
        known = self._known if step >= len(self._times) else self._noisy(step)
        return known + self._mask * (latents - known)

    def _noisy(self, step: int) -> Tensor:
        noisy: Tensor = self._scheduler.add_noise(self._known, self._noise, self._times[step : step + 1])
        return noisy


def _latents(pipeline: Any, vae: Any, drawing: Drawing) -> Tensor:
    """`[1, channels, h, w]` of the image, in the scale of the denoiser."""
    pixels = pipeline.image_processor.preprocess(drawing.image, height=drawing.height, width=drawing.width)
    first = next(vae.parameters())
    encoded: Tensor = vae.encode(pixels.to(first)).latent_dist.mode()
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    return (encoded - shift) * vae.config.scaling_factor


def _where(mask: Image, like: Tensor) -> Tensor:
    """`[1, 1, h, w]`: 1 where the picture is drawn anew, also where only a part of a latent's pixels is."""
    pixels = torch.frombuffer(bytearray(mask.tobytes()), dtype=torch.uint8)
    white = (pixels.reshape(1, 1, mask.height, mask.width) > 127).to(like)
    return (interpolate(white, size=like.shape[-2:], mode="area") > 0).to(like)
