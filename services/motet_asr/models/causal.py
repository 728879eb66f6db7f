"""Run what decoder-only recognizers share: the language model of a model of transformers, and its head.

B windows · T positions · E model size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.engine.causal_engine import CausalFamily, CausalState
from motet_asr.engine.key_values import KeyValues, use_sequences
from motet_kernels.spans import upload
from motet_shared.errors import ConfigError

_WINDOW = 30.0  # seconds, unless the settings say otherwise


class CausalRecognizer(CausalFamily):
    """Adapt a model whose text is written by a decoder-only language model.

    sliding_window: positions that the language model attends to; None: all.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Any,
        extractor: Any,
        tokenizer: Any,
        language_model: Any,
    ):
        self._config, self._model = config, model
        self._extractor, self._tokenizer = extractor, tokenizer
        self._language_model, self._head = language_model, model.lm_head
        self.device, self.dtype = model.device, model.dtype
        self.window = config.window or _WINDOW
        text = language_model.config
        self.vocab = text.vocab_size
        eos = model.generation_config.eos_token_id
        self.eos = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        self.sliding_window: int | None = getattr(text, "sliding_window", None)
        use_sequences(text)

    def state(self) -> CausalState:
        """Return the state of a sequence that begins."""
        return CausalState(KeyValues(len(self._language_model.layers), self.sliding_window))

    def embed(self, tokens_B: Tensor) -> Tensor:
        found: Tensor = self._language_model.get_input_embeddings()(tokens_B)
        return found

    def embed_ids(self, ids: Sequence[int]) -> Tensor:
        """Return the embeddings [T, E] of token ids."""
        return self.embed(upload(torch.tensor(ids), self.device))

    def forward(self, x_BTE: Tensor, states: Sequence[CausalState]) -> Tensor:
        count = x_BTE.shape[1]
        before = torch.tensor([state.sequence.length for state in states])
        positions_BT = upload(before[:, None] + torch.arange(count), self.device)
        states_BTE = self._language_model(
            inputs_embeds=x_BTE,
            position_ids=positions_BT,
            use_cache=False,
            sequences=[state.sequence for state in states],
            **self._conditions(states),
        ).last_hidden_state
        for state in states:
            state.sequence.length += count
        logits: Tensor = self._head(states_BTE[:, -1]).float()
        return logits

    def _conditions(self, states: Sequence[CausalState]) -> dict[str, Any]:
        """Return what the language model needs to know of each sequence beside its positions."""
        return {}

    def text_of(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def token_id(self, token: str) -> int:
        """Return the id of a special token. Raises ConfigError if the tokenizer does not have it."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        if token not in vocabulary:
            raise ConfigError(
                f"model={self._config.model!r}: the tokenizer has no {token}, with which prompts are "
                "written; give the tokenizer that the model was trained with"
            )
        return vocabulary[token]
