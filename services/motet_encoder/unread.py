"""Leave out the parts of a tower that its features do not read: last layers and a pooling head.

LLaVA and its relatives take their features from a layer before the last one
(`vision_feature_layer`), while transformers computes the whole tower.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def leave_out(towers: PreTrainedModel) -> None:
    """Replace what no feature of `towers` depends on; the numbers of the other layers stay."""
    for module in towers.modules():
        if getattr(
            module, "use_head", False
        ):  # its result is `pooler_output`, a vector per picture
            module.use_head = False
            del module.head
    tower = getattr(towers, "vision_tower", None)
    wanted = getattr(towers.config, "vision_feature_layer", None)
    if isinstance(tower, PreTrainedModel) and wanted is not None:
        layers = _layers(tower)
        deepest = max(_number(index, len(layers)) for index in _as_list(wanted))
        for layer in layers[deepest:]:
            _skip(layer)


def _as_list(wanted: int | list[int]) -> list[int]:
    return [wanted] if isinstance(wanted, int) else list(wanted)


def _number(index: int, num_layers: int) -> int:
    """Return the number of layers below hidden state `index`, of which there are `num_layers` + 1."""
    return index if index >= 0 else num_layers + 1 + index


def _layers(tower: PreTrainedModel) -> list[nn.Module]:
    """Return the layers whose outputs are the tower's hidden states, in order."""
    recorded = getattr(tower, "_can_record_outputs", None) or {}
    kind: Any = recorded.get("hidden_states")
    return [] if kind is None else [m for m in tower.modules() if isinstance(m, kind)]


def _skip(layer: nn.Module) -> None:
    """Make a layer return its input, and drop its weights."""
    for name in list(layer._modules):
        delattr(layer, name)
    layer.forward = _unchanged


def _unchanged(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states
