"""Score pairs of a query and a document, which the model reads at once.

A cross-encoder has a classification head of one label; a language model says yes or no.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from motet_shared.errors import ConfigError

from .backbone import Backbone, load_model
from .config import EngineConfig
from .encoder import ACTIVATIONS, prepare
from .folder import Folder, read_json
from .texts import Text

_PROBE = (9, 30)  # tokens
_TOLERANCE = 1e-3
_YES, _NO = "yes", "no"


class _PairScorer:
    """Score pairs: the activation of one logit each, which subclasses compute."""

    backbone: Backbone
    _activation: nn.Module

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded."""
        return self.backbone.describe()

    @torch.inference_mode()
    def encode(self, texts: Sequence[Text]) -> Tensor:
        """Return `[B, 1]` float32: the score of each pair."""
        scores: Tensor = self._activation(self._logits(texts))
        return scores

    def _logits(self, texts: Sequence[Text]) -> Tensor:
        """Return `[B, 1]` float32: the logit of each pair."""
        raise NotImplementedError


class CrossEncoder(_PairScorer):
    """Score pairs by the head of a model for sequence classification.

    The head computes each pair alone from the hidden states of the backbone, which are computed for
    many pairs at once. Raises ConfigError if that is not what the whole model computes.
    """

    def __init__(self, model: PreTrainedModel, folder: Folder, config: EngineConfig):
        if (labels := model.config.num_labels) != 1:
            raise ConfigError(
                f"model={config.model!r}: has {labels} labels; give a ranker with one, whose label "
                "is the score"
            )
        base = model.base_model
        probe = _probe(base.get_input_embeddings().num_embeddings)
        expected = [model(input_ids=_row(ids, model)).logits[0] for ids in probe]
        self.backbone = Backbone(base, folder, config)
        self.packed = self.backbone.packed
        self._model, self._given = model, _GivenStates(base)
        setattr(model, model.base_model_prefix, self._given)
        self._activation = _activation(folder)
        found = self._logits([Text(ids) for ids in probe])
        _check_scores(torch.cat(expected), found[:, 0], model, config)

    @classmethod
    def load(cls, folder: Folder, config: EngineConfig) -> CrossEncoder:
        """Load a checkpoint: safetensors only, no code from the folder. Raises ConfigError."""
        device = prepare(folder, config)
        kind = AutoModelForSequenceClassification
        with torch.inference_mode():
            return cls(load_model(kind, folder.transformer, config.dtype, device), folder, config)

    def _logits(self, texts: Sequence[Text]) -> Tensor:
        hidden = self.backbone.hidden(texts)
        return torch.cat([self._head(*one) for one in zip(hidden, texts, strict=True)]).float()

    def _head(self, hidden_ND: Tensor, text: Text) -> Tensor:
        """Return `[1, 1]`, the logit of one pair."""
        self._given.hidden = hidden_ND[None]
        ids = _row(text.ids, self._model)
        found: Tensor = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return found


class _GivenStates(nn.Module):
    """Stand for a model's base and return hidden states that have been computed."""

    def __init__(self, base: PreTrainedModel):
        super().__init__()
        self.config = base.config
        self._pooler = getattr(base, "pooler", None)
        self.hidden = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        pooled = None if self._pooler is None else self._pooler(self.hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=self.hidden, pooler_output=pooled
        )


class TokenScorer(_PairScorer):
    """Score pairs by the logits of two tokens after a prompt: the probability of the first."""

    def __init__(
        self, model: PreTrainedModel, ids: list[int], folder: Folder, config: EngineConfig
    ):
        probe = _probe(model.get_input_embeddings().num_embeddings)
        logits = [model(input_ids=_row(row, model)).logits[0, -1, ids] for row in probe]
        self.backbone = Backbone(model.base_model, folder, config)
        self.packed = self.backbone.packed
        head: Any = model.get_output_embeddings()
        self._weight_2D = head.weight[ids].float()
        self._bias_2 = None if getattr(head, "bias", None) is None else head.bias[ids].float()
        self._activation = _activation(folder)
        found = self._logits([Text(row) for row in probe])
        _check_scores(_difference(torch.stack(logits).float())[:, 0], found[:, 0], model, config)

    @classmethod
    def load(cls, folder: Folder, config: EngineConfig, vocabulary: Any) -> TokenScorer:
        """Load a checkpoint: safetensors only, no code from the folder.

        `vocabulary`: the tokenizer. Raises ConfigError.
        """
        device = prepare(folder, config)
        ids = _token_ids(folder, vocabulary)
        with torch.inference_mode():
            model = load_model(AutoModelForCausalLM, folder.transformer, config.dtype, device)
            return cls(model, ids, folder, config)

    def _logits(self, texts: Sequence[Text]) -> Tensor:
        last_BD = torch.stack([hidden[-1] for hidden in self.backbone.hidden(texts)]).float()
        return _difference(functional.linear(last_BD, self._weight_2D, self._bias_2))


def _difference(logits: Tensor) -> Tensor:
    """Return `[B, 1]`: the logit, or how much more the first of two is."""
    return logits[:, :1] if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:2]


def _token_ids(folder: Folder, tokenizer: Any) -> list[int]:
    """Return the ids of yes and no: as `LogitScore` of the folder says, else of these words."""
    path = next((path for kind, path in folder.modules if kind == "LogitScore"), None)
    if path is not None:
        said = read_json(path / "config.json") or {}
        found = [said.get("true_token_id"), said.get("false_token_id")]
        ids = [one for one in found if isinstance(one, int) and one >= 0]
        if found[0] is None or len(ids) < sum(one is not None for one in found):
            raise ConfigError(
                f"model={str(path)!r}: config.json has no valid true_token_id and false_token_id; "
                "give token ids"
            )
        return ids
    ids = [tokenizer.token_to_id(word) for word in (_YES, _NO)]
    if None in ids:
        raise ConfigError(
            f"model={str(folder.root)!r}: its tokenizer has no tokens {_YES!r} and {_NO!r}; add a "
            "modules.json with a LogitScore that names two others"
        )
    return ids


def _activation(folder: Folder) -> nn.Module:
    """Return what turns a logit into a score: as the folder says, else the sigmoid."""
    config = read_json(folder.transformer / "config.json") or {}
    said = (
        folder.settings.get("activation_fn"),
        (config.get("sentence_transformers") or {}).get("activation_fn"),
        config.get("sbert_ce_default_activation_function"),
    )
    name = str(next((one for one in said if one), "Sigmoid")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"model={str(folder.root)!r}: activation {name!r} is not supported; there are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]()


def _probe(vocabulary: int) -> list[list[int]]:
    return [
        [5 + (7 * place + count) % (vocabulary - 5) for place in range(count)] for count in _PROBE
    ]


def _row(ids: Sequence[int], model: PreTrainedModel) -> Tensor:
    return torch.tensor([list(ids)], device=model.device)


def _check_scores(
    expected: Tensor, found: Tensor, model: PreTrainedModel, config: EngineConfig
) -> None:
    """Raise ConfigError if the parts of a model do not compute what it computes as a whole."""
    tolerance = _TOLERANCE if model.dtype == torch.float32 else 0.1
    if not torch.allclose(expected.float(), found, atol=tolerance, rtol=tolerance):
        raise ConfigError(
            f"model={config.model!r}: the head of {type(model).__name__} takes more than its hidden "
            "states, which is not supported; give a BERT, XLM-R, ModernBERT or decoder ranker"
        )
