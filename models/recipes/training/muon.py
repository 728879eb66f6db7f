"""Implement Muon (Jordan et al., 2024): momentum with orthogonalized updates.

Five Newton-Schulz steps approximate the nearest semi-orthogonal matrix. This version computes in
float32 and batches matrices of equal shape, which suits a CPU. The kernels of a convolution are a
matrix with one row per output channel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from recipes.training.errors import RecipeError


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Map [B, m, n] to semi-orthogonal matrices near the polar factors.

    Singular values are about 0.7 to 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = update.shape[1] > update.shape[2]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Apply Nesterov momentum with orthogonalized updates; for parameters of two dimensions or more."""

    def __init__(
        self, params: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Raises RecipeError for a parameter without gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                rows = len(param)
                shapes[rows, param.numel() // rows].append(param)
            for (rows, columns), params in shapes.items():
                updates = self._momentum(params, group["momentum"])
                found = orthogonalize(torch.stack([update.flatten(1) for update in updates]))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                directions = [
                    one.view_as(param).to(param.dtype)
                    for param, one in zip(params, found, strict=True)
                ]
                if group["decay"]:
                    torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(params, directions, alpha=-scale)

    def _momentum(self, params: Sequence[Tensor], momentum: float) -> Sequence[Tensor]:
        """Update the momentum of parameters, and return their updates before orthogonalization."""
        grads: list[Tensor] = []
        buffers: list[Tensor] = []
        for param in params:
            if param.grad is None:
                raise RecipeError(
                    f"params: a matrix of shape {tuple(param.shape)} has no gradient; every"
                    " parameter must take part in the loss",
                    param="params",
                )
            grads.append(param.grad)
            buffers.append(self.state[param].setdefault("momentum", torch.zeros_like(param)))
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        return torch._foreach_lerp(grads, buffers, momentum)
