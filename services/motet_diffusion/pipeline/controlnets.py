"""Steer pictures by further images with ControlNets (Zhang et al. 2023), each picture by its own.

diffusers has pipelines of their own for this, whose loops differ from the plain ones by one thing:
before the denoiser, the ControlNets are called with the same arguments, and what they return is
added within the denoiser. So here the plain pipelines draw, and the calls are added where the
denoiser is called. ControlNets are batched by step as the denoiser is, and pictures without any
share its passes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.merge import Call, rows_of
from motet_diffusion.engine.request import Control, PictureRequest
from motet_models.checkpoints import check_checkpoint
from motet_shared.errors import BadRequest, ConfigError

_DOWN, _MIDDLE = "down_block_additional_residuals", "mid_block_additional_residual"
_SHARED = ("sample", "timestep", "encoder_hidden_states", "added_cond_kwargs")
_MAX_SCALE = 10.0  # largest scale; more is taken for a mistake
MAX_CONTROLS = 4  # of one picture: each costs about half a denoiser pass per step

Run = Callable[[str, Call], Any]  # computes a call of the ControlNet of this name


class ControlNets:
    """Hold the ControlNets of one model, by name.

    `given`: "name=path" each, a folder that diffusers loads. Raises ConfigError for folders that are
    none, or do not belong to this kind of model.
    """

    def __init__(self, pipeline: Any, config: EngineConfig):
        self._nets: dict[str, Any] = {}
        self._pipeline = pipeline
        for item in config.controlnets:
            name, path = named_path("controlnets", item, self._nets)
            self._nets[name] = _load(f"controlnets={item}", pipeline, path, config.dtype)
        if self._nets:
            from diffusers.image_processor import VaeImageProcessor

            self._processor = VaeImageProcessor(
                vae_scale_factor=pipeline.vae_scale_factor,
                do_convert_rgb=True,
                do_normalize=False,
            )

    @property
    def names(self) -> list[str]:
        return list(self._nets)

    def check(self, controls: Sequence[Control]) -> None:
        """Raise BadRequest if a ControlNet is unknown, or its numbers are out of range."""
        if len(controls) > MAX_CONTROLS:
            message = f"controlnets: {len(controls)} are given; give at most {MAX_CONTROLS}"
            raise BadRequest(message, param="controlnets")
        for number, control in enumerate(controls):
            where = f"controlnets[{number}]"
            check_name(where, control.name, self.names, "ControlNets")
            if not math.isfinite(control.scale) or not 0 <= control.scale <= _MAX_SCALE:
                message = f"{where}.scale: {control.scale}; give 0 to {_MAX_SCALE:g}"
                raise BadRequest(message, param=f"{where}.scale")
            if not 0 <= control.start < control.end <= 1:
                message = (
                    f"{where}.end: the span {control.start} to {control.end} of the steps is none;"
                    " give a start of at least 0, and an end above it of at most 1"
                )
                raise BadRequest(message, param=f"{where}.end")

    def call(self, name: str, call: Mapping[str, Any]) -> Any:
        """Return what the ControlNet adds to the denoiser: (tensors of the way down, the middle)."""
        down, middle = self._nets[name](**call)
        return tuple(down), middle

    def of(self, drawing: PictureRequest) -> PictureControls:
        """Return the ControlNets of a picture, with their images as tensors."""
        images = [
            self._processor.preprocess(control.image, drawing.height, drawing.width).to(
                next(self._nets[control.name].parameters())
            )
            for control in drawing.controls
        ]
        widths = {name: net.config.in_channels for name, net in self._nets.items()}
        return PictureControls(drawing.controls, images, widths)


class PictureControls:
    """Call the ControlNets of one picture. images: `[1, 3, height, width]` in 0 to 1, one each."""

    def __init__(
        self, controls: Sequence[Control], images: Sequence[Tensor], channels: Mapping[str, int]
    ):
        self._controls, self._images, self._channels = controls, images, channels

    def residuals(self, call: Call, step: int, steps: int, run: Run) -> dict[str, Any]:
        """Return what all of them add to the denoiser's `call` at a step, by parameter."""
        down: list[Tensor] = []
        middle: Tensor | None = None
        for control, image in zip(self._controls, self._images, strict=True):
            if step / steps < control.start or (step + 1) / steps > control.end:
                continue
            shared = {name: call[name] for name in _SHARED if call.get(name) is not None}
            # A denoiser that fills masks also gets the mask and the image, a ControlNet does not.
            shared["sample"] = shared["sample"][:, : self._channels[control.name]]
            cond = image.expand(rows_of(call), -1, -1, -1)
            more, last = run(
                control.name, {**shared, "controlnet_cond": cond, "return_dict": False}
            )
            more, last = [part * control.scale for part in more], last * control.scale
            down = more if not down else [a + b for a, b in zip(down, more, strict=True)]
            middle = last if middle is None else middle + last
        return {} if middle is None else {_DOWN: tuple(down), _MIDDLE: middle}


def named_path(field: str, item: str, known: Mapping[str, Any]) -> tuple[str, Path]:
    """Parse "name=path". Raises ConfigError if it is none, or the name is in use."""
    name, separator, path = item.partition("=")
    if not separator or not name or name in known:
        raise ConfigError(f"{field}={item!r}: give each as name=path, each with a different name")
    return name, Path(path)


def check_name(where: str, name: str, known: Sequence[str], what: str) -> None:
    """Raise BadRequest that lists the known names if `name` is none of them."""
    if name not in known:
        found = f"this model has {', '.join(known)}" if known else f"this model has no {what}"
        raise BadRequest(f"{where}.name: {name!r} is unknown; {found}", param=f"{where}.name")


def _load(where: str, pipeline: Any, path: Path, dtype: str) -> nn.Module:
    from diffusers import ControlNetModel

    unet = getattr(pipeline, "unet", None)
    if unet is None:
        family = type(pipeline).__name__
        raise ConfigError(f"{where}: no ControlNet is served for a {family}; leave it out")
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: has no config.json that can be read ({error})") from None
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind != "ControlNetModel":
        raise ConfigError(f"{where}: is a {kind}; give a ControlNetModel")
    check_checkpoint(path)
    try:
        net: Any = ControlNetModel.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,
        )
    except Exception as error:  # whatever diffusers raises for a folder is the cause of its refusal
        cause = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise ConfigError(f"{where}: diffusers does not load it: {cause}") from None
    for name in ("cross_attention_dim", "block_out_channels", "addition_embed_type"):
        have, want = net.config.get(name), unet.config.get(name)
        if have != want:
            raise ConfigError(f"{where}: has {name} {have}, the model {want}; it is another's")
    if net.config.get("global_pool_conditions"):
        raise ConfigError(f"{where}: guesses without a prompt (global_pool_conditions); not served")
    return net.to(next(unet.parameters()).device).eval()  # type: ignore[no-any-return]
