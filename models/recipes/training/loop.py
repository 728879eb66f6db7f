"""Train by a schedule: learning rates, updates, saved state, and the loop around them.

Each recipe defines the model, its batches and its losses.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from recipes.training.errors import RecipeError
from recipes.training.muon import Muon
from recipes.training.ranks import Ranks

Batch = TypeVar("Batch")
Report = TypeVar("Report")
_MANY = 10**9  # steps: more than any run takes


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Define the learning rate's course: warmup, constant, then linear decay to zero.

    decay: share of `steps`. restarts: (step, factor); the course above ends at the first, and from
    each the factor decays linearly to zero at the next.
    """

    steps: int
    warmup: int = 100
    decay: float = 0.2
    restarts: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise RecipeError(f"steps={self.steps}: pass 1 or more with --steps", param="steps")

    def factor(self, step: float) -> float:
        """Return the factor on every learning rate at `step`, counted from 0."""
        start, rate, decay = max(
            ((s, rate, 1.0) for s, rate in self.restarts if s <= step), default=(0, 1.0, self.decay)
        )
        end = min((s for s, _ in self.restarts if step < s < self.steps), default=self.steps)
        left = (end - step) / max(1.0, (end - start) * decay)
        return max(0.0, rate * min(1.0, (step - start + 1) / self.warmup, left))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Define one of several stages of a training.

    matrix_lr, kernel_lr: Muon's, of matrices and of convolutions; None trains them with AdamW.
    first: index of its first example, so that stages of one seed share none.
    """

    steps: int
    batch: int
    matrix_lr: float | None
    other_lr: float
    kernel_lr: float | None = None
    warmup: int = 100
    decay: float = 0.4
    first: int = 0

    def schedule(self, steps: int = 0) -> Schedule:
        """Return its schedule, over `steps` if given."""
        return Schedule(steps=steps or self.steps, warmup=self.warmup, decay=self.decay)


def computes_in_half(device: torch.device) -> bool:
    """Return True if a device has instructions for bfloat16; without them it is many times slower."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def optimizers(
    model: nn.Module,
    *,
    matrix_lr: float | None,
    other_lr: float,
    kernel_lr: float | None = None,
) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices and for kernels of convolutions, if they have a rate.

    AdamW updates the rest. Frozen parameters have neither.
    """
    adam = partial(torch.optim.AdamW, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    kernels: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in (param for param in model.parameters() if param.requires_grad):
        if matrix_lr is not None and param.ndim == 2 and id(param) not in tables:
            matrices.append(param)
        elif kernel_lr is not None and param.ndim > 2 and param[0].numel() > 1:
            kernels.append(param)
        else:
            others.append(param)
    muons = [
        Muon(params, lr=rate, decay=decay)
        for params, rate, decay in ((matrices, matrix_lr, 0.05), (kernels, kernel_lr, 0.0))
        if params and rate is not None
    ]
    return [*muons, adam(others)]


class Training(ABC, Generic[Batch, Report]):
    """Run a training: a module, its optimizers and the step, saved and restored together."""

    saved_as = "model"  # key of the module in a saved state
    half = False  # whether passes and optimizers compute in bfloat16
    ranks = Ranks()  # the processes that share the run; the leader writes the log and the state
    seconds: float | None = None  # that bound a run, in place of the schedule's steps
    begun = 0.0  # when that run began, by the monotonic clock
    _leaders_share = 0.0  # of a run's time that was over after the last step, by the leader's clock

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        *,
        matrix_lr: float | None,
        other_lr: float,
        kernel_lr: float | None = None,
    ) -> None:
        self.module, self.schedule, self.step = module, schedule, 0
        self.device = next(module.parameters()).device
        self.optimizers = optimizers(
            module, matrix_lr=matrix_lr, other_lr=other_lr, kernel_lr=kernel_lr
        )
        self.peaks = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers
        ]

    @abstractmethod
    def batches(self) -> Iterable[Batch]:
        """Yield the batches from `step` to the end of the schedule."""

    @abstractmethod
    def train_step(self, batch: Batch) -> Report:
        """Compute losses and gradients, and call `update`."""

    @abstractmethod
    def progress(self, reports: Sequence[Report], seconds: float) -> str:
        """Format a log line about the last steps, which took `seconds`."""

    @property
    def share(self) -> float:
        """Return the share of the run that is done: of its time if that bounds it, or of its steps."""
        if self.seconds is None:
            return self.step / self.schedule.steps
        if self.ranks.count > 1:
            return self._leaders_share
        return min((time.monotonic() - self.begun) / self.seconds, 1.0)

    @property
    def last_step(self) -> int:
        """Return the step before which batches end; a run bound by time takes as many as it can."""
        return self.schedule.steps if self.seconds is None else self.step + _MANY

    @property
    def steps_left(self) -> range:
        """Return the numbers of the steps that are left."""
        return range(self.step, self.last_step)

    def autocast(self) -> torch.autocast:
        """Return the context in which passes compute in bfloat16, if `half`."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    def update(self, *, rate: float = 1.0) -> None:
        """Apply the gradients at the schedule's rates times `rate`, and count the step."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        place = self.step if self.seconds is None else self.share * self.schedule.steps
        factor = self.schedule.factor(place) * rate
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            with self.autocast():  # else Muon takes half of a step's time
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def run(
        self,
        state: Path,
        *,
        every: float = 120.0,
        log: int = 50,
        seconds: float | None = None,
    ) -> list[Report]:
        """Train to the end of the schedule; stop after a step if a file `stop` is beside `state`.

        The state is saved every `every` seconds, and however the run ends. seconds: of the run; the
        schedule's course is then stretched over what the first batch leaves of them, whatever number
        of steps that allows. Returns the steps' reports. Raises RecipeError for a run without time.
        """
        if seconds is not None and seconds <= 0:
            raise RecipeError(f"seconds={seconds:g}: give a run more than 0", param="seconds")
        reports: list[Report] = []
        since = saved = self.begun = time.monotonic()
        self.seconds = seconds
        try:
            for batch in self.batches():
                if seconds is not None and not reports:  # the first batch may take long to make
                    begun, self.begun = self.begun, time.monotonic()
                    self.seconds = max(seconds - (self.begun - begun), 1e-3)
                reports.append(self.train_step(batch))
                now = time.monotonic()
                if self.ranks.is_leader and self.step % log == 0:
                    print(self.progress(reports[-log:], now - since), flush=True)
                    since = now
                if self.ranks.is_leader and now - saved > every:
                    self.save_state(state)
                    saved = now
                if self._ends(state.parent / "stop"):
                    break
        finally:
            if self.ranks.is_leader:
                self.save_state(state)
        return reports

    def _ends(self, stop: Path) -> bool:
        """Return True if the run ends here, which all ranks do after the same step."""
        over = 0.0
        if self.seconds is not None and self.ranks.is_leader:
            over = min((time.monotonic() - self.begun) / self.seconds, 1.0)
        stops, self._leaders_share = self.ranks.sum([float(stop.exists()), over])
        return stops > 0 or self.share >= 1.0

    def mean_gradients(self) -> None:
        """Replace the gradients by their means over all ranks."""
        if self.ranks.count == 1:
            return
        gradients = [one.grad for one in self.module.parameters() if one.grad is not None]
        self.ranks.sum([], gradients)
        torch._foreach_div_(gradients, float(self.ranks.count))

    def save_state(self, path: Path) -> None:
        """Save the step, the module and the optimizers atomically."""
        state = {"step": self.step, self.saved_as: self.module.state_dict()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load_state(self, path: Path) -> None:
        """Restore a saved state."""
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.step = state["step"]
        self.module.load_state_dict(state[self.saved_as])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


class StageTraining(Training[Batch, Report]):
    """Train the part of a model that belongs to one stage: an attribute of both recipe and model."""

    saved_as = "part"
    recipe: Any
    model: Any

    def __init__(self, recipe: Any, model: Any, stage: str, *, steps: int = 0) -> None:
        """Take the stage's settings from the recipe; `steps`: in place of its own."""
        self.recipe, self.model, self.name = recipe, model, stage
        self.stage: Stage = getattr(recipe, stage)
        super().__init__(
            getattr(model, stage),
            self.stage.schedule(steps),
            matrix_lr=self.stage.matrix_lr,
            other_lr=self.stage.other_lr,
            kernel_lr=self.stage.kernel_lr,
        )


def exit_on_sigterm() -> None:
    """Raise SystemExit on SIGTERM, so that a run saves its state."""

    def interrupted(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, interrupted)


def make_readable(folder: Path) -> None:
    """Make a checkpoint's files readable for all users, such as a container's."""
    for path in folder.iterdir():
        path.chmod(0o755 if path.is_dir() else 0o644)
