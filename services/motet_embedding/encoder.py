"""Encode texts, given as token ids, as one vector each, independent of their batch.

B texts · D numbers of a token · P of a pooled text · V of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoModel,
    AutoModelForTextEncoding,
    PreTrainedModel,
)

from motet_kernels.runtime.device import find_device
from motet_models.checkpoints import check_checkpoint
from motet_shared.errors import ConfigError

from .backbone import UNUSABLE, Backbone, load_model, read_config
from .config import EngineConfig
from .folder import Folder, read_json
from .pooling import Pooling
from .texts import Text

ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid)
}


class Encoder:
    """Compute vectors of texts.

    packed: whether texts are computed in one row, without padding.
    """

    def __init__(self, backbone: Backbone, folder: Folder, config: EngineConfig):
        self._backbone = backbone
        self.folder = folder
        self.limit, self.vocabulary = backbone.limit, backbone.vocabulary
        self.packed = backbone.packed
        model = backbone.model
        self._pooling = _pooling(model, folder, config)
        self._dense = nn.Sequential(*(dense(path) for path in folder.dense)).to(model.device)
        self._normalize = {"auto": folder.normalized is not False, "always": True, "never": False}[
            config.normalize
        ]
        self.size = self.encode([Text([0])]).shape[1]

    @classmethod
    def load(cls, config: EngineConfig) -> Encoder:
        """Load a checkpoint: safetensors only, no code from the folder.

        Raises ConfigError that names what is wrong with the folder.
        """
        folder = Folder.read(config.model)
        if folder.kind in ("pair scores", "token logits"):
            raise ConfigError(
                f"model={config.model!r}: {folder.architecture or 'this model'} scores pairs of "
                "texts and has no vectors; serve it as a ranker: `motet up --rank FOLDER`"
            )
        return cls(load_backbone(folder, config), folder, config)

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded."""
        return self._backbone.describe()

    @torch.inference_mode()
    def encode(self, texts: Sequence[Text]) -> Tensor:
        """Return `[B, V]` float32 on the model's device, from one forward pass."""
        tokens = self._backbone.hidden(texts)
        pooled = [
            self._pooling.pool(one, text.prompt) for one, text in zip(tokens, texts, strict=True)
        ]
        vectors_BV: Tensor = self._dense(torch.stack(pooled))
        return functional.normalize(vectors_BV) if self._normalize else vectors_BV


def load_backbone(folder: Folder, config: EngineConfig) -> Backbone:
    """Load the transformer of a folder, without any head. Raises ConfigError."""
    device = prepare(folder, config)
    return Backbone(_transformer(folder.transformer, config.dtype, device), folder, config)


def prepare(folder: Folder, config: EngineConfig) -> torch.device:
    """Check a folder's files, set torch's threads, and return the device to load onto."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device, ConfigError)
    for part in (folder.transformer, *folder.dense):
        check_checkpoint(part)
    return device


def _transformer(folder: Path, wanted: str, device: torch.device) -> PreTrainedModel:
    config = read_config(folder)
    encodes = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    kind = AutoModelForTextEncoding if encodes else AutoModel
    # Some encoders have a pooler that is not used here, and many checkpoints lack its weights.
    model = load_model(kind, folder, wanted, device, unused="pooler.")
    if kind is AutoModel and getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model={str(folder)!r}: {config.model_type!r} has a decoder after its encoder, "
            "which is not supported; give an encoder or a decoder"
        )
    return model


def _pooling(model: PreTrainedModel, folder: Folder, config: EngineConfig) -> Pooling:
    if config.pooling != "auto":
        return Pooling(modes=(config.pooling,))
    decodes = any(getattr(module, "is_causal", False) for module in model.modules())
    return folder.pooling or Pooling(modes=("lasttoken" if decodes else "mean",))


def dense(path: Path) -> nn.Module:
    """Load `Dense` of sentence-transformers: a linear layer and an activation, always float32."""
    config_json = read_json(path / "config.json") or {}
    activation_name = str(
        config_json.get("activation_function", "torch.nn.modules.activation.Tanh")
    ).rpartition(".")[2]
    if activation_name not in ACTIVATIONS:
        raise ConfigError(
            f"model={str(path)!r}: activation {activation_name!r} is not supported; there are {', '.join(ACTIVATIONS)}"
        )
    if config_json.get("use_residual"):
        raise ConfigError(
            f"model={str(path)!r}: use_residual of a dense layer is not supported; leave it out"
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
    except UNUSABLE as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model={str(path)!r}: the dense layer cannot be read: {first}"
        ) from error
    return nn.Sequential(layer.float().requires_grad_(False), ACTIVATIONS[activation_name]())
