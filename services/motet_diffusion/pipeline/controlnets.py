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
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.merge import Call, entrywise
from motet_diffusion.engine.request import Control, PictureRequest
from motet_models.checkpoints import check_checkpoint
from motet_shared.errors import BadRequest, ConfigError

from .control_families import ControlFamily, Residuals, control_family

_MAX_SCALE = 10.0  # largest scale; more is taken for a mistake
MAX_CONTROLS = 4  # of one picture: each costs about half a denoiser pass per step

Run = Callable[[str, Call], Any]  # computes a call of the ControlNet of this name


class ControlNets:
    """Hold the ControlNets of one model, by name.

    `given`: "name=path" each, a folder that diffusers loads. Raises ConfigError for folders that are
    none, or do not belong to this kind of model.
    """

    def __init__(self, pipeline: Any, denoiser: Any, config: EngineConfig):
        self._nets: dict[str, Any] = {}
        self._denoiser = denoiser
        self._family: ControlFamily | None = None
        for item in config.controlnets:
            where = f"controlnets={item}"
            name, path = named_path("controlnets", item, self._nets)
            if self._family is None:
                if (kind := control_family(denoiser)) is None:
                    family = type(pipeline).__name__
                    raise ConfigError(
                        f"{where}: no ControlNet is served for a {family}; leave it out"
                    )
                self._family = kind(pipeline)
            self._nets[name] = _load(where, self._family, denoiser, path, config.dtype)

    @property
    def names(self) -> list[str]:
        return list(self._nets)

    @property
    def family(self) -> ControlFamily:
        """Return how they are called. Raises ValueError if there are none."""
        if self._family is None:
            raise ValueError("this model has no ControlNets")
        return self._family

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

    def call(self, name: str, call: Mapping[str, Any]) -> Residuals:
        """Return what the ControlNet adds to the denoiser, by parameter of the denoiser."""
        return self.family.residuals(self._nets[name](**call))

    def of(
        self, drawing: PictureRequest, pipeline: Any, generator: Generator
    ) -> PictureControls | None:
        """Return the ControlNets of a picture, with their images as tensors; None if it has none.

        pipeline, generator: of the picture.
        """
        if not drawing.controls:
            return None
        generator = self.family.generator(drawing, generator)
        images = [
            self.family.read(self._nets[control.name], control.image, pipeline, drawing, generator)
            for control in drawing.controls
        ]
        return PictureControls(self, drawing.controls, images)

    def of_call(self, name: str, call: Call, image: Tensor) -> dict[str, Any]:
        """Return the call of a ControlNet beside the denoiser's `call`."""
        return self.family.call(self._nets[name], call, image)

    def spread(self, name: str, residuals: Residuals) -> Residuals:
        """Return a ControlNet's residuals for each block of the denoiser."""
        return self.family.spread(self._nets[name], self._denoiser, residuals)


class PictureControls:
    """Call the ControlNets of one picture. images: as their family reads them, one each."""

    def __init__(self, nets: ControlNets, controls: Sequence[Control], images: Sequence[Tensor]):
        self._nets, self._controls, self._images = nets, controls, images

    def residuals(self, call: Call, step: int, steps: int, run: Run) -> Residuals:
        """Return what all of them add to the denoiser's `call` at a step, by parameter."""
        total: Residuals = {}
        for control, image in zip(self._controls, self._images, strict=True):
            if step / steps < control.start or (step + 1) / steps > control.end:
                continue
            found = run(control.name, self._nets.of_call(control.name, call, image))
            found = {name: _scaled(part, control.scale) for name, part in found.items()}
            for name, part in self._nets.spread(control.name, found).items():
                total[name] = entrywise(operator.add, total[name], part) if name in total else part
        return total


def _scaled(part: Any, scale: float) -> Any:
    return entrywise(lambda entry: entry * scale, part)


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


def _load(where: str, family: ControlFamily, denoiser: Any, path: Path, dtype: str) -> Any:
    import diffusers

    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: has no config.json that can be read ({error})") from None
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind != family.network:
        raise ConfigError(f"{where}: is a {kind}; give a {family.network}")
    check_checkpoint(path)
    try:
        net: Any = getattr(diffusers, family.network).from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,
        )
    except Exception as error:  # whatever diffusers raises for a folder is the cause of its refusal
        cause = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise ConfigError(f"{where}: diffusers does not load it: {cause}") from None
    for name in family.same:
        have, want = net.config.get(name), denoiser.config.get(name)
        if have != want:
            raise ConfigError(f"{where}: has {name} {have}, the model {want}; it is another's")
    if cause := family.cause(net, denoiser):
        raise ConfigError(f"{where}: {cause}")
    net = net.to(next(denoiser.parameters()).device).eval()
    family.attach(net, denoiser)
    return net
