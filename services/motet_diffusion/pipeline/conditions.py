"""Add to one picture's denoiser calls what it is drawn with: ControlNets, IP-Adapters, LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from motet_diffusion.engine.merge import Call
from motet_diffusion.engine.model_call import Denoise, ModelCall
from motet_diffusion.engine.request import PictureRequest

from .control_families import Residuals
from .controlnets import PictureControls
from .prompt_families import PicturePrompt


class Conditions:
    """Complete a picture's calls of its denoiser, and have them computed by `denoise`.

    calls_per_step: 1, or 2 where a pipeline calls its denoiser for the prompt, then for the negative
    one, instead of once with a row for each. The ControlNets of a step are called once all the same.
    """

    def __init__(
        self,
        drawing: PictureRequest,
        scheduler: Any,
        controls: PictureControls | None,
        prompts: Sequence[PicturePrompt],
        denoise: Denoise,
        calls_per_step: int = 1,
    ):
        self._drawing, self._scheduler, self._denoise = drawing, scheduler, denoise
        self._controls, self._prompts = controls, prompts
        self._calls_per_step = calls_per_step
        self._calls = self._steps = 0
        self._residuals: Residuals = {}

    def __call__(self, call: Call) -> Any:
        step, part = divmod(self._calls, self._calls_per_step)
        self._calls += 1
        if self._controls is not None and step >= self._drawing.resume_step:
            if part == 0:
                self._steps = self._steps or steps_from(self._scheduler, call["timestep"], step)
                self._residuals = self._controls.residuals(call, step, self._steps, self._run)
            call = {**call, **self._residuals}
        prompts = tuple(prompt.at(call, is_negative=part == 1) for prompt in self._prompts)
        return self._denoise(ModelCall(call, loras=self._drawing.loras, prompts=prompts))

    def _run(self, name: str, call: Call) -> Any:
        return self._denoise(ModelCall(call, target=name))


def steps_from(scheduler: Any, time: Any, done: int = 0) -> int:
    """Return the number of steps of a loop, of which some are done and the next one is at `time`.

    It is less than the number set where a picture is changed.
    """
    times = torch.as_tensor(scheduler.timesteps)
    if getattr(scheduler, "begin_index", None) is not None:
        return len(times) - int(scheduler.begin_index)
    first = (times == torch.as_tensor(time).to(times).flatten()[:1]).nonzero()
    return len(times) - int(first[0]) + done if len(first) else len(times)
