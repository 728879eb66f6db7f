"""Validate requests for a model: sizes, defaults, and the arguments of its pipelines."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.request import PictureRequest
from motet_shared.errors import BadRequest, ConfigError, PayloadTooLarge, UnsupportedParameter

from .image_to_image import STRENGTH, supports_sdedit
from .schedulers import names_for
from .video import (
    default_length,
    default_size,
    family_of,
    length_multiple,
    size_for_image,
    sound_rate,
)

DEFAULTS_FILE = "generation_config.json"  # beside model_index.json; diffusers has no such file
# Known names with their minimum values.
_MINIMUMS = {
    "num_inference_steps": 1,
    "guidance_scale": 0.0,
    "strength": 0.0,
    "max_sequence_length": 1,
    "frame_rate": 1.0,
    "num_frames": 1,
    "width": 1,
    "height": 1,
}
# Denoisers with a table of positions, and how many patches of a side their `pos_embed_max_size` stands for.
_PATCHES_PER_SIDE: dict[str, Callable[[int], int]] = {
    "AuraFlowTransformer2DModel": math.isqrt,
    "CogView3PlusTransformer2DModel": int,
    "OmniGenTransformer2DModel": int,
    "SD3Transformer2DModel": int,
}
_MAX_GROWTH = 64  # times the pixels of a video that names no size and length
_MAX_GUIDANCE = 100.0  # largest guidance scale; more is taken for a mistake


def kind_of(drawing: PictureRequest) -> str:
    """Return the kind of pipeline: "draw", "change" (with an image), "fill" (with a mask too)."""
    if drawing.mask is not None:
        return "fill"
    return "draw" if drawing.image is None else "change"


def vae_scale_of(pipeline: Any) -> int:
    """Return the number of pixels of a latent, per side."""
    scale = getattr(pipeline, "vae_scale_factor", None)
    scale = scale or getattr(pipeline, "vae_scale_factor_spatial", None)
    return int(scale or pipeline.vae_spatial_compression_ratio)


def folder_defaults(folder: Path) -> dict[str, float]:
    """Return the defaults that a model's folder declares; {} for most models.

    Raises ConfigError if the file is invalid.
    """
    file = folder / DEFAULTS_FILE
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:  # UnicodeDecodeError is one
        raise ConfigError(f"{file}: not valid JSON ({error}); correct or remove it") from None
    for name, value in found.items() if isinstance(found, dict) else [(DEFAULTS_FILE, found)]:
        minimum = _MINIMUMS.get(name)
        if minimum is None:
            raise ConfigError(
                f"{file}: {name}: not known; give an object with any of {', '.join(_MINIMUMS)}"
            )
        if (
            isinstance(value, bool)
            or not isinstance(value, (type(minimum), int))
            or not minimum <= value < math.inf
        ):
            raise ConfigError(f"{file}: {name}: {value!r}; give a number of at least {minimum}")
    return dict(found)


class Rules:
    """Validate and complete requests.

    `pipeline` is the folder's own; `pipelines` by kind; `denoiser_config` is the denoiser's config;
    `defaults` override those of the pipelines.
    """

    def __init__(
        self,
        config: EngineConfig,
        pipeline: Any,
        pipelines: Mapping[str, Any],
        denoiser_config: Any,
        defaults: Mapping[str, float],
    ):
        self._config, self._denoiser_config, self.pipeline = (
            config,
            denoiser_config,
            pipeline,
        )
        self._defaults = defaults
        self._family = family_of(pipeline)
        self._parameters = {
            kind: inspect.signature(p.__call__).parameters for kind, p in pipelines.items()
        }
        self._sdedit_kinds = (
            {"change", "fill"} - self._parameters.keys()
            if "draw" in self._parameters
            and self._family is None
            and supports_sdedit(self.pipeline)
            else set()
        )
        for kind in self._sdedit_kinds:
            self._parameters[kind] = self._parameters["draw"]

    @property
    def edits(self) -> list[str]:
        """Return the kinds of editing: changing pictures ("change"), and parts of them ("fill")."""
        return [kind for kind in self._parameters if kind != "draw"]

    @property
    def kinds(self) -> list[str]:
        """Return the kinds for which diffusers has a pipeline of this family."""
        return [kind for kind in self._parameters if kind not in self._sdedit_kinds]

    @property
    def is_video(self) -> bool:
        """Return True if the model makes videos, not pictures."""
        return self._family is not None

    @property
    def frame_rate(self) -> float:
        """Return the frames per second of the model's videos; 0 for pictures."""
        if self._family is None:
            return 0.0
        return float(self._defaults.get("frame_rate") or self._family.frame_rate)

    @property
    def sound_rate(self) -> int:
        """Return the samples per second of the sound of the model's videos; 0: they have none."""
        return sound_rate(self.pipeline)

    def uses_sdedit(self, drawing: PictureRequest) -> bool:
        """Return True if the picture is changed by entering the drawing pipeline midway."""
        return kind_of(drawing) in self._sdedit_kinds

    @property
    def size_multiple(self) -> int:
        """Return the number that width and height are multiples of, in pixels."""
        patch = getattr(self._denoiser_config, "patch_size", None)
        patch = patch[-1] if isinstance(patch, (list, tuple)) and self.is_video else patch
        patch = patch if isinstance(patch, int) else 1
        packed = 2 if hasattr(self.pipeline, "_unpack_latents") and not self.is_video else 1
        processor = getattr(self.pipeline, "image_processor", None)
        own = int(getattr(getattr(processor, "config", None), "vae_scale_factor", 1))
        return max(self.vae_scale * max(patch, packed), own)

    @property
    def max_side(self) -> int | None:
        """Return the pixels per side that the denoiser has positions for; None: any number."""
        denoiser = type(getattr(self.pipeline, "transformer", None)).__name__
        if (patches := _PATCHES_PER_SIDE.get(denoiser)) is None:
            return None
        config = self._denoiser_config
        return patches(config.pos_embed_max_size) * int(config.patch_size) * self.vae_scale

    @property
    def vae_scale(self) -> int:
        """Return the number of pixels of a latent, per side."""
        return vae_scale_of(self.pipeline)

    @property
    def default_size(self) -> tuple[int, int]:
        """Return (width, height) in pixels."""
        if self.is_video:
            width, height = default_size(self.pipeline, self.vae_scale)
            given = self._defaults
            return int(given.get("width", width)), int(given.get("height", height))
        size = getattr(self._denoiser_config, "sample_size", None)
        size = getattr(self.pipeline, "default_sample_size", None) if size is None else size
        height, width = size if isinstance(size, (list, tuple)) else (size or 64, size or 64)
        return int(width) * self.vae_scale, int(height) * self.vae_scale

    def completed(self, drawing: PictureRequest, kind: str = "") -> PictureRequest:
        """Return the request with defaults filled in, checked; `kind` if its image is not here yet.

        Raises BadRequest or a subclass that names the field. Computes nothing.
        """
        kind = kind or kind_of(drawing)
        self._check_kind(kind)
        self._check_scheduler(drawing.scheduler)
        width, height = self._size(drawing)
        steps = self._steps(drawing, kind)
        if drawing.negative_prompt and not self._takes_negative_prompt(kind):
            message = (
                "negative_prompt: the guidance of this model is part of its weights; leave it out"
            )
            raise UnsupportedParameter(message, param="negative_prompt")
        return replace(
            drawing,
            width=width,
            height=height,
            steps=steps,
            guidance_scale=self._guidance(drawing, kind),
            strength=None if self.is_video else self._strength(drawing, kind, steps),
            frames=self._frames(drawing, width * height),
        )

    def arguments(self, drawing: PictureRequest, generator: torch.Generator) -> dict[str, Any]:
        """Return the pipeline's `__call__` arguments for a completed request: those that it knows."""
        size = (drawing.width, drawing.height)
        kind = kind_of(drawing)
        known = self._parameters["draw" if kind in self._sdedit_kinds else kind]
        given = {
            "prompt": drawing.prompt,
            "negative_prompt": self._negative_prompt(drawing, kind),
            "width": drawing.width,
            "height": drawing.height,
            "num_inference_steps": drawing.steps,
            self._guidance_name(kind): drawing.guidance_scale,
            "generator": generator,
            "output_type": "pt",
            "image": None if drawing.image is None else drawing.image.resize(size),
            "mask_image": None if drawing.mask is None else drawing.mask.resize(size),
            "strength": drawing.strength,
            "max_sequence_length": self._config.text_length
            or self._defaults.get("max_sequence_length"),
            "use_resolution_binning": False,  # else PixArt draws in another size than requested
            "clean_caption": False,
            "max_area": drawing.width * drawing.height,  # else Kontext draws about 1024x1024
            "_auto_resize": False,  # else Kontext reads the image in about 1024x1024
            "output_resolution": math.isqrt(drawing.width * drawing.height),  # Qwen-Image 2.1's
            "use_kv_cache": False,  # of one picture, which others do not share
            "num_frames": drawing.frames or None,
            "frame_rate": self.frame_rate or None,
        }
        return {
            name: value for name, value in given.items() if name in known and value is not None
        } | self._distilled_times(drawing, known)

    def calls_per_step(self, drawing: PictureRequest) -> int:
        """Return 2 if the pipeline calls its denoiser for the negative prompt by itself, else 1."""
        name = self._guidance_name(kind_of(drawing))
        return 2 if name == "true_cfg_scale" and (drawing.guidance_scale or 0.0) > 1 else 1

    def _guidance_name(self, kind: str) -> str:
        """Return the parameter of classifier-free guidance, or of guidance within the weights."""
        is_distilled = getattr(self._denoiser_config, "guidance_embeds", False)
        if "true_cfg_scale" in self._parameters[kind] and not is_distilled:
            return "true_cfg_scale"
        if "distilled_guidance_scale" in self._parameters[kind]:
            return "distilled_guidance_scale"
        return "guidance_scale"

    def _takes_negative_prompt(self, kind: str) -> bool:
        return (
            "true_cfg_scale" not in self._parameters[kind]
            or self._guidance_name(kind) == "true_cfg_scale"
        )

    def _negative_prompt(self, drawing: PictureRequest, kind: str) -> str | None:
        """Return the negative prompt; None if empty, as some pipelines treat "" differently.

        Pipelines with `true_cfg_scale` guide only if they get one: a space, as their examples do.
        """
        guidance = drawing.guidance_scale or 0.0
        if self._guidance_name(kind) == "true_cfg_scale" and guidance > 1:
            return drawing.negative_prompt or " "
        return drawing.negative_prompt or None

    def _distilled_times(
        self, drawing: PictureRequest, known: Mapping[str, inspect.Parameter]
    ) -> dict[str, Any]:
        """Return the times of Sana Sprint, whose default is for two steps only."""
        is_changed = "intermediate_timesteps" in known and drawing.steps != 2
        return {"intermediate_timesteps": None} if is_changed else {}

    # --------------------------------------------------------------------------------------- checks
    def _check_scheduler(self, name: str) -> None:
        if not name:
            return
        if name not in (known := names_for(self.pipeline.scheduler)):
            found = f"give one of {', '.join(known)}" if known else "it has only its own"
            message = f"scheduler: {name[:40]!r} is not for this model; {found}"
            raise BadRequest(message, param="scheduler")

    def _check_kind(self, kind: str) -> None:
        if kind not in self._parameters:
            family = type(self.pipeline).__name__
            name = f"{self._config.model_name} ({family})"
            if kind == "draw":
                message = f"image: {name} only changes pictures; send one"
                raise BadRequest(message, param="image")
            if kind == "fill" and "change" in self._parameters:
                message = f"mask: {name} changes whole pictures only; leave the mask out"
                raise UnsupportedParameter(message, param="mask")
            message = f"image: {name} does not change pictures; leave it out"
            raise UnsupportedParameter(message, param="image")

    def _size(self, drawing: PictureRequest) -> tuple[int, int]:
        default = self.default_size if drawing.image is None else drawing.image.size
        if drawing.image is not None:
            if self.is_video:
                default = size_for_image(self.pipeline, drawing.image.size, self.default_size)
            default = (
                max(default[0] // self.size_multiple, 1) * self.size_multiple,
                max(default[1] // self.size_multiple, 1) * self.size_multiple,
            )
        width, height = drawing.width or default[0], drawing.height or default[1]
        if width * height > self._config.max_pixels:
            message = (
                f"size: {width}x{height} is more than {self._config.max_pixels} pixels (max_pixels)"
            )
            raise PayloadTooLarge(message, param="size")
        if width < 1 or height < 1 or width % self.size_multiple or height % self.size_multiple:
            message = f"size: {width}x{height}; width and height must be multiples of {self.size_multiple}, above 0"
            raise BadRequest(message, param="size")
        if (side := self.max_side) is not None and max(width, height) > side:
            message = (
                f"size: {width}x{height}; this model has positions for {side}x{side} at the most"
            )
            raise BadRequest(message, param="size")
        return width, height

    def _frames(self, drawing: PictureRequest, pixels: int) -> int:
        """Return the number of frames of a video: what is asked for, to the nearest that it can have.

        pixels: of a frame.
        """
        if not self.is_video:
            if drawing.seconds or drawing.frames:
                message = f"seconds: {self._config.model_name} makes pictures, not videos"
                raise BadRequest(f"{message}; leave it out", param="seconds")
            return 0
        if not 0 <= drawing.seconds < math.inf:
            raise BadRequest(f"seconds: {drawing.seconds}; give more than 0", param="seconds")
        wanted = drawing.frames or drawing.seconds * self.frame_rate
        limit, multiple = self._config.max_frames, length_multiple(self.pipeline)
        unasked = self._defaults.get("num_frames") or default_length(self.pipeline)
        wanted = wanted or min(unasked, limit)
        if wanted > limit:
            most = f"{limit / self.frame_rate:.3g} seconds ({limit} frames, max_frames)"
            raise PayloadTooLarge(f"seconds: give at most {most}", param="seconds")
        most_pixels = _MAX_GROWTH * math.prod(self.default_size) * unasked
        if pixels * wanted > most_pixels:
            raise PayloadTooLarge(
                f"size: a video of this model has at most {most_pixels} pixels in all its frames,"
                f" {_MAX_GROWTH} times those of one that names no size and length; ask for smaller"
                " or fewer frames",
                param="size",
            )
        return max(round((wanted - 1) / multiple), 1) * multiple + 1

    def _steps(self, drawing: PictureRequest, kind: str) -> int:
        limit = self._config.max_steps
        steps = (
            drawing.steps
            or self._config.steps
            or min(self._default(kind, "num_inference_steps", 20), limit)
        )
        if not 1 <= steps <= limit:
            raise BadRequest(f"steps: {steps}; give 1 to {limit} (max_steps)", param="steps")
        return steps

    def _guidance(self, drawing: PictureRequest, kind: str) -> float:
        guidance = drawing.guidance_scale
        if guidance is None:
            default = self._config.guidance
            guidance = (
                default
                if default >= 0
                else float(self._default(kind, self._guidance_name(kind), 0.0))
            )
        if not 0 <= guidance <= _MAX_GUIDANCE:
            raise BadRequest(
                f"guidance_scale: {guidance}; give 0 to {_MAX_GUIDANCE:.0f}", param="guidance_scale"
            )
        return guidance

    def _strength(self, drawing: PictureRequest, kind: str, steps: int) -> float:
        strength = drawing.strength
        if strength is None:
            strength = float(self._default(kind, "strength", STRENGTH))
        if not 0 < strength <= 1:
            raise BadRequest(f"strength: {strength}; give more than 0, at most 1", param="strength")
        if strength * steps < 1 and kind != "draw":
            message = f"strength: {strength} of {steps} steps is less than one; raise either"
            raise BadRequest(message, param="strength")
        return strength

    def _default(self, kind: str, name: str, fallback: Any) -> Any:
        """Return the default of the model's folder, else the pipeline's, else `fallback`."""
        listed = "guidance_scale" if name.endswith(("cfg_scale", "guidance_scale")) else name
        if listed in self._defaults:
            return self._defaults[listed]
        if listed == "guidance_scale" and getattr(self.pipeline, "guider", None) is not None:
            return self.pipeline.guider.guidance_scale
        parameter = self._parameters[kind].get(name)
        default = None if parameter is None else parameter.default
        return fallback if default in (None, inspect.Parameter.empty) else default
