"""Try a pipeline when it is loaded, so that a picture that is asked for later does not fail.

Each kind (drawing, changing, filling a mask) draws one small picture in as few steps as possible,
with the denoiser itself. The calls of the first picture show the form of the denoiser's answers,
and whether two calls in one forward pass give what each gives alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Generator, Tensor

from motet_diffusion.engine.merge import Call, merge_calls, merge_key, rows_of, split_output
from motet_diffusion.engine.model_call import DENOISER, Denoise, ModelCall
from motet_diffusion.engine.request import PictureRequest
from motet_kernels.runtime.missing_memory import check_device

from .rules import Rules, kind_of
from .support import DRAW, FILL
from .video import length_multiple

log = logging.getLogger(__name__)
CELLS = 8  # latents, or patches of them, per side of the trial picture
_SMALLEST_IMAGE = 64  # pixels per side; Flux.2 reads no smaller ones
_STEPS = 2
SOUND = "audio_hidden_states"  # latents that LTX-2's denoiser gets beside those of the frames
# Largest difference, relative to the largest value, that a pass of two calls may make.
_TOLERANCES = {torch.float32: 1e-3}
_TOLERANCE = 0.1


Open = Callable[[PictureRequest, Denoise, Generator], Any]


@dataclass
class Trial:
    """Hold what a trial found.

    calls: denoiser calls with their answers, of the first picture that was drawn.
    causes: why a kind cannot be drawn, by kind.
    """

    calls: list[tuple[Call, Any]] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        rules: Rules,
        open_pipeline: Open,
        compute: Denoise,
        kind: str,
    ) -> bool:
        """Draw a small picture of a kind. Return True if it can be drawn."""
        self.causes.pop(kind, None)  # of another pipeline that was tried for this kind
        cause, calls = attempt(rules, open_pipeline, compute, kind)
        if cause:
            self.causes[kind] = cause
            return False
        self.calls = self.calls or calls
        return True

    def merges(self, denoiser: Callable[..., Any]) -> bool:
        """Return True if two calls in one pass give what each gives alone."""
        for index, (call, answer) in enumerate(self.calls):
            for other, other_answer in self.calls[index + 1 :]:
                if merge_key(call) != merge_key(other):
                    continue
                try:
                    with torch.no_grad():
                        together = denoiser(**merge_calls([call, other]))
                    parts = split_output(together, [rows_of(call), rows_of(other)])
                except Exception as error:  # a family whose calls do not fit runs one by one
                    log.info("calls are not merged: %s", _described(error))
                    return False
                return alike(parts[0], answer) and alike(parts[1], other_answer)
        return False

    def zeros(self, call: Call) -> Any:
        """Return zeros in the form of the denoiser's answer to `call`."""
        known, answer = self.calls[0]
        sample, now = _first(next(iter(known.values()))), _first(next(iter(call.values())))
        rows = rows_of(call)

        def zero(value: Any, sample: Tensor = sample, now: Tensor = now) -> Any:
            if not isinstance(value, Tensor):
                return [zero(value[0])] * rows if isinstance(value, (list, tuple)) else value
            shape = list(now.shape)
            if value.ndim == sample.ndim:
                for axis, (had, gave) in enumerate(zip(sample.shape, value.shape, strict=True)):
                    shape[axis] = gave if had != gave else shape[axis]
            return now.new_zeros(shape)

        if isinstance(answer, Mapping):
            return type(answer)(**{name: zero(value) for name, value in answer.items()})
        if isinstance(answer, tuple) and SOUND in known:  # two answers: the frames' and the sound's
            return (zero(answer[0]), zero(answer[1], known[SOUND], call[SOUND]))
        return (zero(_first_output(answer)),)


def attempt(
    rules: Rules,
    open_pipeline: Open,
    compute: Denoise,
    kind: str,
    drawing: PictureRequest | None = None,
) -> tuple[str, list[tuple[Call, Any]]]:
    """Draw a small picture; return the cause if that fails, and the denoiser's calls and answers.

    compute: returns the whole answer of a model's call.
    """
    calls: list[tuple[Call, Any]] = []

    def denoise(call: ModelCall) -> Any:
        merge_key(call.call)
        answer = compute(call)
        if call.target == DENOISER:
            # Some pipelines change their latents in place.
            kept = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in call.call.items()
            }
            calls.append((kept, answer))
        return split_output(answer, [rows_of(call.call)])[0]

    try:
        with torch.no_grad():
            drawing = rules.completed(drawing or trial_request(rules, kind))
            generator = Generator().manual_seed(0)
            pipeline = open_pipeline(drawing, denoise, generator)
            images = outputs_of(pipeline, rules.arguments(drawing, generator))[0]
        return _result_cause(images, drawing, calls), calls
    except Exception as error:  # whatever a pipeline raises is the cause of its refusal
        return _described(error), calls


def scheduler_cause(
    rules: Rules, open_pipeline: Open, answer: Callable[[Call], Any], drawing: PictureRequest
) -> str:
    """Return why a pipeline's loop does not run with a picture's scheduler; "" if it does.

    A small picture of the same kind is drawn with these answers, without its pixels. Raises the error
    of a lost GPU.
    """
    kind = kind_of(drawing)
    try:
        with torch.no_grad():
            small = rules.completed(
                replace(trial_request(rules, kind), scheduler=drawing.scheduler)
            )
            generator = Generator().manual_seed(0)
            pipeline = open_pipeline(small, lambda call: answer(call.call), generator)
            arguments = rules.arguments(small, generator)
            latents = outputs_of(pipeline, arguments | {"output_type": "latent"})[0]
        return "" if bool(latents.isfinite().all()) else "its steps are not finite"
    except Exception as error:  # whatever a pipeline raises is the cause of the refusal
        check_device(error)
        return _described(error)


def outputs_of(pipeline: Any, arguments: dict[str, Any]) -> Sequence[Any]:
    """Return what a call gives: the pictures, which families name differently; behind them, sound.

    The VAE, which pictures share, has its own type afterwards, whatever the call raises.
    """
    try:
        outputs: Sequence[Any] = pipeline(**arguments, return_dict=False)
    finally:
        pipeline.vae.restore()
    return outputs


def trial_request(rules: Rules, kind: str) -> PictureRequest:
    """Return the request for the trial picture of a kind: small, of few steps."""
    multiple = rules.size_multiple
    width, height = (min(side, CELLS * multiple) for side in rules.default_size)
    smallest = multiple if kind == DRAW else max(multiple, _SMALLEST_IMAGE)
    width, height = (
        math.ceil(max(side, smallest) / multiple) * multiple for side in (width, height)
    )
    frames = 2 * length_multiple(rules.pipeline) + 1 if rules.is_video else 0
    image = None if kind == DRAW else Image.new("RGB", (width, height), "gray")
    mask = Image.new("L", (width, height), 255) if kind == FILL else None
    return PictureRequest(
        prompt="a picture",
        width=width,
        height=height,
        steps=_STEPS,
        image=image,
        mask=mask,
        strength=None if kind == DRAW else 1.0,
        frames=frames,
    )


def _result_cause(images: Any, drawing: PictureRequest, calls: list[tuple[Call, Any]]) -> str:
    """Return why what a pipeline returned is no picture; "" if it is one."""
    if not calls:
        return "it draws without its denoiser"
    if drawing.frames and isinstance(images, Tensor) and images.ndim == 5:
        if (length := images.shape[1]) != drawing.frames:
            return f"it gives {length} frames for {drawing.frames}"
        images = images[:, 0]
    if not isinstance(images, Tensor) or images.ndim != 4 or len(images) != 1:
        return "it gives several pictures, or none, for one request"
    size = (images.shape[3], images.shape[2])
    if images.shape[1] != 3 or size != (drawing.width, drawing.height):
        form = "x".join(str(side) for side in images.shape[1:])
        return f"it gives {form} for 3x{drawing.height}x{drawing.width}"
    return ""


def _described(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _first_output(answer: Any) -> Any:
    """Return the prediction of a denoiser's answer, a tensor or a list of one for each row."""
    if isinstance(answer, Tensor):
        return answer
    return answer[0]


def _first(value: Any) -> Tensor:
    """Return the noisy latents of a call: a tensor, or one of a list for each row.

    Where a row is a list too, they come last, behind those of the images that it is drawn from.
    """
    while isinstance(value, (list, tuple)):
        value = value[-1]
    tensor: Tensor = value
    return tensor


def alike(one: Any, other: Any) -> bool:
    """Return True if two answers of a denoiser differ by no more than rounding does."""
    one, other = _first_output(one), _first_output(other)
    if isinstance(one, Tensor):
        one, other = [one], [other]
    for left, right in zip(one, other, strict=True):
        if left.shape != right.shape:
            return False
        limit = _TOLERANCES.get(right.dtype, _TOLERANCE) * float(right.abs().max() + 1e-6)
        if not float((left.float() - right.float()).abs().max()) <= limit:
            return False
    return True
