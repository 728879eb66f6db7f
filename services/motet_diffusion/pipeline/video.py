"""Know pipelines that make videos: frame rates, lengths, and frames while the VAE decodes them."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
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
Sound = NDArray[np.float32]  # `[channels, samples]`


_COGVIDEOX_1_5_RATE = 16.0
_WAN_TI2V_RATE = 24.0  # of Wan 2.2's 5B model
_LTX2_FRAMES = 121  # that diffusers takes where a checkpoint predicts no length
_ASPECT = (16, 9)  # width and height


def family_of(pipeline: Any) -> VideoFamily | None:
    """Return the family of a pipeline that makes videos; None if it makes pictures."""
    family = FAMILIES.get(type(pipeline).__name__)
    if family is not None and family.odd and pipeline.transformer.config.patch_size_t:
        return family._replace(frame_rate=_COGVIDEOX_1_5_RATE)
    if family is not None and pipeline.config.get("expand_timesteps"):
        return family._replace(frame_rate=_WAN_TI2V_RATE)
    return family


def sound_rate(pipeline: Any) -> int:
    """Return the samples per second of the sound that a pipeline makes with its videos; 0: none."""
    family = family_of(pipeline)
    if family is None or not family.sound:
        return 0
    return int(pipeline.vocoder.config.output_sampling_rate)


def length_multiple(pipeline: Any) -> int:
    """Return what the frames behind the first come in multiples of."""
    family = family_of(pipeline)
    scale = getattr(pipeline, "vae_scale_factor_temporal", None)
    scale = scale or pipeline.vae_temporal_compression_ratio
    return int(scale) * (2 if family is not None and family.odd else 1)


def default_length(pipeline: Any) -> int:
    """Return the number of frames that a pipeline makes unasked."""
    default = inspect.signature(pipeline.__call__).parameters["num_frames"].default
    return int(default or pipeline.transformer.config.get("sample_frames") or _LTX2_FRAMES)


def default_size(pipeline: Any, scale: int) -> tuple[int, int]:
    """Return the (width, height) in pixels that a pipeline makes unasked; scale: pixels per latent."""
    if hasattr(pipeline, "target_size"):
        return _nearest_trained(pipeline, _ASPECT)
    parameters = inspect.signature(pipeline.__call__).parameters
    height, width = (parameters[name].default for name in ("height", "width"))
    if height and width:
        return int(width), int(height)
    config = pipeline.transformer.config
    return int(config.sample_width) * scale, int(config.sample_height) * scale


def size_for_image(
    pipeline: Any, image: tuple[int, int], default: tuple[int, int]
) -> tuple[int, int]:
    """Return the (width, height) in pixels of a video that begins with an image of this size.

    That is the size that the model is trained on of the nearest shape, where its pipeline knows
    these; else the image's own, or its shape in the area of `default` if that is less.
    """
    if hasattr(pipeline, "target_size"):
        return _nearest_trained(pipeline, image)
    scale = min(math.sqrt(default[0] * default[1] / (image[0] * image[1])), 1.0)
    return int(image[0] * scale), int(image[1] * scale)


def _nearest_trained(pipeline: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) of HunyuanVideo 1.5 that is nearest to a shape."""
    height, width = pipeline.video_processor.calculate_default_height_width(
        shape[1], shape[0], pipeline.target_size
    )
    return int(width), int(height)


def with_size(pipeline: Any, drawing: PictureRequest) -> None:
    """Have the pipeline of one video make the requested size, where it would choose one itself."""
    if hasattr(pipeline, "target_size"):
        processor = copy.copy(pipeline.video_processor)
        size = (drawing.height, drawing.width)
        processor.calculate_default_height_width = lambda *_args, **_kwargs: size
        vars(pipeline)["video_processor"] = processor


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
    if pipeline.config.get("boundary_ratio") and getattr(pipeline, "transformer_2", None) is None:
        return "its `boundary_ratio` needs a second denoiser (its component `transformer_2`)"
    if getattr(pipeline.transformer.config, "pos_embed_seq_len", None):
        return "it needs a last frame beside the first with every request (`pos_embed_seq_len`)"
    guider = getattr(pipeline, "guider", None)
    if guider is not None and _hooks(guider):
        kind = type(guider).__name__
        return f"its guider ({kind}) changes the denoiser during a video, which videos share"
    if list(inspect.signature(pipeline.scheduler.step).parameters)[1] != "timestep":
        kind = type(pipeline.scheduler).__name__
        return (
            f"its loop remembers steps for its scheduler ({kind}), where checkpoints do not reach"
        )
    return ""


def _hooks(guider: Any) -> bool:
    """Return True if a guider puts hooks into the denoiser for some of its calls."""
    from diffusers.guiders import BaseGuidance

    return type(guider).cleanup_models is not BaseGuidance.cleanup_models


def as_sound(samples: Tensor) -> Sound:
    """Return `[1, channels, samples]` as 32-bit floats. Raises InternalError if not finite."""
    sound: Sound = samples[0].float().cpu().contiguous().numpy()
    if not np.isfinite(sound).all():
        raise InternalError(
            "the sound has values that are not finite; use another dtype or guidance scale"
        )
    return sound


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
    whole = _unpatchify(vae)

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        on_part(whole(output[0] if isinstance(output, tuple) else output))

    def decode(*args: Any, **kwargs: Any) -> Any:
        handle = vae.decoder.register_forward_hook(hook)
        try:
            return vae.decode(*args, **kwargs)
        finally:
            handle.remove()

    return decode


def _unpatchify(vae: Any) -> Callable[[Tensor], Tensor]:
    """Return what a VAE does with its decoder's output: Wan 2.2's puts pixels out of channels."""
    patch = getattr(vae.config, "patch_size", None)
    if type(vae).__name__ != "AutoencoderKLWan" or not patch:
        return lambda output: output
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    return functools.partial(unpatchify, patch_size=patch)


def decodes_in_parts(vae: Any) -> bool:
    """Return True if the outputs of a VAE's decoder, one after the other, are its video.

    They are not where tiles overlap: HunyuanVideo's, of videos that are longer than the one here.
    """
    if any(getattr(vae, name, False) for name in ("use_framewise_decoding", "use_tiling")):
        return False
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
