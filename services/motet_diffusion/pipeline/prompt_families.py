"""Read IP-Adapters of each family of denoisers as diffusers' own pipelines do: UNets, Flux, SD3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from motet_diffusion.engine.merge import Call, rows_of
from motet_diffusion.engine.model_call import PromptTokens
from motet_diffusion.engine.request import ImagePrompt

from .prompted_attention import PromptedAttention, PromptedFluxAttention, PromptedJointAttention

ENCODER = "image_encoder"  # folder beside the file of an adapter


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """Hold an image prompt of a picture.

    states: `[2, tokens, channels]`, without the image and with it. by_time: returns tokens of them
    and an embedding of the time, at the time of a step; None if the states are the tokens.
    """

    name: str
    states: Tensor
    scale: float
    by_time: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def at(self, call: Call, *, is_negative: bool) -> PromptTokens:
        """Return the tokens for the rows of a call; is_negative: it has the negative prompt alone."""
        rows = rows_of(call)
        states = self.states[:rows] if is_negative else self.states[-rows:]
        if self.by_time is None:
            return PromptTokens(self.name, states, self.scale)
        times = torch.as_tensor(call["timestep"], device=states.device).reshape(-1).expand(rows)
        tokens, time = self.by_time(states, times)
        return PromptTokens(self.name, tokens, self.scale, time)


class UNetPrompts:
    """Read adapters of Stable Diffusion and SDXL.

    attention: what replaces a processor. hidden: the denoiser's attribute for the projection.
    """

    attention: ClassVar[Any] = PromptedAttention
    hidden: ClassVar[str] = "encoder_hid_proj"

    def place(self, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
        """Return arguments of `load_ip_adapter` that say where the encoder of a folder is."""
        return {}

    def projection(self, denoiser: Any) -> Any:
        """Return the module that reads encoded images, as `load_ip_adapter` has left it."""
        (projection,) = denoiser.encoder_hid_proj.image_projection_layers
        return projection

    def kinds(self) -> tuple[type, ...]:
        """Return the kinds of projections that are served."""
        from diffusers.models.embeddings import (
            ImageProjection,
            IPAdapterFullImageProjection,
            IPAdapterPlusImageProjection,
        )

        return ImageProjection, IPAdapterFullImageProjection, IPAdapterPlusImageProjection

    def layers(self, processor: Any) -> Any:
        """Return what an attention has of an adapter; None if it has nothing."""
        if not hasattr(processor, "to_k_ip"):
            return None
        return processor.to_k_ip[0], processor.to_v_ip[0]

    def read(
        self, pipeline: Any, projection: Any, prompt: ImagePrompt, size: tuple[int, int]
    ) -> PicturePrompt:
        """Return an image prompt of the picture of `size` (width, height) that `pipeline` draws."""
        from diffusers.models import ImageProjection

        wants_hidden = not isinstance(projection, ImageProjection)
        device = next(projection.parameters()).device
        given, none = pipeline.encode_image(prompt.image, device, 1, wants_hidden)
        none = torch.zeros_like(given) if none is None else none
        return PicturePrompt(prompt.name, projection(torch.cat([none, given])), prompt.scale)


class FluxPrompts(UNetPrompts):
    """Read adapters of Flux, to which no image is a black one."""

    attention = PromptedFluxAttention

    def place(self, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
        encoder = str(folder / ENCODER)
        return {
            "image_encoder_pretrained_model_name_or_path": encoder,
            "image_encoder_dtype": dtype,
        }

    def read(
        self, pipeline: Any, projection: Any, prompt: ImagePrompt, size: tuple[int, int]
    ) -> PicturePrompt:
        device, black = next(projection.parameters()).device, np.zeros((*size, 3), np.uint8)
        none, given = (pipeline.encode_image(image, device, 1) for image in (black, prompt.image))
        return PicturePrompt(prompt.name, projection(torch.cat([none, given])), prompt.scale)


class SD3Prompts(UNetPrompts):
    """Read adapters of SD3.5, whose tokens depend on the time of a step."""

    attention = PromptedJointAttention
    hidden = "image_proj"

    def place(self, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
        return {"image_encoder_folder": str((folder / ENCODER).resolve())}

    def projection(self, denoiser: Any) -> Any:
        return denoiser.image_proj

    def kinds(self) -> tuple[type, ...]:
        from diffusers.models.embeddings import IPAdapterTimeImageProjection

        return (IPAdapterTimeImageProjection,)

    def layers(self, processor: Any) -> Any:
        return processor if hasattr(processor, "norm_ip") else None

    def read(
        self, pipeline: Any, projection: Any, prompt: ImagePrompt, size: tuple[int, int]
    ) -> PicturePrompt:
        given = pipeline.encode_image(prompt.image, next(projection.parameters()).device)
        states = torch.cat([torch.zeros_like(given), given])
        return PicturePrompt(prompt.name, states, prompt.scale, projection)


_FAMILIES: dict[str, type[UNetPrompts]] = {
    "UNet2DConditionModel": UNetPrompts,
    "FluxTransformer2DModel": FluxPrompts,
    "SD3Transformer2DModel": SD3Prompts,
}


def prompt_family(denoiser: Any) -> UNetPrompts | None:
    """Return what reads the IP-Adapters of a denoiser; None if nothing does."""
    kind = _FAMILIES.get(type(denoiser).__name__)
    return None if kind is None else kind()
