"""Drafts from a layer that was trained beside the model to go on with its hidden states: EAGLE's.

(Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty".) It gets the model's last hidden
state of a token together with the embedding of the token behind it, and guesses the hidden state of that one, of which
the model's own head makes a token. What it guesses it goes on with, until the model says what is right. A chain is
checked, not a tree. Embeddings and head are the model's.

It attends to the tokens whose hidden states it has seen: what comes from the prefix cache or from a prefill worker has
none, so there its view begins later.

A folder has the config.json of a Llama of one layer, and safetensors: `fc.weight`, perhaps `fc.bias`, and those of
`layers.0` without its first norm. Shapes: N tokens, X hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from motet_kernels.linear import Linear
from motet_shared.errors import ConfigError, InternalError

from . import checkpoint
from .config import EngineConfig
from .draft_model import DraftModel, load
from .model_runner import Forward, ModelRunner
from .request import Request
from .sampler import Sampled
from .scheduler import Work
from .shadow import Shadow
from .tensor_files import TensorFiles

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOST_KEPT = 2048  # hidden states of a request that wait to be taken in
PLACEHOLDER = 64  # tokens of the vocabulary that the layer is built with, before it gets the model's


class States:
    """The model's last hidden states of a request's tokens from `first` on, those that are still to be taken in."""

    def __init__(self, first: int):
        self.first = first
        self.rows_NX: list[Tensor] = []

    @property
    def end(self) -> int:
        return self.first + len(self.rows_NX)

    def add(self, start: int, hidden_NX: Tensor) -> None:
        """Those of the tokens from `start` on, which begin where the others end, or before."""
        self.rows_NX += hidden_NX[self.end - start :]
        self.drop(self.end - MOST_KEPT)

    def drop(self, first: int) -> None:
        """Forget those before `first`."""
        if first > self.first:
            del self.rows_NX[: first - self.first]
            self.first = first


class EagleShadow(Shadow):
    """A request from token `base` + 1 on: its place `i` is the hidden state of token `base + i` with the token behind.

    guessed: hidden states behind those that are known, of the tokens of the draft.
    """

    __slots__ = ("base", "guessed", "states")

    def __init__(self, real: Request, states: States):
        super().__init__(real)
        self.base, self.states = states.first, states
        self.guessed: list[Tensor] = []
        self.tokens = self.names = self.theirs
        self.num_prompt = real.num_prompt - self.base - 1
        self.max_length = real.max_length - self.base - 1

    @property
    def theirs(self) -> list[int]:
        return self.real.tokens[self.base + 1 :]

    @property
    def num_theirs(self) -> int:
        return super().num_theirs - self.base - 1

    def follow(self, wanted: int) -> None:
        """What was computed of guessed hidden states is computed again."""
        sure = self.known
        super().follow(wanted)
        self.num_computed = min(self.num_computed, sure)
        self.guessed = []

    def hidden(self, start: int, stop: int) -> list[Tensor]:
        """Those of the places from `start` to `stop`."""
        known = self.states.rows_NX[start + self.base - self.states.first : self.known + self.base - self.states.first]
        return [*known, *self.guessed[max(0, start - self.known) :]][: stop - start]


class EagleRunner(ModelRunner):
    """Runs the layer over shadows, with the embeddings and the head of `target`."""

    def __init__(self, config: EngineConfig, target: ModelRunner):
        self._files = TensorFiles(Path(config.model))
        super().__init__(config)
        self._check_size(target)
        self.model.set_input_embeddings(target.model.get_input_embeddings())
        self.model.set_output_embeddings(target.model.get_output_embeddings())
        size = self.model.config.hidden_size
        weight = self._files.need("fc.weight", (size, 2 * size), FLOATS)
        bias = self._files.need("fc.bias", (size,), FLOATS) if "fc.bias" in self._files else None
        self.fc = Linear.pack(weight, bias, self.weights, self.device)
        self._files.left.discard("embed_tokens.weight")  # the model's own
        if self._files.left:
            raise ConfigError(f"config.json knows nothing of {', '.join(sorted(self._files.left)[:4])}; correct either")

    def _check_size(self, target: ModelRunner) -> None:
        own, theirs = self.model.config.hidden_size, target.model.config.get_text_config().hidden_size
        if own != theirs:
            raise ConfigError(f"is of hidden size {own}, the model of {theirs}; give the layer of this model")

    def _load_model(self, folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        if not isinstance(config, LlamaConfig) or config.num_hidden_layers != 1:
            found = f"{config.num_hidden_layers} layers of {config.model_type}"
            raise ConfigError(f"config.json tells of {found}; EAGLE's layer is one of Llama's")
        small = copy.deepcopy(config)
        small.vocab_size, small.tie_word_embeddings, small.pad_token_id = PLACEHOLDER, False, None
        model = LlamaForCausalLM(small)
        layer: Any = model.model.layers[0]
        layer.input_layernorm, model.model.norm = nn.Identity(), nn.Identity()
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(self._files.need(f"layers.0.{name}", tuple(parameter.shape), FLOATS))
        return checkpoint.prepare(model.to(dtype).eval().requires_grad_(False))

    def _see(self, ids_N: Tensor, works: list[Work]) -> dict[str, Any]:
        hidden: list[Tensor] = []
        for work in works:
            hidden += work.request.hidden(*work.span)  # type: ignore[attr-defined]
        embeddings_NX = self.model.get_input_embeddings()(ids_N)
        both = torch.cat((embeddings_NX, torch.stack(hidden).to(embeddings_NX.dtype)), dim=-1)
        return {"inputs_embeds": self.fc(both).unsqueeze(0)}


class EagleDrafts(DraftModel):
    """Of an engine whose model is `target`'s. Raises ConfigError for the layer of another model."""

    catch_up = 256  # it is one layer of many

    def __init__(self, config: EngineConfig, target: ModelRunner):
        super().__init__(config, target)
        self.behind = 1 + config.draft_tokens
        self._states: dict[Request, States] = {}

    def _load(self, config: EngineConfig, target: ModelRunner) -> ModelRunner:
        return load(config, target, lambda own: EagleRunner(own, target))

    def observe(self, works: Sequence[Work], forward: Forward, sampled: Sampled) -> None:
        """Keep the hidden states of the tokens that are right."""
        agreed = iter(sampled.agreed)
        for work, hidden_NX in zip(works, forward.hidden_ND.split(forward.num_tokens), strict=True):
            right = work.num_tokens - len(work.draft) + (next(agreed) if work.draws else 0)
            start, _ = work.span
            states = self._states.get(work.request)
            if states is None or start > states.end:
                states = self._states[work.request] = States(start)
            states.add(start, hidden_NX[:right].clone())

    def _follow(self, request: Request, wanted: int, busy: Any) -> Shadow | None:
        states, shadow = self._states.get(request), self._shadows.get(request)
        if states is None or states.end != request.num_computed or not states.rows_NX:
            return None
        if isinstance(shadow, EagleShadow):
            if shadow.states is not states or states.first > shadow.base + min(shadow.num_computed, shadow.known):
                self._evict(request)  # it misses something, and begins again behind it
            else:
                states.drop(shadow.base + min(shadow.num_computed, shadow.known))
        return super()._follow(request, wanted, busy)

    def _tokens_of(self, request: Request) -> int:
        states = self._states.get(request)
        return 0 if states is None else len(states.rows_NX)

    def _shadow(self, request: Request) -> Shadow:
        return EagleShadow(request, self._states[request])

    def _note(self, drawing: Sequence[Any], forward: Forward) -> None:
        for shadow, hidden_X in zip(drawing, forward.hidden_ND[forward.draws_R], strict=True):
            shadow.guessed.append(hidden_X)

    def forget(self, request: Request) -> None:
        """It has ended."""
        super().forget(request)
        self._states.pop(request, None)

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if hidden states are kept of requests that are gone."""
        super().check_integrity(requests)
        if not self._states.keys() <= requests:
            raise InternalError(
                f"hidden states are kept of {len(self._states.keys() - requests)} requests that are gone"
            )
