"""Draft with an EAGLE layer, which was trained with the model to continue its hidden states.

(Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty".) The layer
reads the model's last hidden state of a token together with the embedding of the token after it,
and predicts the hidden state of that one, from which the model's own head makes a token. Predicted
hidden states are its input for further tokens, until the model has computed the true ones. A chain
is verified, not a tree. Embeddings and head are the model's.

The layer attends to the tokens whose hidden states it has read. Tokens from the prefix cache or
from a prefill worker have none, so behind these its view begins later.

A folder has the config.json of a Llama of one layer, and safetensors: `fc.weight`, optionally
`fc.bias`, and those of `layers.0` without its first norm. Shapes: N tokens, X hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from motet_kernels.linear.pack import pack_linear
from motet_llm.config import EngineConfig
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.engine.request import Request
from motet_llm.engine.sampler import Sampled
from motet_llm.scheduling.work import Work
from motet_llm.weights import checkpoint
from motet_llm.weights.tensor_files import TensorFiles
from motet_models.checkpoints import check_weights
from motet_shared.errors import ConfigError, InternalError

from .draft_model import DraftModel, load
from .draft_request import DraftRequest

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_KEPT = 2048  # hidden states per request that the layer has not computed yet
PLACEHOLDER = (
    64  # vocabulary size that the layer is built with, before it gets the model's embeddings
)


class States:
    """Hold the model's last hidden states of a request's tokens from `first` on.

    Only those that the layer has not computed yet are kept.
    """

    def __init__(self, first: int):
        self.first = first
        self.rows_NX: list[Tensor] = []

    @property
    def end(self) -> int:
        return self.first + len(self.rows_NX)

    def add(self, start: int, hidden_NX: Tensor) -> None:
        """Append the hidden states of the tokens from `start` on, where `start` is at most `end`.

        Those that are there already are skipped; at most MAX_KEPT stay.
        """
        self.rows_NX += hidden_NX[self.end - start :]
        self.drop(self.end - MAX_KEPT)

    def drop(self, first: int) -> None:
        """Drop the hidden states of tokens before `first`."""
        if first > self.first:
            del self.rows_NX[: first - self.first]
            self.first = first


class EagleDraftRequest(DraftRequest):
    """Represent a request from token `base` + 1 on.

    Its position `i` combines the hidden state of token `base + i` with the embedding of the token
    after it. predicted: hidden states of the draft's tokens, behind the known ones.
    """

    __slots__ = ("base", "predicted", "states")

    def __init__(self, target: Request, states: States):
        super().__init__(target)
        self.base, self.states = states.first, states
        self.predicted: list[Tensor] = []
        self.tokens = self.names = self.confirmed
        self.num_prompt = target.num_prompt - self.base - 1
        self.max_length = target.max_length - self.base - 1

    @property
    def confirmed(self) -> list[int]:
        return self.target.tokens[self.base + 1 :]

    @property
    def num_confirmed(self) -> int:
        return super().num_confirmed - self.base - 1

    def synchronize(self, wanted: int) -> None:
        """Synchronize with the target; drop predicted states and results that used them."""
        num_sure = self.num_known
        super().synchronize(wanted)
        self.num_computed = min(self.num_computed, num_sure)
        self.predicted = []

    def hidden(self, start: int, stop: int) -> list[Tensor]:
        """Return the hidden states of positions `start` to `stop`, known ones before predicted."""
        states = self.states.rows_NX[
            start + self.base - self.states.first : self.num_known + self.base - self.states.first
        ]
        return [*states, *self.predicted[max(0, start - self.num_known) :]][: stop - start]


class EagleRunner(ModelRunner):
    """Run the layer over draft requests, with the embeddings and the head of `target`.

    Raises ConfigError for files or sizes that do not fit the model.
    """

    def __init__(self, config: EngineConfig, target: ModelRunner):
        self._files = TensorFiles(Path(config.model))
        super().__init__(replace(config, packed_cache=0))  # the layer is small, its head borrowed
        self._check_size(target)
        self.model.set_input_embeddings(target.model.get_input_embeddings())
        self.model.set_output_embeddings(target.model.get_output_embeddings())
        size = self.model.config.hidden_size
        weight = self._files.need("fc.weight", (size, 2 * size), FLOATS)
        bias = self._files.need("fc.bias", (size,), FLOATS) if "fc.bias" in self._files else None
        self.fc = pack_linear(weight, bias, self.weights, self.device)
        self._files.left.discard("embed_tokens.weight")  # a copy of the model's own embeddings
        if self._files.left:
            raise ConfigError(
                f"config.json knows nothing of {', '.join(sorted(self._files.left)[:4])}; correct either"
            )

    def _check_size(self, target: ModelRunner) -> None:
        own, expected = (
            self.model.config.hidden_size,
            target.model.config.get_text_config().hidden_size,
        )
        if own != expected:
            raise ConfigError(
                f"is of hidden size {own}, the model of {expected}; give the layer of this model"
            )

    def _load_model(
        self, folder: Path, config: PreTrainedConfig, dtype: torch.dtype
    ) -> PreTrainedModel:
        check_weights(folder)
        if not isinstance(config, LlamaConfig) or config.num_hidden_layers != 1:
            found = f"{config.num_hidden_layers} layers of {config.model_type}"
            raise ConfigError(f"config.json tells of {found}; EAGLE's layer is one of Llama's")
        small = copy.deepcopy(config)
        small.vocab_size, small.tie_word_embeddings, small.pad_token_id = PLACEHOLDER, False, None
        model = LlamaForCausalLM(small)
        layer: Any = model.model.layers[0]
        layer.input_layernorm, model.model.norm = nn.Identity(), nn.Identity()
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(
                self._files.need(f"layers.0.{name}", tuple(parameter.shape), FLOATS)
            )
        return checkpoint.prepare(model.to(dtype).eval().requires_grad_(False))

    def _inputs_of(self, ids_N: Tensor, works: Sequence[Work]) -> dict[str, Any]:
        hidden: list[Tensor] = []
        for work in works:
            hidden += work.request.hidden(*work.span)  # type: ignore[attr-defined]
        embeddings_NX = self.model.get_input_embeddings()(ids_N)
        both = torch.cat((embeddings_NX, torch.stack(hidden).to(embeddings_NX.dtype)), dim=-1)
        return {"inputs_embeds": self.fc(both).unsqueeze(0)}


class EagleDrafts(DraftModel):
    """Draft for an engine whose model is run by `target`.

    Raises ConfigError if the layer belongs to another model.
    """

    catch_up = 256  # more than for a draft model: this is a single layer

    def __init__(self, config: EngineConfig, target: ModelRunner):
        super().__init__(config, target)
        self.behind = 1 + config.draft_tokens
        self._states: dict[Request, States] = {}

    def _load(self, config: EngineConfig, target: ModelRunner) -> ModelRunner:
        return load(config, target, lambda own: EagleRunner(own, target))

    def observe(self, works: Sequence[Work], forward: Forward, sampled: Sampled) -> None:
        """Keep the hidden states of the tokens that were accepted."""
        agreed = iter(sampled.agreed)
        for work, hidden_NX in zip(works, forward.hidden_ND.split(forward.num_tokens), strict=True):
            right = work.num_tokens - len(work.draft) + (next(agreed) if work.draws else 0)
            start, _ = work.span
            states = self._states.get(work.request)
            if states is None or start > states.end:
                states = self._states[work.request] = States(start)
            states.add(start, hidden_NX[:right].clone())

    def _prepare(self, request: Request, wanted: int, busy: Any) -> DraftRequest | None:
        states, draft_request = self._states.get(request), self._draft_requests.get(request)
        if states is None or states.end != request.num_computed or not states.rows_NX:
            return None
        if isinstance(draft_request, EagleDraftRequest):
            if draft_request.states is not states or states.first > draft_request.base + min(
                draft_request.num_computed, draft_request.num_known
            ):
                self._evict(request)  # hidden states are missing: start again behind the gap
            else:
                states.drop(
                    draft_request.base + min(draft_request.num_computed, draft_request.num_known)
                )
        return super()._prepare(request, wanted, busy)

    def _num_catch_up(self, request: Request) -> int:
        states = self._states.get(request)
        return 0 if states is None else len(states.rows_NX)

    def _new_draft_request(self, request: Request) -> DraftRequest:
        return EagleDraftRequest(request, self._states[request])

    def _keep_outputs(self, drawing: Sequence[Any], forward: Forward) -> None:
        for draft_request, hidden_X in zip(
            drawing, forward.hidden_ND[forward.draws_R], strict=True
        ):
            draft_request.predicted.append(hidden_X)

    def forget(self, request: Request) -> None:
        """Free what is kept for a request that has ended."""
        super().forget(request)
        self._states.pop(request, None)

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if hidden states are kept for a request that is not in `requests`."""
        super().check_integrity(requests)
        if not self._states.keys() <= requests:
            raise InternalError(
                f"hidden states are kept of {len(self._states.keys() - requests)} requests that are gone"
            )
