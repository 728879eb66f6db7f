"""What every training does: rates that follow a schedule, updates, a state on the disk, and the loop around them.

What is learnt, from which batches and by which losses, is its recipe's.
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
from typing import Generic, TypeVar

import torch
from torch import nn

from muon import Muon

Batch = TypeVar("Batch")
Report = TypeVar("Report")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warmup, a stable stretch, then a linear decay to zero over the last `decay` share of `steps`.

    With `restarts` (step, rate) this is the course up to the first of them; from each, the rates go from `rate` down to
    zero at the next.
    """

    steps: int
    warmup: int = 100
    decay: float = 0.2
    restarts: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}: pass --steps")

    def at(self, step: int) -> float:
        """The factor on every learning rate at `step`, counted from 0."""
        start, rate, decay = max(
            ((s, rate, 1.0) for s, rate in self.restarts if s <= step), default=(0, 1.0, self.decay)
        )
        end = min((s for s, _ in self.restarts if step < s < self.steps), default=self.steps)
        left = (end - step) / max(1.0, (end - start) * decay)
        return rate * min(1.0, (step - start + 1) / self.warmup, left)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One of several trainings of a model: its length, batch and rates; without a `matrix_lr`, AdamW does it all."""

    steps: int
    batch: int
    matrix_lr: float | None
    other_lr: float
    warmup: int = 100
    decay: float = 0.4

    def schedule(self, steps: int = 0) -> Schedule:
        """Its course, over other `steps` if they are given."""
        return Schedule(steps=steps or self.steps, warmup=self.warmup, decay=self.decay)


def optimizers(
    model: nn.Module, *, matrix_lr: float | None, other_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the weights inside layers, if they have a rate; AdamW for the (tied) embeddings and the norms."""
    adam = partial(torch.optim.AdamW, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0)
    if matrix_lr is None:
        return [adam(model.parameters())]
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in model.parameters():
        (matrices if param.ndim == 2 and id(param) not in tables else others).append(param)
    return [Muon(matrices, lr=matrix_lr, decay=0.05), adam(others)]


class Training(ABC, Generic[Batch, Report]):
    """One run: what is learnt, its optimizers and the step, saved together and restored together."""

    saved_as = "model"  # the name of what is learnt in a saved state
    half = False  # whether the optimizers compute in bfloat16
    leads = True  # of several processes that share a run, one writes the log and the state

    def __init__(
        self, learnt: nn.Module, schedule: Schedule, *, matrix_lr: float | None, other_lr: float
    ) -> None:
        self.learnt, self.schedule, self.step = learnt, schedule, 0
        self.optimizers = optimizers(learnt, matrix_lr=matrix_lr, other_lr=other_lr)
        self.peaks = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers
        ]

    @abstractmethod
    def batches(self) -> Iterable[Batch]:
        """What is learnt from, from `step` to the end of the schedule."""

    @abstractmethod
    def train_step(self, batch: Batch) -> Report:
        """One update: losses, their gradients, `update`."""

    @abstractmethod
    def progress(self, reports: Sequence[Report], seconds: float) -> str:
        """A log line about the last steps and the time that they took."""

    def update(self, *, rate: float = 1.0) -> None:
        """Move the weights along their gradients, at the schedule's rates times `rate`; that is a step."""
        torch.nn.utils.clip_grad_norm_(self.learnt.parameters(), 1.0)
        factor = self.schedule.at(self.step) * rate
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=self.half
            ):  # Muon's products are half of a step else
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def run(self, state: Path, *, every: float = 120.0, log: int = 50) -> list[Report]:
        """Train to the end of the schedule, or for one more step if a file `stop` lies beside `state`.

        The state is saved every `every` seconds, and however the run ends. Returns what each step said.
        """
        reports: list[Report] = []
        since = saved = time.monotonic()
        try:
            for batch in self.batches():
                reports.append(self.train_step(batch))
                now = time.monotonic()
                if self.leads and self.step % log == 0:
                    print(self.progress(reports[-log:], now - since), flush=True)
                    since = now
                if self.leads and now - saved > every:
                    self.save_state(state)
                    saved = now
                if self.stopped(state.parent / "stop"):
                    break
        finally:
            if self.leads:
                self.save_state(state)
        return reports

    def stopped(self, stop: Path) -> bool:
        """Whether the run shall end here."""
        return stop.exists()

    def save_state(self, path: Path) -> None:
        state = {"step": self.step, self.saved_as: self.learnt.state_dict()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load_state(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.learnt.load_state_dict(state[self.saved_as])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def end_on_sigterm() -> None:
    """Have SIGTERM unwind the process, so that a run saves its state."""

    def interrupted(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, interrupted)


def readable(folder: Path) -> None:
    """Let everybody read a checkpoint: the weights come out private, which a container's user could not read."""
    for path in folder.iterdir():
        path.chmod(0o644)
