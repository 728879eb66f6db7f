"""Compute one step of a picture's loop in one kernel: guidance and the scheduler's update.

The loop is diffusers' own. It gets the denoiser's output as a `DeferredTensor`, which observes that
the loop takes the unconditional and conditional halves, and with which scale it mixes them. The steps of
many schedulers are then linear: a factor times the noisy latents plus a factor times the output.
The factors are found by passing two coefficients in place of a picture; whether a scheduler is of this
kind is tested when the model is loaded.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.guidance import guided, guided_step

from .deferred_tensor import DeferredTensor, DeferredWork, materialized, other

aten = torch.ops.aten
_TEST_STEPS = 6  # denoising steps
_TOLERANCE = 1e-4


def deferred_guidance(output: Any) -> Any:
    """Return the denoiser's output, deferred if it has unconditional and conditional halves."""
    if not isinstance(output, tuple) or not output or not isinstance(output[0], Tensor):
        return output
    prediction = output[0]
    if len(prediction) % 2 or not gpu.takes(prediction) or not prediction.is_floating_point():
        return output
    prediction = prediction.contiguous()
    return (DeferredTensor(DenoiserOutput(prediction), prediction), *output[1:])


# --------------------------------------------------------------------------------------------- work
@dataclass(eq=False)
class DenoiserOutput(DeferredWork):
    """Represent the denoiser's output, or half of it."""

    x: Tensor
    is_half: bool = False

    def compute(self) -> Tensor:
        return self.x

    def after(self, operation: Any, args: Sequence[Any]) -> Any:
        if operation is aten.split.Tensor and not self.is_half and args[1:] == (len(self.x) // 2,):
            halves = self.x.split(args[1])
            return [DeferredTensor(DenoiserOutput(half, is_half=True), half) for half in halves]
        if (
            operation is aten.sub.Tensor
            and self.is_half
            and (unconditional := _half(args[1])) is not None
            and unconditional != self
        ):
            return DeferredTensor(ScaledDifference(unconditional, self, 1.0), self.x)
        return None


@dataclass(eq=False)
class ScaledDifference(DeferredWork):
    """Represent the difference of two halves, times a number."""

    unconditional: DenoiserOutput
    conditional: DenoiserOutput
    scale: float

    def compute(self) -> Tensor:
        return self.scale * (self.conditional.x - self.unconditional.x)

    def after(self, operation: Any, args: Sequence[Any]) -> Any:
        operand = other(args, self) if len(args) == 2 else None
        if operation is aten.mul.Tensor and isinstance(operand, (int, float)):
            return DeferredTensor(
                ScaledDifference(self.unconditional, self.conditional, self.scale * operand),
                self.conditional.x,
            )
        if operation is aten.add.Tensor and _half(operand) is self.unconditional:
            return DeferredTensor(
                GuidedOutput(self.unconditional.x, self.conditional.x, self.scale),
                self.conditional.x,
            )
        return None


@dataclass(eq=False)
class GuidedOutput(DeferredWork):
    """Represent the guided output for a picture."""

    unconditional: Tensor
    conditional: Tensor
    scale: float

    def compute(self) -> Tensor:
        return guided(self.unconditional, self.conditional, self.scale)

    def after(self, operation: Any, args: Sequence[Any]) -> None:
        return None


@dataclass(eq=False)
class SchedulerUpdate(DeferredWork):
    """Represent a scheduler's update: `sample_factor` · latents + `output_factor` · output."""

    sample: Tensor
    prediction: GuidedOutput
    sample_factor: float
    output_factor: float

    def compute(self) -> Tensor:
        prediction = self.prediction
        return guided_step(
            self.sample,
            prediction.unconditional,
            prediction.conditional,
            prediction.scale,
            self.sample_factor,
            self.output_factor,
        )

    def after(self, operation: Any, args: Sequence[Any]) -> None:
        return None


def _half(value: Any) -> DenoiserOutput | None:
    return (
        value.work
        if isinstance(value, DeferredTensor)
        and isinstance(value.work, DenoiserOutput)
        and value.work.is_half
        else None
    )


# --------------------------------------------------------------------------------------------- step
def fused_step(
    step: Callable[..., Any], output: Tensor, time: Any, sample: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return the result of a scheduler's linear `step` (see `is_linear`), computed by one kernel.

    The scheduler's state advances as usual.
    """
    if (
        not gpu.takes(sample)
        or output.shape != sample.shape
        or output.dtype != sample.dtype
        or kwargs.get("per_token_timesteps") is not None  # then it has as many factors as tokens
    ):
        return step(output, time, sample, *args, **kwargs)
    result = step(
        _coefficient_probe(sample, 0.0, 1.0),
        time,
        _coefficient_probe(sample, 1.0, 0.0),
        *args,
        **kwargs,
    )
    prediction, sample = _guided_output(output), sample.contiguous()
    sums = [
        _update(part, sample, prediction)
        for part in (result if isinstance(result, tuple) else result[:1])
    ]
    sums[0] = materialized(sums[0])
    return tuple(sums) if isinstance(result, tuple) else type(result)(sums[0])


def _guided_output(output: Tensor) -> GuidedOutput:
    """Return the output for a picture, guided or not."""
    if isinstance(output, DeferredTensor) and isinstance(output.work, GuidedOutput):
        return output.work
    unguided = materialized(output).contiguous()
    return GuidedOutput(unguided, unguided, 1.0)


def _update(coefficients: Tensor, sample: Tensor, prediction: GuidedOutput) -> Tensor:
    sample_factor, output_factor = coefficients.flatten().tolist()
    return DeferredTensor(SchedulerUpdate(sample, prediction, sample_factor, output_factor), sample)


def _coefficient_probe(sample: Tensor, sample_factor: float, output_factor: float) -> Tensor:
    """Return a picture of two coefficients, with as many dimensions as `sample`."""
    return torch.tensor([sample_factor, output_factor]).view(*[1] * (sample.ndim - 1), 2)


def is_linear(scheduler: Any) -> bool:
    """Return True if each step is linear in latents and output: no noise, memory or clipping."""
    try:
        return _is_linear(scheduler)
    except Exception:  # the scheduler's interface differs
        return False


def _is_linear(scheduler: Any) -> bool:
    reference, probed = (_with_timesteps(copy.deepcopy(scheduler)) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 4, 3, 5, generator=generator) * 3
    for time in reference.timesteps:
        output = torch.randn(sample.shape, generator=generator)
        state = generator.get_state()
        options = (
            {"generator": generator}
            if "generator" in inspect.signature(reference.step).parameters
            else {}
        )
        expected = reference.step(output, time, sample, return_dict=False, **options)[0]
        coefficients = probed.step(
            _coefficient_probe(sample, 0.0, 1.0),
            time,
            _coefficient_probe(sample, 1.0, 0.0),
            return_dict=False,
            **options,
        )[0]
        sample_factor, output_factor = coefficients.flatten().tolist()
        if not torch.equal(state, generator.get_state()):
            return False
        if not torch.allclose(
            sample_factor * sample + output_factor * output,
            expected,
            rtol=_TOLERANCE,
            atol=_TOLERANCE,
        ):
            return False
        sample = expected
    return True


def _with_timesteps(scheduler: Any) -> Any:
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(_TEST_STEPS, **shift)
    return scheduler
