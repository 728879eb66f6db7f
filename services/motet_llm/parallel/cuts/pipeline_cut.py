"""Cut a loaded model by layers: each stage of a pipeline keeps some, one after the other.

The first stage also has the embeddings, the last norm and the head: hidden states go around, from
stage to stage and back to the first, so that the leader has all that follows the layers. Modules of
other stages are replaced by ones that pass hidden states on.

Shapes: N packed tokens, X hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_llm.parallel.membership import Membership
from motet_llm.weights.checkpoint import backbone
from motet_shared.errors import ConfigError

from .agreement import first_logits
from .shares import Share

_PLAIN = (int, float, str, bool, type(None))


class AbsentLayer(nn.Module):
    """Stand for a layer of another stage: return the hidden states.

    original: whose plain attributes model code may read. extra: what such a layer returns besides
    them; None: it returns them alone.
    """

    def __init__(self, original: nn.Module, extra: tuple[Any, ...] | None):
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, _PLAIN):
                setattr(self, name, value)
        self.extra = extra

    def forward(self, hidden_states: Tensor, *_args: Any, **_options: Any) -> Any:
        passed = self.passed(hidden_states)
        return passed if self.extra is None else (passed, *self.extra)

    def passed(self, hidden_1NX: Tensor) -> Tensor:
        return hidden_1NX


class StageInput(AbsentLayer):
    """Stand for the stages before: receive the hidden states of the last of them."""

    def __init__(self, original: nn.Module, extra: tuple[Any, ...] | None, member: Membership):
        super().__init__(original, extra)
        self.member = member

    def passed(self, hidden_1NX: Tensor) -> Tensor:
        return self.member.pipeline.receive(hidden_1NX, self.member.before)


class StageOutput(AbsentLayer):
    """Stand for the stages after: send the hidden states on; the first stage gets them back."""

    def __init__(self, original: nn.Module, extra: tuple[Any, ...] | None, member: Membership):
        super().__init__(original, extra)
        self.member = member

    def passed(self, hidden_1NX: Tensor) -> Tensor:
        self.member.pipeline.send(hidden_1NX, self.member.after)
        if self.member.number:
            return hidden_1NX
        return self.member.pipeline.receive(hidden_1NX, self.member.before)


class NoEmbedding(nn.Module):
    """Return zeros for tokens: the first stage has their embeddings."""

    def __init__(self, hidden: int, dtype: torch.dtype):
        super().__init__()
        self.hidden, self.dtype = hidden, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self.hidden, dtype=self.dtype)


class NoHead(nn.Module):
    """Return one zero for each row: the first stage has the head."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], 1)


class PipelineCut:
    """Cut one model for the stage of `member`, in place."""

    def __init__(self, model: PreTrainedModel, member: Membership):
        self._model, self._member = model, member
        self._base: Any = backbone(model)

    def run(self) -> None:
        """Keep the stage's layers. Raises ConfigError by name for a model that has no stages."""
        layers, norm = self._parts()
        own = stage_layers(len(layers), self._member.number, self._member.degrees.pipeline)
        extra = self._extra(layers[0])
        for index, layer in enumerate(layers):
            if index == own.begin - 1:
                layers[index] = StageInput(layer, extra, self._member)
            elif index == own.end:
                layers[index] = StageOutput(layer, extra, self._member)
            elif not own.begin <= index < own.end:
                layers[index] = AbsentLayer(layer, extra)
        if not self._member.number:
            return
        original = getattr(self._base, norm)
        kind = StageOutput(original, None, self._member) if self._member.is_last else nn.Identity()
        setattr(self._base, norm, kind)
        embedding: Any = self._model.get_input_embeddings()
        self._model.set_input_embeddings(
            NoEmbedding(self._model.config.get_text_config().hidden_size, embedding.weight.dtype)
        )
        self._model.set_output_embeddings(NoHead())

    def _parts(self) -> tuple[nn.ModuleList, str]:
        """Return the layers, and the name of the norm after them. Raises ConfigError."""
        if getattr(self._model.config.get_text_config(), "num_kv_shared_layers", 0):
            raise self._refusal("its last layers share keys and values of earlier ones")
        plan: Mapping[str, Any] = getattr(self._model.config, "base_model_pp_plan", None) or {}
        layers = getattr(self._base, "layers", None)
        names = [name for name in plan if hasattr(self._base, name)]
        stages = self._member.degrees.pipeline
        if "layers" not in names or not isinstance(layers, nn.ModuleList):
            raise self._refusal("transformers has no plan for it (base_model_pp_plan)")
        if len(layers) < stages:
            raise self._refusal(f"it has {len(layers)} layers")
        after = names[names.index("layers") + 1 :]
        if len(after) != 1:
            raise self._refusal("no single norm follows its layers")
        return layers, after[0]

    def _extra(self, layer: nn.Module) -> tuple[Any, ...] | None:
        """Return what a layer returns besides hidden states, as `AbsentLayer` takes it."""
        found: list[Any] = []
        hook = layer.register_forward_hook(lambda _module, _args, output: found.append(output))
        first_logits(self._model)
        hook.remove()
        if len(found) == 1 and isinstance(found[0], Tensor):
            return None
        if len(found) == 1 and isinstance(found[0], tuple):
            return (None,) * (len(found[0]) - 1)
        raise self._refusal("its layers are not called once, one after the other")

    def _refusal(self, reason: str) -> ConfigError:
        stages = self._member.degrees.pipeline
        return ConfigError(
            f"pipeline_parallel={stages}: model_type={self._model.config.model_type!r}: {reason};"
            " give fewer stages, or 1",
            param="pipeline_parallel",
        )


def stage_layers(layers: int, stage: int, stages: int) -> Share:
    """Return the layers of a stage: as equally many as possible, fewer in the first ones.

    The first stage also computes the head.
    """
    return Share(layers * stage // stages, layers * (stage + 1) // stages)
