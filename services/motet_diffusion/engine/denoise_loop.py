"""Run a pipeline's own loop for one picture on a thread, from the prompt to the pixels.

The loop is diffusers' code unchanged, so the picture equals that of diffusers for every family and
scheduler. Only its forward passes are computed elsewhere, batched with those of other pictures, and
its scheduler is wrapped to report every step.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from motet_diffusion.kernels.guided import deferred_guidance, fused_step
from motet_diffusion.pipeline.conditions import steps_from
from motet_diffusion.pipeline.estimate import estimate
from motet_diffusion.pipeline.image_to_image import SDEdit
from motet_diffusion.pipeline.pipeline_factory import GUIDERS, PipelineFactory
from motet_diffusion.pipeline.trial import outputs_of
from motet_diffusion.pipeline.video import as_frames, as_sound
from motet_kernels.runtime.missing_memory import check_device
from motet_shared.errors import BadRequest, InternalError, MotetError, as_motet_error

from .checkpoint import memory_tensors, pack, unpack
from .companion import Companion
from .model_call import DENOISER, ModelCall
from .request import (
    Event,
    FramesDecoded,
    Key,
    PictureDone,
    PictureRequest,
    SoundDecoded,
    StepDone,
)
from .step_batcher import LoopCancelled, StepBatcher

log = logging.getLogger(__name__)
_SCHEDULER = "scheduler"  # name of its memory in checkpoints


class DenoiseLoop:
    """Draw one picture on a thread of its own.

    The callables are called on that thread; after `cancel` nothing more is emitted.

    on_device_lost: gets the error of a GPU that is lost to the process, in place of an event.
    """

    def __init__(
        self,
        factory: PipelineFactory,
        batcher: StepBatcher,
        key: Key,
        drawing: PictureRequest,
        emit: Callable[[Event], object],
        on_end: Callable[[Key], object],
        on_device_lost: Callable[[Exception], object],
    ):
        self.key, self.drawing = key, drawing
        self._factory, self._batcher, self._emit, self._on_end = factory, batcher, emit, on_end
        self._on_device_lost = on_device_lost
        self._generator = torch.Generator().manual_seed(drawing.seed)
        self._step = 0  # steps done
        self._steps = 0  # steps in total, known from the first one on
        self._has_called = False
        self._part, self._part_of = 0, -1  # the denoiser's last call within its step, and that step
        self._cancelled = False
        self._preview_steps: frozenset[int] = frozenset()
        self._initial_tensors: dict[str, Any] = {}
        self._sdedit: SDEdit | None = None
        self._guiders: dict[str, Any] = {}
        self._scheduler: Any = None
        self._sound: Companion | None = None
        self._unreported: tuple[Tensor, Tensor | None] | None = None  # frames' latents, preview
        self._thread = threading.Thread(target=self._run, name=f"motet-denoise-{key}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Stop the loop at its next forward pass; text encoding and decoding run to their end."""
        self._cancelled = True
        self._batcher.cancel(self.key)

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the end of the thread."""
        self._thread.join(timeout)

    # ------------------------------------------------------------------------- on the loop's thread
    def _run(self) -> None:
        try:
            with torch.no_grad():
                done = PictureDone(self.key, self._draw(), self._step)
            self._report(done)
        except LoopCancelled:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self._on_end(self.key)  # before `end`: afterwards `cancel` is not called any more
            self._batcher.end(self.key)

    def _fail(self, error: Exception) -> None:
        """Report the error of the picture, or to the engine that the GPU is lost."""
        try:
            check_device(error)
        except torch.AcceleratorError as lost:
            self._on_device_lost(lost)
        else:
            self._report(PictureDone(self.key, error=self._as_motet_error(error)))

    def _draw(self) -> Image.Image | None:
        """Return the picture, or None after all frames of a video were emitted."""
        self._factory.check_scheduler(self.drawing)
        on_part = self._emit_frames if self._factory.decodes_in_parts else None
        pipeline = self._factory.open(self.drawing, self._denoise, self._generator, on_part)
        self._wrap_scheduler(pipeline.scheduler)
        self._guiders = {name: getattr(pipeline, name, None) for name in GUIDERS}
        arguments = self._factory.rules.arguments(self.drawing, self._generator)
        if self._factory.rules.uses_sdedit(self.drawing):
            self._sdedit = SDEdit(pipeline, pipeline.vae, self.drawing, self._generator)
            arguments |= self._sdedit.arguments()
        drawn = outputs_of(pipeline, arguments)
        if not self._factory.rules.is_video:
            return _picture(drawn[0])
        if on_part is None:
            self._emit_frames(drawn[0])
        if self._sound is not None:
            self._report(SoundDecoded(self.key, as_sound(drawn[1])))
        return None

    def _emit_frames(self, video: Tensor) -> None:
        """Emit frames: `[1, frames, 3, height, width]` in 0 to 1."""
        self._report(FramesDecoded(self.key, as_frames(video)))

    def _report(self, event: Event) -> None:
        if not self._cancelled:
            self._emit(event)

    def _as_motet_error(self, error: Exception) -> MotetError:
        """Return the error for the caller.

        A ValueError before the first forward pass is a bad request: pipelines check their arguments
        there.
        """
        if isinstance(error, ValueError) and not self._has_called:
            return BadRequest(f"the model refuses this request: {error}")
        if not isinstance(error, MotetError):
            log.error("drawing a picture failed", exc_info=error)
        return as_motet_error(error)

    def _denoise(self, call: ModelCall) -> Any:
        self._has_called = True
        if self._step < self.drawing.resume_step:
            return self._factory.trial.zeros(call.call)
        if call.target == DENOISER:
            self._part = self._part + 1 if self._part_of == self._step else 0
            self._part_of = self._step
            call = replace(call, part=self._part)
        return deferred_guidance(self._batcher.denoise(self.key, call))

    def _wrap_scheduler(self, scheduler: Any) -> None:
        """Wrap the scheduler's `step`, so that every step is counted and reported."""
        self._scheduler, step = scheduler, scheduler.step
        if "generator" in inspect.signature(step).parameters:
            # Else noise of pipelines that pass none would be the process's, as in diffusers.
            step = functools.partial(step, generator=self._generator)
        if self._factory.rules.sound_rate:
            self._sound = Companion(scheduler, self._finish_sound_step)
        is_fused = self._factory.fuses_steps(self.drawing.scheduler)
        advance = functools.partial(fused_step, step) if is_fused else step

        @functools.wraps(step)
        def reporting_step(
            output: Tensor, time: Any, sample: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if not self._steps:
                if self._sdedit is not None:
                    self._sdedit.begin(scheduler)
                self._begin(time)
            preview = self._preview(output, time, sample)
            result = advance(output, time, sample, *args, **kwargs)
            self._step += 1
            if self._step == self._steps:
                self._batcher.release(self.key)
            if self._sdedit is not None:
                result = _with_latents(result, self._sdedit.after(self._step, result[0]))
            return self._finish_step(result, preview)

        scheduler.step = reporting_step

    def _begin(self, time: Any) -> None:
        """Initialize at the first step, when the number of steps is known."""
        self._steps = steps_from(self._scheduler, time)
        self._initial_tensors = memory_tensors(self._schedulers())
        self._preview_steps = preview_steps(self.drawing.previews, self._steps)
        if self.drawing.resume_step > self._steps:
            message = f"resume: step {self.drawing.resume_step} of {self._steps}; leave resume out"
            raise BadRequest(message, param="resume")

    def _finish_step(self, result: Any, preview: Tensor | None) -> Any:
        if self._step < self.drawing.resume_step:
            return result
        self._unreported = (result[0], preview)
        if self._step == self.drawing.resume_step:
            return _with_latents(result, self._restored(result[0]))
        if self._sound is None:
            self._report_step()
        return result

    def _finish_sound_step(self, latents: Tensor) -> Tensor:
        """Report a step once the sound has had it too; return the sound's latents to go on with."""
        if self._step > self.drawing.resume_step:
            self._report_step()
        if self._step != self.drawing.resume_step or self._sound is None or not self._unreported:
            return latents
        self._restored(self._unreported[0])  # what the copy's step has replaced
        restored = self._sound.latents
        if restored is None or restored.shape != latents.shape:
            raise BadRequest("resume: has no sound of this video; make it anew", param="resume")
        return restored.to(latents)

    def _restored(self, like: Tensor) -> Tensor:
        """Restore the state in the checkpoint, and return its latents, of the form of `like`."""
        if self._sound is not None:
            self._sound.latents = None
        return unpack(self.drawing.resume, like, self._generator, self._memories())

    def _report_step(self) -> None:
        """Report the step, with a checkpoint where one is due."""
        if self._unreported is None:
            return
        latents, preview = self._unreported
        interval = self.drawing.checkpoint_every
        is_due = interval and self._step % interval == 0 and self._step < self._steps
        checkpoint = (
            pack(latents, self._generator, self._memories(), self._initial_tensors)
            if is_due
            else b""
        )
        self._report(StepDone(self.key, self._step, self._steps, preview, checkpoint))
        self._unreported = None

    def _schedulers(self) -> dict[str, Any]:
        """Return the scheduler and what is stepped beside it, by their names in checkpoints."""
        beside = {} if self._sound is None else self._sound.memories()
        return {_SCHEDULER: self._scheduler, **beside}

    def _memories(self) -> dict[str, Any]:
        """Return what the loop remembers of earlier steps: its schedulers, and guiders' momentum."""
        momenta = {
            name: getattr(guider, "momentum_buffer", None) for name, guider in self._guiders.items()
        }
        known = {name: momentum for name, momentum in momenta.items() if momentum is not None}
        return self._schedulers() | known

    def _preview(self, output: Tensor, time: Any, sample: Tensor) -> Tensor | None:
        """Return the estimate of the finished latents in the layout of the VAE, or None.

        A family that packs its latents in a way of its own has no previews.
        """
        if self._step + 1 not in self._preview_steps:
            return None
        try:
            estimated = estimate(self._scheduler, output, time, sample)
            return self._factory.spatial(estimated, self.drawing)
        except Exception as error:  # a failed preview must not fail the picture
            log.warning("no preview: %s: %s", type(error).__name__, error)
            self._preview_steps = frozenset()
            return None


def _with_latents(result: Any, latents: Tensor) -> Any:
    """Return the result of a scheduler's step with other latents."""
    return (latents, *result[1:]) if isinstance(result, tuple) else type(result)(latents)


def preview_steps(count: int, steps: int) -> frozenset[int]:
    """Return the steps after which there is a preview.

    They are spread evenly from a fifth to four fifths of the steps, and never include the last.
    """
    count = min(count, steps)  # which is each step there
    first, last = 0.2 * steps, 0.8 * steps
    spacing = (last - first) / max(count - 1, 1)
    previewed = {max(round(first + spacing * number), 1) for number in range(count)}
    return frozenset(step for step in previewed if step < steps)


def _picture(images: Tensor) -> Image.Image:
    """Return `[1, 3, height, width]` in 0 to 1 as 8-bit RGB, rounded as in diffusers.

    Raises InternalError if there are NaNs or infinities.
    """
    pixels = images[0].float().cpu().permute(1, 2, 0)
    if not bool(pixels.isfinite().all()):
        raise InternalError(
            "the picture has values that are not finite; use another dtype or guidance scale"
        )
    return Image.fromarray((pixels * 255).round().to(torch.uint8).numpy())
