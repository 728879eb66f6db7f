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
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.merge import Call, rows_of
from motet_diffusion.engine.model_call import DENOISER, Denoise, ModelCall
from motet_diffusion.engine.request import Control, ImagePrompt, PictureRequest
from motet_diffusion.kernels.fused import fuse
from motet_diffusion.kernels.guided import is_linear
from motet_diffusion.kernels.packed import pack
from motet_kernels import gpu
from motet_shared.errors import BadRequest, ConfigError, InternalError

from .adapters import Adapters
from .conditions import Conditions
from .controlnets import ControlNets
from .image_prompts import ImagePrompts
from .loading import load, refused
from .quantized import pack_gguf, quantize
from .rules import Rules, folder_defaults, kind_of, vae_scale_of
from .schedulers import make_scheduler
from .shared_modules import LockedVae, SharedDenoiser, locked
from .support import DENOISERS, DRAW, SECOND_DENOISER, kinds_of, relatives
from .trial import Trial, attempt, outputs_of, scheduler_cause, trial_request
from .video import cause_of, decode_in_parts, decodes_in_parts, unpacked, with_size

log = logging.getLogger(__name__)
GUIDERS = ("guider", "ocr_guider")  # HunyuanImage's, which remember what they guided
# Methods that read texts or images, one picture at a time.
_READERS = ("encode_prompt", "encode_image")


class PipelineFactory:
    """Make pipelines of one model.

    Raises ConfigError if the folder is no text-to-image model of diffusers.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.pipeline: Any = load(config)
        self.denoiser_name = next(
            (name for name in DENOISERS if getattr(self.pipeline, name, None) is not None), ""
        )
        if not self.denoiser_name or getattr(self.pipeline, "vae", None) is None:
            raise self._refused("the folder lacks its denoiser or its VAE")
        second = getattr(self.pipeline, SECOND_DENOISER, None)
        if second is not None:
            self._check_two_denoisers()
        denoiser = getattr(self.pipeline, self.denoiser_name)
        self.controlnets = ControlNets(self.pipeline, denoiser, config)
        self.image_prompts = ImagePrompts(self.pipeline, denoiser, config.ip_adapters)
        self.adapters = Adapters(self.pipeline, config.loras)
        self.denoiser: torch.nn.Module = getattr(self.pipeline, self.denoiser_name)
        self.denoiser_signature = inspect.signature(self.denoiser.forward)
        self.denoisers = {DENOISER: self.denoiser}  # by target of a call
        if second is not None:
            self.denoisers[SECOND_DENOISER] = second
        for denoiser in self.denoisers.values():
            self._quantize(denoiser)
        self.vae = self.pipeline.vae
        if cause := cause_of(self.pipeline):
            raise self._refused(cause)
        self._vae_dtype = self.vae.dtype
        # One method that reads may call another; a picture decodes with the VAE that it has cast.
        self._text_lock, self._vae_lock = threading.RLock(), threading.RLock()
        self._pipelines: dict[str, Any] = {}
        self.rules, self.trial = self._try()
        self.merges = self.trial.merges(self.denoiser)  # before the first image prompt is set
        self.decodes_in_parts = self.rules.is_video and decodes_in_parts(self.vae)
        self._condition_causes: dict[tuple[str, str, str], str] = {}
        self._try_conditions()
        if config.packed:
            for denoiser in self.denoisers.values():
                pack(denoiser)
        self._linear: dict[str, bool] = {}
        self._scheduler_causes: dict[tuple[str, str], str] = {}
        self._fuse()

    # ---------------------------------------------------------------------------------------- trial
    def _try(self) -> tuple[Rules, Trial]:
        """Draw a small picture of each kind, and keep the kinds that can be drawn.

        Raises ConfigError with the cause if there is none.
        """
        defaults = folder_defaults(Path(self.config.model))
        unlimited = replace(self.config, max_pixels=1 << 40, max_steps=1 << 20)
        own = dict.fromkeys(kinds_of(type(self.pipeline)), self.pipeline)
        trial, kept = Trial(), dict[str, Any]()
        for kind, pipeline in (*own.items(), *relatives(self.pipeline).items()):
            if kind in kept:
                continue
            self._pipelines = {kind: pipeline}
            rules = Rules(
                unlimited, self.pipeline, {kind: pipeline}, self.denoiser.config, defaults
            )
            if trial.run(rules, self.open, self._compute_one, kind):
                kept[kind] = pipeline
            else:
                log.info("%s: no %s: %s", type(pipeline).__name__, kind, trial.causes[kind])
        if not kept:
            raise self._refused(trial.causes[next(iter(own))])
        self._pipelines = kept
        return Rules(self.config, self.pipeline, kept, self.denoiser.config, defaults), trial

    def _check_two_denoisers(self) -> None:
        """Raise ConfigError for what is made for one denoiser and given to a model with two."""
        for field in ("denoiser", "loras"):
            if given := getattr(self.config, field):
                kind = type(self.pipeline).__name__
                message = f"{field}={given!r}: this {kind} has two denoisers, and that is for one"
                raise ConfigError(f"{message}; leave it out")

    def _quantize(self, denoiser: torch.nn.Module) -> None:
        if self.config.denoiser:
            pack_gguf(denoiser, getattr(torch, self.config.dtype))
        elif self.config.quantization:
            quantize(denoiser, self.config.quantization)

    def _try_conditions(self) -> None:
        """Draw a small picture of each kind with each ControlNet and IP-Adapter.

        Raises ConfigError if one fails with all kinds.
        """
        names = {"controlnets": self.controlnets.names, "ip_adapters": self.image_prompts.names}
        for field, name in ((field, name) for field, found in names.items() for name in found):
            causes = {kind: self._try_condition(kind, field, name) for kind in self._pipelines}
            if all(causes.values()):
                cause = next(iter(causes.values()))
                raise ConfigError(f"{field}={name}: does not work with this model: {cause}")
            for kind, cause in causes.items():
                if cause:
                    self._condition_causes[kind, field, name] = cause

    def _try_condition(self, kind: str, field: str, name: str) -> str:
        base = trial_request(self.rules, kind)
        image = Image.new("RGB", (base.width, base.height), "gray")
        if field == "controlnets":
            drawing = replace(base, controls=(Control(name, image),))
        else:
            drawing = replace(base, image_prompts=(ImagePrompt(name, image),))
        return attempt(self.rules, self.open, self._compute_one, kind, drawing)[0]

    def _compute_one(self, call: ModelCall) -> Any:
        return self.compute(call.call, [call], [rows_of(call.call)])

    def _refused(self, cause: str) -> ConfigError:
        return refused(self.config, type(self.pipeline).__name__, cause)

    # -------------------------------------------------------------------------------------- requests
    def check(self, drawing: PictureRequest) -> None:
        """Raise BadRequest if a request names an adapter or ControlNet that the model lacks.

        So it does if one does not work with this kind of picture, once its image is here.
        """
        self.adapters.check(drawing.loras)
        self.controlnets.check(drawing.controls)
        self.image_prompts.check(drawing.image_prompts)
        kind = kind_of(drawing)
        named = {
            "controlnets": [one.name for one in drawing.controls],
            "ip_adapters": [one.name for one in drawing.image_prompts],
        }
        for field, names in named.items():
            for number, name in enumerate(names):
                if cause := self._condition_causes.get((kind, field, name)):
                    where, family = f"{field}[{number}].name", type(self.pipeline_of(kind)).__name__
                    message = f"{where}: {name!r} does not work with a {family} ({cause})"
                    raise BadRequest(f"{message}; leave it out", param=where)

    def check_scheduler(self, drawing: PictureRequest) -> None:
        """Raise BadRequest if the pipeline's loop does not run with the scheduler that is asked for.

        That is tried once for each, with a denoiser that answers zeros; call it on a loop's thread.
        """
        if not drawing.scheduler:
            return
        kind = kind_of(drawing)
        if (kind, drawing.scheduler) not in self._scheduler_causes:
            self._scheduler_causes[kind, drawing.scheduler] = scheduler_cause(
                self.rules, self.open, self.trial.zeros, drawing
            )
        if cause := self._scheduler_causes[kind, drawing.scheduler]:
            family = type(self.pipeline_of(kind)).__name__
            message = f"scheduler: a {family} does not run with {drawing.scheduler} ({cause})"
            raise BadRequest(f"{message}; give another, or none", param="scheduler")

    def compute(self, merged: Call, calls: Sequence[ModelCall], rows: Sequence[int]) -> Any:
        """Return the output of `merged`, which is made of `calls` of one model with these rows."""
        if (target := calls[0].target) not in self.denoisers:
            return self.controlnets.call(target, merged)
        counted = list(zip(calls, rows, strict=True))
        self.adapters.denoiser.set([(call.loras, count) for call, count in counted])
        self.image_prompts.current.set([(call.prompts, count) for call, count in counted])
        return self.denoisers[target](**merged)

    @contextmanager
    def of_rows(self, rows: Sequence[int]) -> Iterator[None]:
        """Leave out what other rows of the pass are drawn with, for layers that get these only."""
        with self.adapters.denoiser.of_rows(rows), self.image_prompts.current.of_rows(rows):
            yield

    # ------------------------------------------------------------------------------------ pipelines
    def pipeline_of(self, kind: str) -> Any:
        """Return the pipeline for a kind of picture; the drawing one where its loop is entered."""
        return self._pipelines.get(kind, self.pipeline)

    def open(
        self,
        drawing: PictureRequest,
        denoise: Denoise,
        generator: torch.Generator,
        on_part: Callable[[Tensor], None] | None = None,
    ) -> Any:
        """Return a pipeline for one picture, with `denoise` as its denoiser.

        generator: of the picture, for what is sampled before the pipeline is called. on_part: gets
        a video's parts `[1, frames, 3, height, width]` in 0 to 1, while its VAE decodes them.
        """
        pipeline = copy.copy(self.pipeline_of(kind_of(drawing)))
        attributes = vars(pipeline)
        scheduler = make_scheduler(drawing.scheduler, pipeline.scheduler)
        decode = None
        if on_part is not None:
            processed = functools.partial(
                pipeline.video_processor.postprocess_video, output_type="pt"
            )
            decode = decode_in_parts(self.vae, lambda part: on_part(processed(part)))
        attributes["vae"] = LockedVae(self.vae, self._vae_lock, self._vae_dtype, decode)
        with self._text_lock:
            prompts = self.image_prompts.read(pipeline, drawing)
        controls = self.controlnets.of(drawing, pipeline, generator)
        calls_per_step = self.rules.calls_per_step(drawing) if controls or prompts else 1
        attributes[self.denoiser_name] = SharedDenoiser(
            self.denoiser,
            self.denoiser_signature,
            Conditions(drawing, scheduler, controls, prompts, denoise, calls_per_step),
        )
        if (second := self.denoisers.get(SECOND_DENOISER)) is not None:
            attributes[SECOND_DENOISER] = SharedDenoiser(
                second,
                self.denoiser_signature,
                lambda call: denoise(ModelCall(call, target=SECOND_DENOISER)),
            )
        attributes["scheduler"] = scheduler
        if "default_sample_size" in attributes:
            # HiDream draws every size with the area of this; rounding must not make it smaller.
            side = math.sqrt(drawing.width * drawing.height) / float(vae_scale_of(self.pipeline))
            attributes["default_sample_size"] = side * (1 + 1e-9)
        if "resolutions" in attributes:  # Kandinsky 5 draws in one of these
            attributes["resolutions"] = [(drawing.width, drawing.height)]
        for name in GUIDERS:
            if attributes.get(name) is not None:
                attributes[name] = copy.deepcopy(attributes[name])
        if attributes.get("guider") is not None:
            attributes["guider"].guidance_scale = drawing.guidance_scale
        for name in _READERS:
            if (read := getattr(pipeline, name, None)) is not None:
                attributes[name] = locked(self._text_lock, self._with_adapters(read, drawing))
        with_size(pipeline, drawing)
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
        """Return a pipeline's latents as `[1, channels, height, width]` in the scale of the VAE.

        Raises ValueError if the family packs its latents in another way.
        """
        if latents.ndim == 3 and self.rules.is_video:
            latents = unpacked(self.pipeline, latents, drawing)
        elif latents.ndim == 3:
            latents = self.pipeline._unpack_latents(
                latents, drawing.height, drawing.width, self.pipeline.vae_scale_factor
            )
        config = self.vae.config
        channels = getattr(config, "latent_channels", None) or config.z_dim
        if latents.ndim == 5:  # of videos, whose first frame it is, or a picture as the only frame
            latents = latents[:, :, 0] if latents.shape[1] == channels else latents[:, 0]
        if latents.ndim != 4 or latents.shape[1] != channels:
            raise ValueError(f"latents of {tuple(latents.shape)}, the VAE has {channels} channels")
        moments = config if hasattr(config, "latents_mean") else self.vae  # LTX has them as buffers
        if getattr(moments, "latents_mean", None) is not None:
            mean, std = (
                torch.as_tensor(values).view(1, -1, 1, 1).to(latents)
                for values in (moments.latents_mean, moments.latents_std)
            )
            return latents * std + mean
        shift = getattr(config, "shift_factor", None) or 0.0
        return latents / (getattr(config, "scaling_factor", None) or 1.0) + shift

    # --------------------------------------------------------------------------------------- fusing
    def fuses_steps(self, scheduler: str) -> bool:
        """Return True if the steps of a scheduler, by name, can be part of the kernel of guidance."""
        if not gpu.takes(next(self.denoiser.parameters())):
            return False
        if scheduler not in self._linear:
            self._linear[scheduler] = is_linear(make_scheduler(scheduler, self.pipeline.scheduler))
        return self._linear[scheduler]

    def _fuse(self) -> None:
        """Fuse kernels of the denoiser and the decoder on a GPU."""
        first_call = functools.cache(self._first_call)
        for denoiser in self.denoisers.values():
            fuse(denoiser, functools.partial(_first_answer, denoiser, first_call))
        fuse(self.vae, self._decoded)

    def _first_call(self) -> Call:
        """Return the first denoiser call for a small picture."""
        kind = DRAW if DRAW in self._pipelines else next(iter(self._pipelines))
        drawing = self.rules.completed(trial_request(self.rules, kind))
        calls: list[Call] = []

        def capture(call: ModelCall) -> None:
            calls.append(call.call)
            raise _CallCaptured

        try:
            generator = torch.Generator().manual_seed(0)
            pipeline = self.open(drawing, capture, generator)
            outputs_of(pipeline, self.rules.arguments(drawing, generator))
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


def _first_answer(denoiser: torch.nn.Module, first_call: Callable[[], Call]) -> Tensor:
    answer: Tensor = denoiser(**first_call())[0]
    return answer


class _CallCaptured(BaseException):
    """Signal that ends a loop once its first call is known.

    Not an Exception, so that no pipeline handles it as an error.
    """
