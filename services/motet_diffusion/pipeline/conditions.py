"""Add to one picture's denoiser calls what it is drawn with: ControlNets, IP-Adapters, LoRA."""

from __future__ import annotations

from typing import Any

import torch

from motet_diffusion.engine.merge import Call, rows_of
from motet_diffusion.engine.model_call import Denoise, ModelCall, PromptTokens
from motet_diffusion.engine.request import PictureRequest

from .controlnets import PictureControls


class Conditions:
    """Complete a picture's calls of its denoiser, and have them computed by `denoise`.

    prompts: rows without the image and with it, in the order of guidance.
    """

    def __init__(
        self,
        drawing: PictureRequest,
        scheduler: Any,
        controls: PictureControls | None,
        prompts: tuple[PromptTokens, ...],
        denoise: Denoise,
    ):
        self._drawing, self._scheduler, self._denoise = drawing, scheduler, denoise
        self._controls, self._prompts = controls, prompts
        self._step = self._steps = 0

    def __call__(self, call: Call) -> Any:
        step, self._step = self._step, self._step + 1
        if self._controls is not None and step >= self._drawing.resume_step:
            self._steps = self._steps or steps_from(self._scheduler, call["timestep"]) + step
            call = {**call, **self._controls.residuals(call, step, self._steps, self._run)}
        rows = rows_of(call)
        prompts = tuple(one._replace(tokens=one.tokens[-rows:]) for one in self._prompts)
        return self._denoise(ModelCall(call, loras=self._drawing.loras, prompts=prompts))

    def _run(self, name: str, call: Call) -> Any:
        return self._denoise(ModelCall(call, target=name))


def steps_from(scheduler: Any, time: Any) -> int:
    """Return the number of steps, the first of which is at `time`.

    It is less than the number set where a picture is changed.
    """
    times = torch.as_tensor(scheduler.timesteps)
    if getattr(scheduler, "begin_index", None) is not None:
        return len(times) - int(scheduler.begin_index)
    first = (times == torch.as_tensor(time).to(times).flatten()[:1]).nonzero()
    return len(times) - (int(first[0]) if len(first) else 0)
