"""Take images as prompts with IP-Adapters (Ye et al. 2023), row by row: each picture has its own, or none.

diffusers reads the files and makes their layers; these are taken out of the denoiser again, whose
attention gets the processors of `prompted_attention` instead. These add what an adapter makes of an
image only to the rows of its pictures, so that pictures with several, one or none share a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from motet_diffusion.engine.request import ImagePrompt, PictureRequest
from motet_models.checkpoints import check_checkpoint, check_file
from motet_shared.errors import BadRequest, ConfigError

from .controlnets import check_name, named_path
from .prompt_families import ENCODER, PicturePrompt, UNetPrompts, prompt_family
from .prompted_attention import PassPrompts

_MAX_SCALE = 10.0  # largest absolute scale; more is taken for a mistake
MAX_PROMPTS = 4  # of one picture


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Hold an adapter: what reads an encoded image, and its part of each attention by name."""

    projection: Any
    layers: dict[str, Any]


class ImagePrompts:
    """Hold the IP-Adapters of one model, by name.

    `given`: "name=path" each, a safetensors file beside the folder `image_encoder` of the encoder
    that it was trained with; all have the same one. Raises ConfigError for files that diffusers does
    not load, or that do not fit this model.
    """

    def __init__(self, pipeline: Any, denoiser: Any, given: Sequence[str]):
        self.current = PassPrompts()
        self._adapters: dict[str, _Adapter] = {}
        self._denoiser, self._family = denoiser, prompt_family(denoiser)
        self._encoder: Any = None
        self._extractor: Any = None
        for item in given:
            where = f"ip_adapters={item}"
            name, path = named_path("ip_adapters", item, self._adapters)
            if self._family is None or not hasattr(pipeline, "load_ip_adapter"):
                family = type(pipeline).__name__
                raise ConfigError(f"{where}: no IP-Adapter is served for a {family}; leave it out")
            self._adapters[name] = self._load(where, self._family, pipeline, path)
        if self._adapters and self._family is not None:
            self._replace_processors(self._family)

    @property
    def names(self) -> list[str]:
        return list(self._adapters)

    def check(self, prompts: Sequence[ImagePrompt]) -> None:
        """Raise BadRequest if an adapter is unknown or repeated, or its scale is out of range."""
        if len(prompts) > MAX_PROMPTS:
            message = f"ip_adapters: {len(prompts)} are given; give at most {MAX_PROMPTS}"
            raise BadRequest(message, param="ip_adapters")
        for number, prompt in enumerate(prompts):
            where = f"ip_adapters[{number}]"
            check_name(where, prompt.name, self.names, "IP-Adapters")
            if not math.isfinite(prompt.scale) or abs(prompt.scale) > _MAX_SCALE:
                message = f"{where}.scale: {prompt.scale}; give {-_MAX_SCALE:g} to {_MAX_SCALE:g}"
                raise BadRequest(message, param=f"{where}.scale")

    def read(self, pipeline: Any, drawing: PictureRequest) -> tuple[PicturePrompt, ...]:
        """Return the image prompts of the picture that `pipeline` draws."""
        if not drawing.image_prompts or self._family is None:
            return ()
        vars(pipeline)["image_encoder"] = self._encoder
        vars(pipeline)["feature_extractor"] = self._extractor
        size = (drawing.width, drawing.height)
        with torch.no_grad():
            return tuple(
                self._family.read(pipeline, self._adapters[prompt.name].projection, prompt, size)
                for prompt in drawing.image_prompts
            )

    # -------------------------------------------------------------------------------------- loading
    def _load(self, where: str, family: UNetPrompts, pipeline: Any, path: Path) -> _Adapter:
        if path.suffix != ".safetensors" or not path.is_file():
            raise ConfigError(f"{where}: is no safetensors file; give one")
        check_file(path)
        if (path.parent / ENCODER).is_dir():
            check_checkpoint(path.parent / ENCODER)
        denoiser, like = self._denoiser, next(self._denoiser.parameters())
        before, hidden = dict(denoiser.attn_processors), getattr(denoiser, family.hidden, None)
        kind = denoiser.config.get("encoder_hid_dim_type")
        try:
            pipeline.load_ip_adapter(
                str(path.parent),
                subfolder="",
                weight_name=path.name,
                local_files_only=True,
                low_cpu_mem_usage=False,
                **family.place(path.parent, like.dtype),
            )
        except Exception as error:  # whatever diffusers raises for a file is the cause
            first = (str(error).strip() or type(error).__name__).split("\n")[0]
            raise ConfigError(
                f"{where}: diffusers does not load it for this model: {first}"
            ) from None
        self._encoder, self._extractor = pipeline.image_encoder, pipeline.feature_extractor
        projection = family.projection(denoiser)
        if not isinstance(projection, family.kinds()) or self._encoder is None:
            raise ConfigError(
                f"{where}: reads a {type(projection).__name__}, of faces perhaps; give one that"
                f" reads images with the encoder in {ENCODER}"
            )
        layers = {
            name: found
            for name, processor in denoiser.attn_processors.items()
            if (found := family.layers(processor)) is not None
        }
        for module in (projection, *denoiser.attn_processors.values()):
            if isinstance(module, torch.nn.Module):
                module.to(like).eval()
        setattr(denoiser, family.hidden, hidden)
        denoiser.config.encoder_hid_dim_type = kind
        denoiser.set_attn_processor(before)
        return _Adapter(projection, layers)

    def _replace_processors(self, family: UNetPrompts) -> None:
        """Replace the processors of all attentions that an adapter has layers for."""
        found = dict(self._denoiser.attn_processors)
        for name in {name for adapter in self._adapters.values() for name in adapter.layers}:
            layers = {
                adapter_name: adapter.layers[name]
                for adapter_name, adapter in self._adapters.items()
            }
            found[name] = family.attention(found[name], layers, self.current)
        self._denoiser.set_attn_processor(found)
