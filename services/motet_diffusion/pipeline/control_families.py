"""Call the ControlNets of each family of denoisers as diffusers' own pipelines do: UNets, Flux, SD3.

Residuals are what a ControlNet adds within the denoiser, by parameter of the denoiser: a tensor, or
a tuple of them. Those of transformers are spread over all blocks here, so that ControlNets of
different depths share a pass.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from motet_diffusion.engine.merge import Call, rows_of
from motet_diffusion.engine.request import PictureRequest

_DOWN, _MIDDLE = "down_block_additional_residuals", "mid_block_additional_residual"
_BLOCKS, _SINGLE = "controlnet_block_samples", "controlnet_single_block_samples"
_JOINT = "block_controlnet_hidden_states"

Residuals = dict[str, Any]


class ControlFamily:
    """Serve the ControlNets of one kind of denoiser.

    network: diffusers' class of ControlNet. same: sizes that it and the denoiser have in common.
    shared: arguments of the denoiser that it gets too, the noisy latents first.
    """

    network: ClassVar[str]
    same: ClassVar[tuple[str, ...]]
    shared: ClassVar[tuple[str, ...]]

    def __init__(self, pipeline: Any):
        self._processor = pipeline.image_processor

    def cause(self, net: Any, denoiser: Any) -> str:
        """Return why a ControlNet of the denoiser's sizes is not served; "" if it is."""
        return ""

    def attach(self, net: Any, denoiser: Any) -> None:
        """Complete a ControlNet that has parts in common with the denoiser."""

    def generator(self, drawing: PictureRequest, generator: Generator) -> Generator:
        """Return what samples the latents of a picture's images; `generator` is the picture's."""
        return generator

    def read(
        self, net: Any, image: Any, pipeline: Any, drawing: PictureRequest, generator: Generator
    ) -> Tensor:
        """Return an image as the ControlNet takes it, one row or one for each row of a call."""
        raise NotImplementedError

    def call(self, net: Any, call: Call, image: Tensor) -> dict[str, Any]:
        """Return the ControlNet's call beside the denoiser's `call`."""
        shared = {name: call[name] for name in self.shared if call.get(name) is not None}
        return {
            **shared,
            "controlnet_cond": image.expand(rows_of(call), *image.shape[1:]),
            "return_dict": False,
        }

    def residuals(self, answer: Any) -> Residuals:
        """Return the residuals of a ControlNet's answer."""
        raise NotImplementedError

    def spread(self, net: Any, denoiser: Any, residuals: Residuals) -> Residuals:
        """Return the residuals for each block of the denoiser."""
        return residuals


class UNetControls(ControlFamily):
    """Serve `ControlNetModel`s of Stable Diffusion and SDXL, which read pixels in 0 to 1."""

    network = "ControlNetModel"
    same = ("cross_attention_dim", "block_out_channels", "addition_embed_type")
    shared = ("sample", "timestep", "encoder_hidden_states", "added_cond_kwargs")

    def __init__(self, pipeline: Any):
        from diffusers.image_processor import VaeImageProcessor

        self._processor = VaeImageProcessor(
            vae_scale_factor=pipeline.vae_scale_factor, do_convert_rgb=True, do_normalize=False
        )

    def cause(self, net: Any, denoiser: Any) -> str:
        if net.config.get("global_pool_conditions"):
            return "guesses without a prompt (global_pool_conditions); not served"
        return ""

    def read(
        self, net: Any, image: Any, pipeline: Any, drawing: PictureRequest, generator: Generator
    ) -> Tensor:
        pixels: Tensor = self._processor.preprocess(image, drawing.height, drawing.width)
        return pixels.to(next(net.parameters()))

    def call(self, net: Any, call: Call, image: Tensor) -> dict[str, Any]:
        # A denoiser that fills masks also gets the mask and the image, a ControlNet does not.
        narrow = call["sample"][:, : net.config.in_channels]
        return super().call(net, {**call, "sample": narrow}, image)

    def residuals(self, answer: Any) -> Residuals:
        down, middle = answer
        return {_DOWN: tuple(down), _MIDDLE: middle}


class FluxControls(ControlFamily):
    """Serve `FluxControlNetModel`s, which read pixels in -1 to 1, or packed latents.

    The latents are a sample of the VAE's distribution, drawn before the picture's noise.
    """

    network = "FluxControlNetModel"
    same = (
        "in_channels",
        "num_attention_heads",
        "attention_head_dim",
        "joint_attention_dim",
        "pooled_projection_dim",
    )
    shared = (
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "img_ids",
        "txt_ids",
        "guidance",
    )

    def cause(self, net: Any, denoiser: Any) -> str:
        if net.config.num_mode is not None:
            return "chooses one of its kinds by a mode (num_mode), which no request has"
        if net.config.guidance_embeds and not denoiser.config.guidance_embeds:
            return "has guidance_embeds True, the model False; it is another's"
        return ""

    def read(
        self, net: Any, image: Any, pipeline: Any, drawing: PictureRequest, generator: Generator
    ) -> Tensor:
        pixels = self._processor.preprocess(image, drawing.height, drawing.width)
        if net.input_hint_block is not None:
            return pixels.to(next(net.parameters()))  # type: ignore[no-any-return]
        config = pipeline.vae.config
        with torch.no_grad():
            posterior = pipeline.vae.encode(pixels.to(next(pipeline.vae.parameters()))).latent_dist
            latents = posterior.sample(generator)
        latents = (latents - config.shift_factor) * config.scaling_factor
        packed: Tensor = pipeline._pack_latents(latents, *latents.shape)
        return packed

    def call(self, net: Any, call: Call, image: Tensor) -> dict[str, Any]:
        if not net.config.guidance_embeds:
            call = {**call, "guidance": None}
        return super().call(net, call, image)

    def residuals(self, answer: Any) -> Residuals:
        found = zip((_BLOCKS, _SINGLE), answer, strict=True)
        return {name: tuple(samples) for name, samples in found if samples is not None}

    def spread(self, net: Any, denoiser: Any, residuals: Residuals) -> Residuals:
        counts = {
            _BLOCKS: len(denoiser.transformer_blocks),
            _SINGLE: len(denoiser.single_transformer_blocks),
        }
        spread = {}
        for name, samples in residuals.items():
            interval = math.ceil(counts[name] / len(samples))
            repeats = name == _BLOCKS and net.input_hint_block is not None
            spread[name] = tuple(
                samples[block % len(samples) if repeats else block // interval]
                for block in range(counts[name])
            )
        return spread


class SD3Controls(ControlFamily):
    """Serve `SD3ControlNetModel`s of SD3 and SD3.5, which read latents.

    diffusers samples these with torch's own generator, each row of guidance for itself. Here that
    is a fresh one with the seed of the picture, as if `torch.manual_seed` had been called with it.
    """

    network = "SD3ControlNetModel"
    same = (
        "in_channels",
        "patch_size",
        "num_attention_heads",
        "attention_head_dim",
        "pooled_projection_dim",
    )
    shared = ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections")

    def cause(self, net: Any, denoiser: Any) -> str:
        wide, own = net.config.joint_attention_dim, denoiser.config.joint_attention_dim
        if wide not in (None, own):
            return f"has joint_attention_dim {wide}, the model {own}; it is another's"
        if net.config.extra_conditioning_channels:
            return "reads a mask beside its image (extra_conditioning_channels); not served"
        return ""

    def attach(self, net: Any, denoiser: Any) -> None:
        if not net.config.use_pos_embed:
            net.pos_embed = net._get_pos_embed_from_transformer(denoiser).to(next(net.parameters()))

    def generator(self, drawing: PictureRequest, generator: Generator) -> Generator:
        return Generator().manual_seed(drawing.seed)

    def read(
        self, net: Any, image: Any, pipeline: Any, drawing: PictureRequest, generator: Generator
    ) -> Tensor:
        first, config = next(pipeline.vae.parameters()), pipeline.vae.config
        pixels = self._processor.preprocess(image, drawing.height, drawing.width).to(first)
        with torch.no_grad():
            posterior = pipeline.vae.encode(pixels).latent_dist
        rows = 2 if (drawing.guidance_scale or 0.0) > 1 else 1
        noise = torch.randn(
            rows, *posterior.mean.shape[1:], generator=generator, dtype=first.dtype
        ).to(first)
        shift = 0.0 if net.config.force_zeros_for_pooled_projection else config.shift_factor
        sample = posterior.mean + posterior.std * noise
        latents: Tensor = (sample - shift) * config.scaling_factor
        return latents

    def call(self, net: Any, call: Call, image: Tensor) -> dict[str, Any]:
        changed = dict(call)
        if net.config.joint_attention_dim is None:
            del changed["encoder_hidden_states"]
        if net.config.force_zeros_for_pooled_projection:
            changed["pooled_projections"] = torch.zeros_like(call["pooled_projections"])
        return super().call(net, changed, image)

    def residuals(self, answer: Any) -> Residuals:
        return {_JOINT: tuple(answer[0])}

    def spread(self, net: Any, denoiser: Any, residuals: Residuals) -> Residuals:
        samples, blocks = residuals[_JOINT], len(denoiser.transformer_blocks)
        interval = blocks / len(samples)
        return {_JOINT: tuple(samples[int(block / interval)] for block in range(blocks))}


_FAMILIES: dict[str, type[ControlFamily]] = {
    "UNet2DConditionModel": UNetControls,
    "FluxTransformer2DModel": FluxControls,
    "SD3Transformer2DModel": SD3Controls,
}


def control_family(denoiser: Any) -> type[ControlFamily] | None:
    """Return what serves the ControlNets of a denoiser; None if nothing does."""
    return _FAMILIES.get(type(denoiser).__name__)
