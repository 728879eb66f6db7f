"""Compute the hidden states of texts: packed into one row where the model can, else padded.

N tokens of one text · D numbers per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from motet_kernels.runtime.device import describe, dtype_name, find_dtype
from motet_shared.errors import ConfigError

from .config import EngineConfig
from .folder import Folder
from .packed import first_position, forward, forward_padded, packs
from .texts import Text

# What transformers and safetensors raise for files that they cannot interpret.
UNUSABLE = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError)
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class Backbone:
    """Compute hidden states with a model whose last layer returns them.

    packed: whether texts are computed in one row, without padding.
    limit: most tokens of a text. vocabulary: token ids are below it.
    has_types: whether the model tells the texts of a pair apart by token types.
    """

    def __init__(self, model: PreTrainedModel, folder: Folder, config: EngineConfig):
        self.model = model
        self.limit = _limit(model, folder, config)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.padding: int = getattr(model.config, "pad_token_id", None) or 0
        self.has_types = _has_types(model)
        self._padded_attention = model.config._attn_implementation
        self.packed = packs(model, self.limit, self.padding)
        self._packed_attention = model.config._attn_implementation
        self._first = first_position(model)

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded."""
        return {"dtype": dtype_name(self.model.dtype), **describe(self.model.device)}

    @torch.inference_mode()
    def hidden(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return `[N, D]` of each text, from one forward pass.

        Texts with tokens that no token attends to take a second pass, with padding.
        """
        masked = [text for text in texts if text.unseen]
        if self.packed and not masked:
            return self._row(texts)
        if self.packed and len(masked) < len(texts):
            row = iter(self._row([text for text in texts if not text.unseen]))
            batch = iter(self._batch(masked))
            return [next(batch if text.unseen else row) for text in texts]
        return self._batch(texts)

    def _row(self, texts: Sequence[Text]) -> list[Tensor]:
        ids = [text.ids for text in texts]
        hidden_ND, packed = forward(self.model, ids, self._first, self._types(texts))
        return [hidden_ND[start:end] for start, end in packed.spans.pairs]

    def _batch(self, texts: Sequence[Text]) -> list[Tensor]:
        ids, unseen = [text.ids for text in texts], [text.unseen for text in texts]
        self.model.config._attn_implementation = self._padded_attention
        try:
            return forward_padded(self.model, ids, self.padding, self._types(texts), unseen)
        finally:
            self.model.config._attn_implementation = self._packed_attention

    def _types(self, texts: Sequence[Text]) -> list[list[int]] | None:
        if not self.has_types or not any(text.types for text in texts):
            return None
        return [text.types or [0] * len(text) for text in texts]


def read_config(folder: Path) -> PreTrainedConfig:
    """Return a checkpoint's config. Raises ConfigError if transformers cannot interpret it."""
    try:
        return AutoConfig.from_pretrained(folder, **_LOCAL)
    except UNUSABLE as error:
        raise unreadable(folder, error) from error


def load_model(
    kind: Any, folder: Path, wanted: str, device: torch.device, unused: str = ""
) -> PreTrainedModel:
    """Load a model of an Auto class: safetensors only, no code from the folder.

    wanted: dtype, as in `EngineConfig`. unused: prefix of weights that may be missing. Raises
    ConfigError for a folder that cannot be read, or that lacks weights.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # missing weights are reported below
    config = read_config(folder)
    dtype = find_dtype(wanted, config.dtype, device, ConfigError)
    try:
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **_LOCAL,
        )
    except UNUSABLE as error:
        raise unreadable(folder, error) from error
    missing = sorted(
        name for name in report["missing_keys"] if not (unused and name.startswith(unused))
    )
    if missing:
        raise ConfigError(
            f"model={str(folder)!r}: {len(missing)} weights are missing, {missing[0]} for one"
        )
    loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return loaded


def unreadable(folder: Path, error: Exception) -> ConfigError:
    """Return the error for a transformer that transformers cannot interpret."""
    first = str(error).strip().split("\n")[0]
    return ConfigError(f"model={str(folder)!r}: the transformer cannot be read: {first}")


def _has_types(model: PreTrainedModel) -> bool:
    takes = "token_type_ids" in inspect.signature(model.forward).parameters
    return takes and (getattr(model.config, "type_vocab_size", None) or 0) > 1


def _limit(model: PreTrainedModel, folder: Folder, config: EngineConfig) -> int:
    places = getattr(model.config, "max_position_embeddings", None)
    limits = [*folder.limits, *([places - first_position(model)] if places else [])]
    max_length = min(limits, default=0)
    if config.max_length and max_length and config.max_length > max_length:
        raise ConfigError(
            f"max_length={config.max_length}: the checkpoint allows {max_length} tokens at most"
        )
    if not (limit := config.max_length or max_length):
        raise ConfigError(
            f"max_length: {config.model!r} has no limit in its files; give the most tokens of a text"
        )
    return limit
