"""Muon for the matrices, AdamW for the rest, on one warmup-stable-decay schedule.

Muon (Jordan et al. 2024): momentum, then the nearest semi-orthogonal matrix by five Newton-Schulz steps. Own
version because it works in float32 and batches matrices of one shape, which suits a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """[B, m, n] → semi-orthogonal matrices near the input's polar factors (singular values about 0.7 to 1.2)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = update.shape[1] > update.shape[2]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalized updates; for two-dimensional parameters only."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                rows, columns = param.shape
                shapes[rows, columns].append(param)
            for (rows, columns), params in shapes.items():
                update = orthogonalize(torch.stack([self._momentum(p, group["momentum"]) for p in params]))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for param, direction in zip(params, update, strict=True):
                    param.mul_(1 - group["lr"] * group["decay"]).sub_(direction, alpha=scale)

    def _momentum(self, param: nn.Parameter, momentum: float) -> Tensor:
        if param.grad is None:
            raise ValueError("a matrix has no gradient: every parameter must take part in the loss")
        buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
        buffer.lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(buffer, momentum)


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


def optimizers(model: nn.Module, *, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the weights inside layers; AdamW for the (tied) embeddings and the norms."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in model.parameters():
        (matrices if param.ndim == 2 and id(param) not in tables else others).append(param)
    muon = Muon(matrices, lr=matrix_lr, decay=0.05)
    return [muon, torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0)]
