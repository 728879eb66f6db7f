"""Average the weights of a training's last steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Average:
    """Hold the running mean of a module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(module.named_parameters(remove_duplicate=False))  # tied ones, too
        self.means: list[Tensor] = []
        self.count = 0  # states in the mean

    @torch.no_grad()
    def follow(self) -> None:
        """Add the parameters as they are to the mean."""
        self.count += 1
        values: list[Tensor] = [*self.parameters.values()]
        if self.count == 1:
            self.means = [value.clone() for value in values]
        else:
            torch._foreach_lerp_(self.means, values, 1 / self.count)

    def state(self) -> dict[str, Tensor]:
        """Return the mean of each parameter by name."""
        return dict(zip(self.parameters, self.means, strict=True))
