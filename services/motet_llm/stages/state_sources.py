"""Define what a thinker has of a token that its talker goes on from: a state, by family.

Shapes: R tokens whose states are sent, N tokens of a step, X hidden size, W numbers of a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.weights import checkpoint
from motet_models.omni import talker_layer
from motet_shared.errors import ConfigError


class StateSource(ABC):
    """Compute the states of tokens that a step has computed."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner

    @abstractmethod
    def states(self, forward: Forward, rows: range, ids_R: Tensor, media_R: Tensor) -> Tensor:
        """Return states `[R, W]`, float32, on the model's device.

        rows: of the step. media_R: which tokens are placeholders of media.
        """

    def embedded(self, ids_R: Tensor) -> Tensor:
        """Return the input embeddings `[R, X]` of tokens."""
        found: Tensor = self._runner.model.get_input_embeddings()(ids_R).float()
        return found


class SummedStates(StateSource):
    """Add a token's input embedding to its last hidden state, which placeholders have alone."""

    def states(self, forward: Forward, rows: range, ids_R: Tensor, media_R: Tensor) -> Tensor:
        hidden_RX = forward.hidden_ND[rows.start : rows.stop].float()
        return hidden_RX + self.embedded(ids_R).masked_fill(media_R.unsqueeze(1), 0.0)


class LayerStates(StateSource):
    """Take the input embedding of text, the output of layer `layer` of media, and the token's id.

    Pictures add theirs to that output only afterwards. It is kept of steps whose kernels are
    launched, as all with media are.
    """

    def __init__(self, runner: ModelRunner, layer: int):
        super().__init__(runner)
        layers: Any = checkpoint.backbone(runner.model).layers
        if not 1 <= layer <= len(layers):
            raise ConfigError(
                f"talker_config.accept_hidden_layer: is {layer}; give 1 to {len(layers)}, the"
                " thinker's layers"
            )
        self._kept_NX: Tensor | None = None
        if layer < len(layers):
            layers[layer - 1].register_forward_hook(self._keep)

    def _keep(self, _module: Any, _args: Any, output: Any) -> None:
        # A copy: later layers may use the memory of a replayed one.
        self._kept_NX = (output if isinstance(output, Tensor) else output[0]).flatten(0, -2).clone()

    def states(self, forward: Forward, rows: range, ids_R: Tensor, media_R: Tensor) -> Tensor:
        found_RX = self.embedded(ids_R)
        if bool(media_R.any()):
            hidden_NX = forward.hidden_ND if self._kept_NX is None else self._kept_NX
            hidden_RX = hidden_NX[rows.start : rows.stop].float()
            found_RX = torch.where(media_R.unsqueeze(1), hidden_RX, found_RX)
        return torch.cat((found_RX, ids_R.float().unsqueeze(1)), dim=1)


def state_source(runner: ModelRunner, config: Mapping[str, Any]) -> StateSource:
    """Return the source for a checkpoint with this config.json. Raises ConfigError."""
    layer = talker_layer(config)
    return SummedStates(runner) if layer is None else LayerStates(runner, layer)
