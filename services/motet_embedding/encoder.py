"""Encode texts, given as token ids, as one vector each, independent of their batch.

B texts · D numbers of a token · P of a pooled text · V of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    PreTrainedModel,
)
from transformers.utils import logging

from motet_kernels.runtime.device import describe, dtype_name, find_device, find_dtype
from motet_models.checkpoints import check_checkpoint
from motet_shared.errors import ConfigError

from .config import EngineConfig
from .folder import Folder, read_json
from .packed import first_position, forward, forward_padded, packs
from .pooling import Pooling
from .texts import Text

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid)
}
# What transformers and safetensors raise for files that they cannot interpret.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError)


class Encoder:
    """Compute vectors of texts.

    packed: whether texts are computed in one row, without padding.
    """

    def __init__(self, model: PreTrainedModel, folder: Folder, config: EngineConfig):
        self._model = model
        self.folder = folder
        self.limit = _limit(model, folder, config)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self._padding: int = getattr(model.config, "pad_token_id", None) or 0
        self.packed = packs(model, self.limit, self._padding)
        self._first = first_position(model)
        self._pooling = _pooling(model, folder, config)
        self._dense = nn.Sequential(*(_dense(path) for path in folder.dense)).to(model.device)
        self._normalize = {"auto": folder.normalized is not False, "always": True, "never": False}[
            config.normalize
        ]
        self.size = self.encode([Text([0])]).shape[1]

    @classmethod
    def load(cls, config: EngineConfig) -> Encoder:
        """Load a checkpoint: safetensors only, no code from the folder.

        Raises ConfigError that names what is wrong with the folder.
        """
        if config.threads:
            torch.set_num_threads(config.threads)
        device = find_device(config.device, ConfigError)
        folder = Folder.read(config.model)
        for part in (folder.transformer, *folder.dense):
            check_checkpoint(part)
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # `_transformer` reports missing weights
        return cls(_transformer(folder.transformer, config.dtype, device), folder, config)

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded."""
        return {"dtype": dtype_name(self._model.dtype), **describe(self._model.device)}

    @torch.inference_mode()
    def encode(self, texts: Sequence[Text]) -> Tensor:
        """Return `[B, V]` float32 on the model's device, from one forward pass."""
        tokens = self._tokens([text.ids for text in texts])
        pooled = [
            self._pooling.pool(one, text.prompt) for one, text in zip(tokens, texts, strict=True)
        ]
        vectors_BV: Tensor = self._dense(torch.stack(pooled))
        return functional.normalize(vectors_BV) if self._normalize else vectors_BV

    def _tokens(self, texts: list[list[int]]) -> list[Tensor]:
        """Return `[tokens, D]` of each text."""
        if not self.packed:
            return forward_padded(self._model, texts, self._padding)
        hidden_ND, packed = forward(self._model, texts, self._first)
        return [hidden_ND[start:end] for start, end in packed.spans.pairs]


def _transformer(folder: Path, wanted: str, device: torch.device) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        dtype = find_dtype(wanted, config.dtype, device, ConfigError)
        kind = (
            AutoModelForTextEncoding
            if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
            else AutoModel
        )
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except _UNUSABLE as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model={str(folder)!r}: the transformer cannot be read: {first}"
        ) from error
    if kind is AutoModel and getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model={str(folder)!r}: {config.model_type!r} has a decoder after its encoder, "
            "which is not supported; give an encoder or a decoder"
        )
    # Some encoders have a pooler that is not used here, and many checkpoints lack its weights.
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise ConfigError(
            f"model={str(folder)!r}: {len(missing)} weights are missing, {missing[0]} for one"
        )
    return model.eval().requires_grad_(False).to(device)


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


def _pooling(model: PreTrainedModel, folder: Folder, config: EngineConfig) -> Pooling:
    if config.pooling != "auto":
        return Pooling(modes=(config.pooling,))
    decodes = any(getattr(module, "is_causal", False) for module in model.modules())
    return folder.pooling or Pooling(modes=("lasttoken" if decodes else "mean",))


def _dense(path: Path) -> nn.Module:
    """Load `Dense` of sentence-transformers: a linear layer and an activation, always float32."""
    config_json = read_json(path / "config.json") or {}
    activation_name = str(
        config_json.get("activation_function", "torch.nn.modules.activation.Tanh")
    ).rpartition(".")[2]
    if activation_name not in _ACTIVATIONS:
        raise ConfigError(
            f"model={str(path)!r}: activation {activation_name!r} is not supported; there are {', '.join(_ACTIVATIONS)}"
        )
    try:
        weights = load_file(path / "model.safetensors")
        layer = nn.Linear(
            config_json["in_features"],
            config_json["out_features"],
            bias=bool(config_json.get("bias", True)),
        )
        layer.load_state_dict(
            {name.removeprefix("linear."): tensor for name, tensor in weights.items()}
        )
    except _UNUSABLE as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model={str(path)!r}: the dense layer cannot be read: {first}"
        ) from error
    return nn.Sequential(layer.float().requires_grad_(False), _ACTIVATIONS[activation_name]())
