"""Compute one step of a picture's loop in one kernel: guidance and the scheduler's update.

The loop is diffusers' own. It gets the denoiser's answer as a `DeferredTensor`, which observes that
the loop takes the halves with and without text, and with which scale it mixes them. The steps of
many schedulers are then linear: a factor times the noisy latents plus a factor times the answer.
The factors are found by passing two numbers in place of a picture; whether a scheduler is of this
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

from .deferred_tensor import DeferredTensor, Work, known, other

aten = torch.ops.aten
_TRIED = 6  # steps of the test
_ALIKE = 1e-4


def promised(answer: Any) -> Any:
    """Return the denoiser's answer, deferred if it has halves with and without text."""
    if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], Tensor):
        return answer
    said = answer[0]
    if len(said) % 2 or not gpu.takes(said) or not said.is_floating_point():
        return answer
    said = said.contiguous()
    return (DeferredTensor(Said(said), said), *answer[1:])


# --------------------------------------------------------------------------------------------- work
@dataclass(eq=False)
class Said(Work):
    """Represent the denoiser's answer, or half of it."""

    x: Tensor
    is_half: bool = False

    def compute(self) -> Tensor:
        return self.x

    def after(self, operation: Any, args: Sequence[Any]) -> Any:
        if operation is aten.split.Tensor and not self.is_half and args[1:] == (len(self.x) // 2,):
            halves = self.x.split(args[1])
            return [DeferredTensor(Said(half, is_half=True), half) for half in halves]
        if (
            operation is aten.sub.Tensor
            and self.is_half
            and (without := _half(args[1])) is not None
            and without != self
        ):
            return DeferredTensor(Scaled(without, self, 1.0), self.x)
        return None


@dataclass(eq=False)
class Scaled(Work):
    """Represent the difference of two halves, times a number."""

    without: Said
    with_text: Said
    scale: float

    def compute(self) -> Tensor:
        return self.scale * (self.with_text.x - self.without.x)

    def after(self, operation: Any, args: Sequence[Any]) -> Any:
        given = other(args, self) if len(args) == 2 else None
        if operation is aten.mul.Tensor and isinstance(given, (int, float)):
            return DeferredTensor(
                Scaled(self.without, self.with_text, self.scale * given), self.with_text.x
            )
        if operation is aten.add.Tensor and _half(given) is self.without:
            return DeferredTensor(
                Guided(self.without.x, self.with_text.x, self.scale), self.with_text.x
            )
        return None


@dataclass(eq=False)
class Guided(Work):
    """Represent the guided answer for a picture."""

    without: Tensor
    with_text: Tensor
    scale: float

    def compute(self) -> Tensor:
        return guided(self.without, self.with_text, self.scale)

    def after(self, operation: Any, args: Sequence[Any]) -> None:
        return None


@dataclass(eq=False)
class Sum(Work):
    """Represent a scheduler's update: `keep` times the latents plus `change` times the answer."""

    sample: Tensor
    said: Guided
    keep: float
    change: float

    def compute(self) -> Tensor:
        said = self.said
        return guided_step(
            self.sample, said.without, said.with_text, said.scale, self.keep, self.change
        )

    def after(self, operation: Any, args: Sequence[Any]) -> None:
        return None


def _half(value: Any) -> Said | None:
    return (
        value.work
        if isinstance(value, DeferredTensor) and isinstance(value.work, Said) and value.work.is_half
        else None
    )


# --------------------------------------------------------------------------------------------- step
def fused_step(
    step: Callable[..., Any], output: Tensor, time: Any, sample: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return the result of a scheduler's linear `step` (see `is_sum`), computed by one kernel.

    The scheduler's state advances as usual.
    """
    if not gpu.takes(sample) or output.shape != sample.shape or output.dtype != sample.dtype:
        return step(output, time, sample, *args, **kwargs)
    result = step(_numbers(sample, 0.0, 1.0), time, _numbers(sample, 1.0, 0.0), *args, **kwargs)
    said, sample = _said(output), sample.contiguous()
    sums = [
        _sum(part, sample, said) for part in (result if isinstance(result, tuple) else result[:1])
    ]
    sums[0] = known(sums[0])
    return tuple(sums) if isinstance(result, tuple) else type(result)(sums[0])


def _said(output: Tensor) -> Guided:
    """Return the answer for a picture, guided or not."""
    if isinstance(output, DeferredTensor) and isinstance(output.work, Guided):
        return output.work
    plain = known(output).contiguous()
    return Guided(plain, plain, 1.0)


def _sum(numbers: Tensor, sample: Tensor, said: Guided) -> Tensor:
    keep, change = numbers.flatten().tolist()
    return DeferredTensor(Sum(sample, said, keep, change), sample)


def _numbers(sample: Tensor, keep: float, change: float) -> Tensor:
    """Return a picture of two numbers, with as many dimensions as `sample`."""
    return torch.tensor([keep, change]).view(*[1] * (sample.ndim - 1), 2)


def is_sum(scheduler: Any) -> bool:
    """Return True if each step is linear in latents and answer: no noise, memory or clipping."""
    try:
        return _is_sum(scheduler)
    except Exception:  # the scheduler's interface differs
        return False


def _is_sum(scheduler: Any) -> bool:
    whole, small = (_set(copy.deepcopy(scheduler)) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 4, 3, 5, generator=generator) * 3
    for time in whole.timesteps:
        output = torch.randn(sample.shape, generator=generator)
        state = generator.get_state()
        options = (
            {"generator": generator}
            if "generator" in inspect.signature(whole.step).parameters
            else {}
        )
        due = whole.step(output, time, sample, return_dict=False, **options)[0]
        numbers = small.step(
            _numbers(sample, 0.0, 1.0),
            time,
            _numbers(sample, 1.0, 0.0),
            return_dict=False,
            **options,
        )[0]
        keep, change = numbers.flatten().tolist()
        if not torch.equal(state, generator.get_state()):
            return False
        if not torch.allclose(keep * sample + change * output, due, rtol=_ALIKE, atol=_ALIKE):
            return False
        sample = due
    return True


def _set(scheduler: Any) -> Any:
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(_TRIED, **shift)
    return scheduler
