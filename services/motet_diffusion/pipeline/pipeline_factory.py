"""Load a model's folder once, and make a pipeline of it for every picture.

Pictures share all weights. State that a pipeline changes while it draws (its scheduler, its notes
about the request) is per picture: a shallow copy with a scheduler of its attributes. Stages that are
unsafe or inefficient to run for two pictures at a time (tokenizing and encoding text, encoding and
decoding pixels) are serialized by one lock per stage.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.merge import Call
from motet_diffusion.engine.request import PictureRequest
from motet_diffusion.kernels.fused import fuse
from motet_diffusion.kernels.guided import is_linear
from motet_diffusion.kernels.packed import pack
from motet_kernels import gpu
from motet_kernels.runtime.device import find_device
from motet_models.checkpoints import check_checkpoint
from motet_shared.errors import ConfigError, InternalError

from .adapters import Adapters
from .rules import Rules, folder_defaults, kind_of
from .shared_modules import Denoise, LockedModule, SharedDenoiser, locked

_DENOISERS = ("transformer", "unet")
_TRIAL_LATENTS = 8  # latents, or patches of them, per side of the trial picture


class PipelineFactory:
    """Make pipelines of one model.

    Raises ConfigError if the folder is no text-to-image model of diffusers.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.pipeline: Any = _load(config)
        self.denoiser_name = next(
            (name for name in _DENOISERS if getattr(self.pipeline, name, None) is not None), ""
        )
        if not self.denoiser_name:
            kind = type(self.pipeline).__name__
            raise ConfigError(
                f"model={config.model!r}: a {kind} has neither of {', '.join(_DENOISERS)}; take another"
            )
        self.adapters = Adapters(self.pipeline, config.loras)
        self.denoiser: torch.nn.Module = getattr(self.pipeline, self.denoiser_name)
        self.denoiser_signature = inspect.signature(self.denoiser.forward)
        if config.packed:
            pack(self.denoiser)
        self.vae = self.pipeline.vae
        self._pipelines = {"draw": self.pipeline, **_editors(self.pipeline)}
        self.rules = Rules(
            config, self._pipelines, self.denoiser.config, folder_defaults(Path(config.model))
        )
        self._text_lock, self._vae_lock = threading.Lock(), threading.Lock()
        self.fuses_steps = gpu.takes(next(self.denoiser.parameters())) and is_linear(
            self.pipeline.scheduler
        )
        self._fuse()

    # ------------------------------------------------------------------------------------ pipelines
    def open(self, drawing: PictureRequest, denoise: Denoise) -> Any:
        """Return a pipeline for one picture, with `denoise` as its denoiser."""
        pipeline = copy.copy(self._pipelines.get(kind_of(drawing), self.pipeline))
        attributes = vars(pipeline)
        attributes[self.denoiser_name] = SharedDenoiser(
            self.denoiser, self.denoiser_signature, denoise
        )
        attributes["scheduler"] = copy.deepcopy(pipeline.scheduler)
        attributes["vae"] = LockedModule(self.vae, self._vae_lock, ("encode", "decode"))
        attributes["encode_prompt"] = locked(
            self._text_lock, self._with_adapters(pipeline.encode_prompt, drawing)
        )
        return pipeline

    def _with_adapters(
        self, read: Callable[..., Any], drawing: PictureRequest
    ) -> Callable[..., Any]:
        """Wrap text encoding to apply the adapters of the picture."""

        def adapted(*args: Any, **kwargs: Any) -> Any:
            self.adapters.select_for_text(drawing.loras)
            return read(*args, **kwargs)

        return adapted

    def spatial(self, latents: Tensor, drawing: PictureRequest) -> Tensor:
        """Return a pipeline's latents as `[1, channels, height, width]` in the scale of the VAE."""
        if latents.ndim == 3:
            latents = self.pipeline._unpack_latents(
                latents, drawing.height, drawing.width, self.pipeline.vae_scale_factor
            )
        config = self.vae.config
        shift = getattr(config, "shift_factor", None) or 0.0
        return latents / (getattr(config, "scaling_factor", None) or 1.0) + shift

    # --------------------------------------------------------------------------------------- fusing
    def _fuse(self) -> None:
        """Fuse kernels of the denoiser and the decoder on a GPU."""
        first_call = functools.cache(self._first_call)
        fuse(self.denoiser, lambda: self.denoiser(**first_call())[0])
        fuse(self.vae, self._decoded)

    def _first_call(self) -> Call:
        """Return the first denoiser call for a small picture."""
        width, height = (
            min(side, _TRIAL_LATENTS * self.rules.size_multiple) for side in self.rules.default_size
        )
        drawing = self.rules.completed(
            PictureRequest(prompt="a picture", width=width, height=height)
        )
        calls: list[Call] = []

        def capture(call: Call) -> None:
            calls.append(call)
            raise _CallCaptured

        try:
            self.open(drawing, capture)(
                **self.rules.arguments(drawing, torch.Generator().manual_seed(0))
            )
        except _CallCaptured:
            return calls[0]
        raise InternalError("the pipeline draws without its denoiser")

    def _decoded(self) -> Tensor:
        """Return the pixels of small latents, the same each time."""
        noise = torch.randn(
            1, self.vae.config.latent_channels, 8, 8, generator=torch.Generator().manual_seed(0)
        )
        pixels: Tensor = self.vae.decode(noise.to(next(self.vae.parameters())), return_dict=False)[
            0
        ]
        return pixels


class _CallCaptured(BaseException):
    """Signal that ends a loop once its first call is known.

    Not an Exception, so that no pipeline handles it as an error.
    """


def _load(config: EngineConfig) -> Any:
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    for progress in (diffusers_logging, transformers_logging):
        progress.disable_progress_bar()
    for part in (Path(config.model), *sorted(Path(config.model).iterdir())):
        if part.is_dir():
            check_checkpoint(part)
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            Path(config.model),
            dtype=getattr(torch, config.dtype),
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,
            **_missing_parts(Path(config.model)),
        )
    except (OSError, ValueError, AttributeError, TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model={config.model!r}: diffusers does not load it: {error}") from None
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(find_device(config.device, ConfigError))


def _missing_parts(folder: Path) -> dict[str, None]:
    """Return the parts that a folder declares missing, such as the largest text encoder of SD3.

    diffusers requires them as explicit arguments.
    """
    index = json.loads((folder / "model_index.json").read_text())
    return {name: None for name, kind in index.items() if kind == [None, None]}


def _editors(pipeline: Any) -> dict[str, Any]:
    """Return the pipelines that change pictures, where diffusers has them for this family."""
    from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting

    editors = {}
    for kind, auto in (("change", AutoPipelineForImage2Image), ("fill", AutoPipelineForInpainting)):
        try:
            editors[kind] = auto.from_pipe(pipeline)
        except ValueError:
            continue
        editors[kind].set_progress_bar_config(disable=True)
    return editors
