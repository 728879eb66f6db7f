"""Know pipelines that make videos: frame rates, lengths, and frames while the VAE decodes them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet_diffusion.engine.request import PictureRequest
from motet_models.video_support import FAMILIES, VideoFamily
from motet_shared.errors import InternalError

log = logging.getLogger(__name__)
Frames = NDArray[np.uint8]  # `[frames, height, width, 3]`


_COGVIDEOX_1_5_RATE = 16.0


def family_of(pipeline: Any) -> VideoFamily | None:
    """Return the family of a pipeline that makes videos; None if it makes pictures."""
    family = FAMILIES.get(type(pipeline).__name__)
    if family is not None and family.odd and pipeline.transformer.config.patch_size_t:
        return family._replace(frame_rate=_COGVIDEOX_1_5_RATE)
    return family


def length_multiple(pipeline: Any) -> int:
    """Return what the frames behind the first come in multiples of."""
    family = family_of(pipeline)
    scale = getattr(pipeline, "vae_scale_factor_temporal", None)
    scale = scale or pipeline.vae_temporal_compression_ratio
    return int(scale) * (2 if family is not None and family.odd else 1)


def default_length(pipeline: Any) -> int:
    """Return the number of frames that a pipeline makes unasked."""
    default = inspect.signature(pipeline.__call__).parameters["num_frames"].default
    return int(default or pipeline.transformer.config.sample_frames)


def default_size(pipeline: Any, scale: int) -> tuple[int, int]:
    """Return the (width, height) in pixels that a pipeline makes unasked; scale: pixels per latent."""
    parameters = inspect.signature(pipeline.__call__).parameters
    height, width = (parameters[name].default for name in ("height", "width"))
    if height and width:
        return int(width), int(height)
    config = pipeline.transformer.config
    return int(config.sample_width) * scale, int(config.sample_height) * scale


def unpacked(pipeline: Any, latents: Tensor, drawing: PictureRequest) -> Tensor:
    """Return LTX's latents `[1, tokens, channels]` as `[1, channels, frames, height, width]`."""
    scale = pipeline.vae_spatial_compression_ratio
    video: Tensor = pipeline._unpack_latents(
        latents,
        (drawing.frames - 1) // pipeline.vae_temporal_compression_ratio + 1,
        drawing.height // scale,
        drawing.width // scale,
        pipeline.transformer_spatial_patch_size,
        pipeline.transformer_temporal_patch_size,
    )
    return video


def cause_of(pipeline: Any) -> str:
    """Return why a loaded pipeline of a known family is not served; "" if it has to be tried."""
    if family_of(pipeline) is None:
        return ""
    if getattr(pipeline, "transformer_2", None) is not None:
        return "it has two denoisers (its component `transformer_2`)"
    if list(inspect.signature(pipeline.scheduler.step).parameters)[1] != "timestep":
        kind = type(pipeline.scheduler).__name__
        return (
            f"its loop remembers steps for its scheduler ({kind}), where checkpoints do not reach"
        )
    return ""


def as_frames(video: Tensor) -> Frames:
    """Return `[1, frames, 3, height, width]` in 0 to 1 as 8-bit RGB, rounded as in diffusers.

    Raises InternalError if there are NaNs or infinities.
    """
    pixels = video[0].float().cpu().permute(0, 2, 3, 1)
    if not bool(pixels.isfinite().all()):
        raise InternalError(
            "the video has values that are not finite; use another dtype or guidance scale"
        )
    frames: Frames = (pixels * 255).round().to(torch.uint8).numpy()
    return frames


def decode_in_parts(vae: Any, on_part: Callable[[Tensor], None]) -> Callable[..., Any]:
    """Return the VAE's `decode`, with `on_part` called for each output of its decoder, in order.

    on_part: gets `[1, 3, frames, height, width]` in -1 to 1, on the thread that decodes.
    """

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        on_part(output[0] if isinstance(output, tuple) else output)

    def decode(*args: Any, **kwargs: Any) -> Any:
        handle = vae.decoder.register_forward_hook(hook)
        try:
            return vae.decode(*args, **kwargs)
        finally:
            handle.remove()

    return decode


def decodes_in_parts(vae: Any) -> bool:
    """Return True if the outputs of a VAE's decoder, one after the other, are its video."""
    config = vae.config
    channels = getattr(config, "latent_channels", None) or config.z_dim
    noise = torch.randn(1, channels, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    parts: list[Tensor] = []
    try:
        with torch.no_grad():
            first = next(vae.parameters())
            video = decode_in_parts(vae, parts.append)(noise.to(first), return_dict=False)[0]
            return torch.equal(torch.cat(parts, 2).clamp(-1, 1), video.clamp(-1, 1))
    except Exception as error:  # a VAE that is decoded in another way gives its frames at the end
        log.info("frames come at the end: %s: %s", type(error).__name__, error)
        return False
