"""Run a pipeline's own loop for one picture on a thread, from the prompt to the pixels.

The loop is diffusers' code unchanged, so the picture equals that of diffusers for every family and
scheduler. Only its forward passes are computed elsewhere, batched with those of other pictures, and
its scheduler is wrapped to report every step.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from motet_diffusion.kernels.guided import fused_step, promised
from motet_diffusion.pipeline.estimate import estimate
from motet_diffusion.pipeline.image_to_image import Reentry
from motet_diffusion.pipeline.pipeline_factory import PipelineFactory
from motet_shared.errors import BadRequest, InternalError, MotetError, as_motet_error

from .checkpoint import memory_before, pack, unpack
from .merge import Call
from .request import Done, Drawing, Event, Key, Step
from .step_batcher import Left, StepBatcher

log = logging.getLogger(__name__)


class DenoiseLoop:
    """Draw one picture on a thread of its own.

    `emit` and `ended` are called on that thread; after `dismiss` nothing more is emitted.
    """

    def __init__(
        self,
        studio: PipelineFactory,
        meeting: StepBatcher,
        key: Key,
        drawing: Drawing,
        emit: Callable[[Event], object],
        ended: Callable[[Key], object],
    ):
        self.key, self.drawing = key, drawing
        self._studio, self._meeting, self._emit, self._ended = studio, meeting, emit, ended
        self._generator = torch.Generator().manual_seed(drawing.seed)
        self._step = 0  # steps done
        self._steps = 0  # steps in total, known from the first one on
        self._asked = False
        self._dismissed = False
        self._shown: frozenset[int] = frozenset()
        self._fixed: dict[str, Any] = {}
        self._reentry: Reentry | None = None
        self._thread = threading.Thread(target=self._run, name=f"motet-painter-{key}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def dismiss(self) -> None:
        """Stop the loop at its next forward pass; text encoding and decoding run to their end."""
        self._dismissed = True
        self._meeting.dismiss(self.key)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    # ------------------------------------------------------------------------- on the loop's thread
    def _run(self) -> None:
        try:
            with torch.no_grad():
                done = Done(self.key, self._paint(), self._step)
            self._tell(done)
        except Left:
            pass
        except Exception as error:
            self._tell(Done(self.key, error=self._explained(error)))
        finally:
            self._ended(self.key)  # before `end`: afterwards `dismiss` is not called any more
            self._meeting.end(self.key)

    def _paint(self) -> Image.Image:
        pipeline = self._studio.open(self.drawing, self._ask)
        self._follow(pipeline.scheduler)
        arguments = self._studio.rules.arguments(self.drawing, self._generator)
        if self._studio.rules.reenters(self.drawing):
            self._reentry = Reentry(pipeline, pipeline.vae, self.drawing, self._generator)
            arguments |= self._reentry.arguments()
        return _picture(pipeline(**arguments).images)

    def _tell(self, event: Event) -> None:
        if not self._dismissed:
            self._emit(event)

    def _explained(self, error: Exception) -> MotetError:
        """Return the error for the caller.

        A ValueError before the first forward pass is a bad request: pipelines check their arguments
        there.
        """
        if isinstance(error, ValueError) and not self._asked:
            return BadRequest(f"the model refuses this request: {error}")
        if not isinstance(error, MotetError):
            log.error("a picture failed", exc_info=error)
        return as_motet_error(error)

    def _ask(self, call: Call) -> Any:
        self._asked = True
        if self._step < self.drawing.resume_step:
            return (_nothing(call, self._studio.denoiser.config),)
        return promised(self._meeting.ask(self.key, call, self.drawing.loras))

    def _follow(self, scheduler: Any) -> None:
        """Wrap the scheduler's `step`, so that every step is counted and reported."""
        step = scheduler.step
        advance = functools.partial(fused_step, step) if self._studio.fuses_steps else step

        @functools.wraps(step)
        def followed(output: Tensor, time: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._steps:
                if self._reentry is not None:
                    self._reentry.begin(scheduler)
                self._begin(scheduler, time)
            wanted = self._step + 1 in self._shown
            guess = estimate(scheduler, output, time, sample) if wanted else None
            result = advance(output, time, sample, *args, **kwargs)
            self._step += 1
            if self._step == self._steps:
                self._meeting.leave(self.key)
            if self._reentry is not None:
                result = _with(result, self._reentry.after(self._step, result[0]))
            return self._after(scheduler, result, guess)

        scheduler.step = followed

    def _begin(self, scheduler: Any, time: Any) -> None:
        """Initialize at the first step, when the number of steps is known."""
        self._steps = _steps_from(scheduler, time)
        self._fixed = memory_before(scheduler)
        self._shown = preview_steps(self.drawing.previews, self._steps)
        if self.drawing.resume_step > self._steps:
            message = f"resume: {self.drawing.resume_step} steps are done of {self._steps}; draw the picture anew"
            raise BadRequest(message, param="resume")

    def _after(self, scheduler: Any, result: Any, guess: Tensor | None) -> Any:
        latents = result[0]
        if self._step < self.drawing.resume_step:
            return result
        if self._step == self.drawing.resume_step:
            latents = unpack(self.drawing.resume, latents, self._generator, scheduler)
            return _with(result, latents)
        every = self.drawing.checkpoint_every
        due = every and self._step % every == 0 and self._step < self._steps
        checkpoint = pack(latents, self._generator, scheduler, self._fixed) if due else b""
        shown = None if guess is None else self._spatial(guess)
        self._tell(Step(self.key, self._step, self._steps, shown, checkpoint))
        return result

    def _spatial(self, guess: Tensor) -> Tensor | None:
        """Return the latents in the layout of the VAE, or None.

        A family that packs its latents in a way of its own has no previews.
        """
        try:
            return self._studio.spatial(guess, self.drawing)
        except Exception as error:  # a failed preview must not fail the picture
            log.warning("no preview: %s: %s", type(error).__name__, error)
            self._shown = frozenset()
            return None


def _with(result: Any, latents: Tensor) -> Any:
    """Return the result of a scheduler's step with other latents."""
    return (latents, *result[1:]) if isinstance(result, tuple) else type(result)(latents)


def preview_steps(count: int, steps: int) -> frozenset[int]:
    """Return the steps after which there is a preview.

    They are spread evenly from a fifth to four fifths of the steps, and never include the last.
    """
    first, last = 0.2 * steps, 0.8 * steps
    apart = (last - first) / max(count - 1, 1)
    wanted = {max(round(first + apart * number), 1) for number in range(count)}
    return frozenset(number for number in wanted if number < steps)


def _steps_from(scheduler: Any, time: Any) -> int:
    """Return the number of steps, the first of which is at `time`.

    It is less than the number set where a picture is changed.
    """
    times = torch.as_tensor(scheduler.timesteps)
    if getattr(scheduler, "begin_index", None) is not None:
        return len(times) - int(scheduler.begin_index)
    first = (times == torch.as_tensor(time).to(times)).nonzero()
    return len(times) - (int(first[0]) if len(first) else 0)


def _nothing(call: Call, config: Any) -> Tensor:
    """Return zeros in the shape of the denoiser's answer."""
    sample = next(iter(call.values()))
    channels = getattr(config, "out_channels", None) or config.in_channels
    shape = list(sample.shape)
    shape[1 if sample.ndim == 4 else -1] = channels
    output: Tensor = sample.new_zeros(shape)
    return output


def _picture(images: Tensor) -> Image.Image:
    """Return `[1, 3, height, width]` in 0 to 1 as 8-bit RGB, rounded as in diffusers.

    Raises InternalError if there are NaNs or infinities.
    """
    pixels = images[0].float().cpu().permute(1, 2, 0)
    if not bool(pixels.isfinite().all()):
        raise InternalError(
            "the picture has numbers that are none (NaN); use another dtype or guidance scale"
        )
    return Image.fromarray((pixels * 255).round().to(torch.uint8).numpy())
