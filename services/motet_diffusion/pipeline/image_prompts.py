"""Take images as prompts with IP-Adapters (Ye et al. 2023), row by row: each picture has its own, or none.

diffusers reads the files and makes their layers; these are taken out of the denoiser again, whose
text attention gets `PromptedAttention` instead. That adds what an adapter makes of an image only to
the rows of its pictures, so that pictures with several, one or none share a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from motet_diffusion.engine.model_call import PromptTokens
from motet_diffusion.engine.request import ImagePrompt, PictureRequest
from motet_models.checkpoints import check_checkpoint, check_file
from motet_shared.errors import BadRequest, ConfigError

from .controlnets import check_name, named_path

_ENCODER = "image_encoder"
_MAX_SCALE = 10.0  # largest absolute scale; more is taken for a mistake
MAX_PROMPTS = 4  # of one picture


@dataclass(slots=True)
class _Adapter:
    """Hold an adapter: what turns an encoded image into tokens, and (keys, values) by layer."""

    projection: nn.Module
    layers: dict[str, tuple[nn.Module, nn.Module]]


class PassPrompts:
    """Hold the image prompts of the current pass: (name, rows, tokens, scale) each."""

    def __init__(self) -> None:
        self.active: list[tuple[str, slice, Tensor, float]] = []

    def set(self, pictures: Sequence[tuple[Sequence[PromptTokens], int]]) -> None:
        """Set the image prompts of each picture of the pass, and its number of rows."""
        self.active, start = [], 0
        for prompts, rows in pictures:
            for prompt in prompts:
                span = slice(start, start + rows)
                self.active.append((prompt.name, span, prompt.tokens, prompt.scale))
            start += rows


class PromptedAttention:
    """Replace the processor of one attention to text. layers: (keys, values) by adapter."""

    def __init__(
        self,
        base: Any,
        layers: Mapping[str, tuple[nn.Module, nn.Module]],
        current: PassPrompts,
    ):
        self._base, self._layers, self._current = base, layers, current

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Return the attention's output, as diffusers' IPAdapterAttnProcessor2_0 computes it."""
        if not self._current.active or encoder_hidden_states is None:
            out: Tensor = self._base(
                attn, hidden_states, encoder_hidden_states, attention_mask, temb
            )
            return out
        if attention_mask is not None:
            count, length, _ = encoder_hidden_states.shape
            attention_mask = attn.prepare_attention_mask(attention_mask, length, count)
            attention_mask = attention_mask.view(count, attn.heads, -1, attention_mask.shape[-1])
        query = _heads(attn, attn.to_q(hidden_states))
        key, value = attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states)
        mixed = scaled_dot_product_attention(
            query, _heads(attn, key), _heads(attn, value), attn_mask=attention_mask
        )
        mixed = mixed.transpose(1, 2).flatten(2).to(query.dtype)
        for name, rows, tokens, scale in self._current.active:
            to_key, to_value = self._layers[name]
            added = scaled_dot_product_attention(
                query[rows], _heads(attn, to_key(tokens)), _heads(attn, to_value(tokens))
            )
            mixed[rows] += scale * added.transpose(1, 2).flatten(2).to(query.dtype)
        result: Tensor = attn.to_out[1](attn.to_out[0](mixed))
        result = result / attn.rescale_output_factor
        return result


class ImagePrompts:
    """Hold the IP-Adapters of one model, by name.

    `given`: "name=path" each, a safetensors file beside the folder `image_encoder` of the encoder
    that it was trained with; all have the same one. Raises ConfigError for files that diffusers does
    not load, or that do not fit this model.
    """

    def __init__(self, pipeline: Any, given: Sequence[str]):
        self.current = PassPrompts()
        self._adapters: dict[str, _Adapter] = {}
        self._encoder: Any = None
        self._extractor: Any = None
        for item in given:
            name, path = named_path("ip_adapters", item, self._adapters)
            self._adapters[name] = self._load(f"ip_adapters={item}", pipeline, path)
        self._replace_processors(pipeline)

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

    def read(self, pipeline: Any, drawing: PictureRequest) -> tuple[PromptTokens, ...]:
        """Return a picture's image prompts; rows: without the image, and with it."""
        if not drawing.image_prompts:
            return ()
        from diffusers.models import ImageProjection

        vars(pipeline)["image_encoder"] = self._encoder
        vars(pipeline)["feature_extractor"] = self._extractor
        found = []
        for prompt in drawing.image_prompts:
            projection = self._adapters[prompt.name].projection
            wants_hidden = not isinstance(projection, ImageProjection)
            with torch.no_grad():
                given, none = pipeline.encode_image(
                    prompt.image, next(projection.parameters()).device, 1, wants_hidden
                )
                none = torch.zeros_like(given) if none is None else none
                tokens = projection(torch.cat([none, given]))
            found.append(PromptTokens(prompt.name, tokens, prompt.scale))
        return tuple(found)

    # -------------------------------------------------------------------------------------- loading
    def _load(self, where: str, pipeline: Any, path: Path) -> _Adapter:
        from diffusers.models.embeddings import (
            ImageProjection,
            IPAdapterFullImageProjection,
            IPAdapterPlusImageProjection,
        )

        unet = getattr(pipeline, "unet", None)
        if unet is None or not hasattr(pipeline, "load_ip_adapter"):
            family = type(pipeline).__name__
            raise ConfigError(f"{where}: no IP-Adapter is served for a {family}; leave it out")
        if path.suffix != ".safetensors" or not path.is_file():
            raise ConfigError(f"{where}: is no safetensors file; give one")
        check_file(path)
        if (path.parent / _ENCODER).is_dir():
            check_checkpoint(path.parent / _ENCODER)
        before, encoder = dict(unet.attn_processors), unet.encoder_hid_proj
        kind = unet.config.encoder_hid_dim_type
        try:
            pipeline.load_ip_adapter(
                str(path.parent),
                subfolder="",
                weight_name=path.name,
                local_files_only=True,
                low_cpu_mem_usage=False,
            )
        except (
            Exception
        ) as error:  # whatever diffusers raises for a file is the cause of its refusal
            first = (str(error).strip() or type(error).__name__).split("\n")[0]
            raise ConfigError(
                f"{where}: diffusers does not load it for this model: {first}"
            ) from None
        self._encoder, self._extractor = pipeline.image_encoder, pipeline.feature_extractor
        (projection,) = unet.encoder_hid_proj.image_projection_layers
        kinds = (ImageProjection, IPAdapterFullImageProjection, IPAdapterPlusImageProjection)
        if not isinstance(projection, kinds) or self._encoder is None:
            raise ConfigError(
                f"{where}: reads a {type(projection).__name__}, of faces perhaps; give one that"
                f" reads images with the encoder in {_ENCODER}"
            )
        layers = {
            name: (processor.to_k_ip[0], processor.to_v_ip[0])
            for name, processor in unet.attn_processors.items()
            if hasattr(processor, "to_k_ip")
        }
        unet.encoder_hid_proj, unet.config.encoder_hid_dim_type = encoder, kind
        unet.set_attn_processor(before)
        return _Adapter(projection.eval(), layers)

    def _replace_processors(self, pipeline: Any) -> None:
        """Replace the processors of all attentions that an adapter has layers for."""
        names = {name for adapter in self._adapters.values() for name in adapter.layers}
        if not names:
            return
        unet = pipeline.unet
        found = dict(unet.attn_processors)
        for name in names:
            layers = {
                adapter_name: adapter.layers[name]
                for adapter_name, adapter in self._adapters.items()
            }
            found[name] = PromptedAttention(found[name], layers, self.current)
        unet.set_attn_processor(found)


def _heads(attn: Any, x: Tensor) -> Tensor:
    """Return `[rows, tokens, channels]` as `[rows, heads, tokens, channels of a head]`."""
    heads: Tensor = x.unflatten(2, (attn.heads, -1)).transpose(1, 2)
    return heads
