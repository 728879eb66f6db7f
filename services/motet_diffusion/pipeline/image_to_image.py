"""Change pictures with pipelines that only draw, such as PixArt's, by entering their loop midway.

As in SDEdit (Meng et al., 2021), the picture's latents get the noise of the schedule after its
first part, and the remaining steps are computed. With a mask, the area outside it is restored after
every step, with the noise of that step (RePaint's known region, Lugmayr et al., 2022, without its
resampling).
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from PIL.Image import Image
from torch import Generator, Tensor
from torch.nn.functional import interpolate

from motet_diffusion.engine.request import PictureRequest

STRENGTH = 0.8  # default, as in diffusers


def supports_sdedit(pipeline: Any) -> bool:
    """Return True if a pipeline takes latents and times, and its scheduler can add noise."""
    has_parameters = {"latents", "timesteps"} <= inspect.signature(
        pipeline.__call__
    ).parameters.keys()
    return (
        has_parameters
        and hasattr(pipeline, "prepare_latents")
        and hasattr(pipeline.scheduler, "add_noise")
    )


class SDEdit:
    """Change one picture. `vae` encodes it; `generator` gives the noise.

    The schedule is that of a whole picture, of which the pipeline runs the end, as diffusers' own
    image-to-image pipelines do. Times are not passed to the pipeline: most kinds of schedule (flow,
    Karras, exponential, beta) can be computed from a number of steps alone.
    """

    def __init__(self, pipeline: Any, vae: Any, drawing: PictureRequest, generator: Generator):
        self._scheduler = copy.deepcopy(pipeline.scheduler)
        self._scheduler.set_timesteps(drawing.steps)
        self._timesteps = self._scheduler.timesteps
        count = max(int(drawing.steps * (drawing.strength or STRENGTH)), 1)
        self._first = max(drawing.steps - count, 0) * getattr(self._scheduler, "order", 1)
        self._image_latents = _latents(pipeline, vae, drawing)
        noise = torch.randn(self._image_latents.shape, generator=generator, dtype=torch.float32)
        self._noise = noise.to(self._image_latents)
        self._mask = (
            None if drawing.mask is None else _latent_mask(drawing.mask, self._image_latents)
        )
        self._full_timesteps: Tensor | None = (
            None  # whole schedule, while the pipeline sees its end
        )
        self._start_midway(pipeline)

    def arguments(self) -> dict[str, Any]:
        """Return additional arguments of the pipeline's call."""
        return {"latents": self._noisy(0)}

    def begin(self, scheduler: Any) -> None:
        """Restore the scheduler's whole schedule before its first step.

        Multistep orders depend on the schedule's length.
        """
        if self._full_timesteps is not None:
            scheduler.timesteps, self._full_timesteps = self._full_timesteps, None

    def after(self, step: int, latents: Tensor) -> Tensor:
        """Return `latents` after `step` steps, with the original picture outside the mask."""
        if self._mask is None:
            return latents
        image_latents = (
            self._image_latents if self._first + step >= len(self._timesteps) else self._noisy(step)
        )
        return image_latents + self._mask * (latents - image_latents)

    def _start_midway(self, pipeline: Any) -> None:
        """Make the pipeline start midway in its schedule, with latents that are noisy already."""
        scheduler, set_timesteps, prepare = (
            pipeline.scheduler,
            pipeline.scheduler.set_timesteps,
            pipeline.prepare_latents,
        )

        @functools.wraps(set_timesteps)
        def set_last_timesteps(*args: Any, **kwargs: Any) -> None:
            set_timesteps(*args, **kwargs)
            self._full_timesteps = scheduler.timesteps
            scheduler.timesteps = self._full_timesteps[self._first :]
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(self._first)

        @functools.wraps(prepare)
        def prepared(*args: Any, **kwargs: Any) -> Any:
            # Some families scale given latents by the noise of the first step; replace them.
            prepared_latents = prepare(*args, **kwargs)
            return (
                self._noisy(0).to(prepared_latents)
                if isinstance(prepared_latents, Tensor)
                else prepared_latents
            )

        scheduler.set_timesteps, pipeline.prepare_latents = set_last_timesteps, prepared

    def _noisy(self, step: int) -> Tensor:
        index = self._first + step
        if hasattr(self._scheduler, "set_begin_index"):
            self._scheduler.set_begin_index(index)  # two steps may have the same time
        noisy: Tensor = self._scheduler.add_noise(
            self._image_latents, self._noise, self._timesteps[index : index + 1]
        )
        return noisy


def _latents(pipeline: Any, vae: Any, drawing: PictureRequest) -> Tensor:
    """Return the latents of the image, `[1, channels, h, w]` in the scale of the denoiser."""
    pixels = pipeline.image_processor.preprocess(
        drawing.image, height=drawing.height, width=drawing.width
    )
    encoded: Tensor = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    output: Tensor = (encoded - shift) * vae.config.scaling_factor
    return output


def _latent_mask(mask: Image, like: Tensor) -> Tensor:
    """Return `[1, 1, h, w]`: 1 where any of a latent's pixels is to be drawn anew."""
    pixels = torch.frombuffer(bytearray(mask.tobytes()), dtype=torch.uint8)
    masked = (pixels.reshape(1, 1, mask.height, mask.width) > 127).to(like)
    return (interpolate(masked, size=like.shape[-2:], mode="area") > 0).to(like)
