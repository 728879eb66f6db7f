"""Load the language model of a composite checkpoint: decoder and head, without its towers.

The whole class of the checkpoint is made, so that its own conversions name the tensors, but its
towers (the encoders of pictures, video and sound) are replaced by `AbsentTower` and their tensors
are not read. Decoder and head then move into a causal language model, whose logits must equal those
of the whole class for a few tokens of text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from motet_llm.models.language_model import LanguageModel
from motet_llm.models.support import COARSE_TOLERANCE, TOLERANCE
from motet_shared.errors import ConfigError

TOKENS = 6  # of text, for which the logits of both models are compared
_STAGES = ("talker", "token2wav", "code2wav")  # of omni models, behind the thinker
_FLAT_TOWERS = {"vision_config", "audio_config"}
_CLASSES = (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
)


def is_composite(config: PreTrainedConfig) -> bool:
    """Return True for the config of a model that has towers besides its language model."""
    return config.get_text_config() is not config or bool(
        _FLAT_TOWERS & type(config).sub_configs.keys()
    )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the language model's own config, completed from the checkpoint's outer config."""
    text: PreTrainedConfig = copy.deepcopy(config.get_text_config())
    tied = getattr(config, "tie_word_embeddings", None)
    if tied is None:
        tied = getattr(text, "tie_word_embeddings", False)
    text.tie_word_embeddings = bool(tied)
    if text.dtype is None:
        text.dtype = config.dtype
    return text


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the generating class of a composite checkpoint. Raises ConfigError without one."""
    for name in config.architectures or ():
        found: Any = getattr(transformers, name, None)
        if getattr(found, "config_class", None) is type(config) and found.can_generate():
            value: type[PreTrainedModel] = found
            return value
    for mapping in _CLASSES:
        if type(config) in mapping:
            value = mapping[type(config)]
            return value
    raise ConfigError(
        f"model_type={config.model_type!r} is not supported: transformers has no class that"
        " generates text with it"
    )


def without_towers(found: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of a composite class that makes no towers and ignores their tensors."""

    def init(self: Any, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        with optional_towers():
            found.__init__(self, config, *args, **options)
        self._keys_to_ignore_on_load_unexpected |= {
            rf"^{re.escape(name)}\." for name in [*_remove_towers(self), *_STAGES]
        }

    members = {"__init__": init, "__module__": found.__module__}
    return type(found.__name__, (found,), members)


def language_part(whole: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a causal language model of the decoder and the head of a loaded composite model.

    config: that of `text_config`. Raises ConfigError if the whole model computes other logits.
    """
    decoder = _decoder(whole)
    if decoder is whole:
        return whole
    expected_NV = _logits_of_text(whole)
    for model in _around(decoder, whole, config):
        model.config = config
        model.generation_config = whole.generation_config
        deviation = (_logits_of_part(model) - expected_NV).norm() / expected_NV.norm()
        if deviation <= TOLERANCE.get(whole.dtype, COARSE_TOLERANCE):
            return model
    raise ConfigError(
        f"model_type={whole.config.model_type!r} is not supported: {type(whole).__name__} computes"
        f" other logits than its language model alone ({type(model).__name__})"
    )


class AbsentTower(nn.Module):
    """Stand in for a tower that is not loaded: keeps its attributes, and cannot be called."""

    def __init__(self, tower: nn.Module | None, config: Any):
        super().__init__()
        self.config = config
        object.__setattr__(self, "_tower", tower)  # outside of the module tree

    def __getattr__(self, name: str) -> Any:
        tower = self.__dict__.get("_tower")
        if tower is not None and name not in ("_parameters", "_buffers", "_modules"):
            return getattr(tower, name)
        return super().__getattr__(name)

    def forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("text passes through one of its towers")


@contextmanager
def optional_towers() -> Iterator[None]:
    """Have `AutoModel.from_config` make an `AbsentTower` where a tower's library is missing."""
    make = AutoModel.from_config

    def from_config(config: PreTrainedConfig, **options: Any) -> Any:
        try:
            return make(config, **options)
        except ImportError:
            return AbsentTower(None, config)

    AutoModel.from_config = from_config
    try:
        yield
    finally:
        del AutoModel.from_config  # the class inherits its own


def _remove_towers(whole: PreTrainedModel) -> list[str]:
    """Replace each tower by an `AbsentTower`; return their names."""
    decoder = _decoder(whole)
    inner = next(name for name, module in whole.named_modules() if module is decoder)
    removed: list[str] = []
    for name, module in list(whole.named_modules()):
        if any(name.startswith(f"{outer}.") for outer in removed):
            continue
        if isinstance(module, AbsentTower):
            removed.append(name)
        elif isinstance(module, PreTrainedModel) and not _related(name, inner, whole):
            whole.set_submodule(name, AbsentTower(module, module.config))
            removed.append(name)
    return removed


def _related(name: str, decoder: str, whole: PreTrainedModel) -> bool:
    """Return True for a module that contains the decoder or, unless it is all, is within it."""
    if not decoder:  # the towers are parts of the decoder
        return name in ("", whole.base_model_prefix)
    return f"{decoder}.".startswith(f"{name}.") or not name or f"{name}.".startswith(f"{decoder}.")


def _decoder(whole: PreTrainedModel) -> PreTrainedModel:
    """Return the language model within a composite model: itself if its config is flat."""
    text = whole.config.get_text_config()
    if text is whole.config:
        return whole
    for module in whole.modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is type(text):
            return module
    raise ConfigError(
        f"model_type={whole.config.model_type!r} is not supported: {type(whole).__name__} has no"
        " module with the config of its language model"
    )


def _around(
    decoder: PreTrainedModel, whole: PreTrainedModel, config: PreTrainedConfig
) -> Iterator[PreTrainedModel]:
    """Yield causal language models that consist of `decoder` and the head of `whole`.

    The first one is of the class for text alone, which may scale logits as the whole does not.
    """
    if decoder.get_output_embeddings() is not None:
        yield decoder
        return
    head = whole.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f"model_type={config.model_type!r} is not supported: {type(whole).__name__} has no head"
        )
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            model: PreTrainedModel = found(config)
        if type(model.base_model) is type(decoder):
            setattr(model, model.base_model_prefix, decoder)
            model.set_output_embeddings(head)
            yield model.eval()
    yield LanguageModel(config, decoder, head).eval()


def _text(config: PreTrainedConfig) -> Tensor:
    """Return some tokens of text."""
    ids_1N: Tensor = (torch.arange(TOKENS) * 7 % config.vocab_size).unsqueeze(0)
    return ids_1N


@torch.inference_mode()
def _logits_of_text(whole: PreTrainedModel) -> Tensor:
    """Return logits `[N, V]` of some tokens of text. Raises ConfigError for a model that fails."""
    ids_1N = _text(whole.config.get_text_config())
    try:
        logits: Tensor = whole(input_ids=ids_1N, use_cache=False).logits[0].float()
    except Exception as error:
        raise ConfigError(
            f"model_type={whole.config.model_type!r} is not supported: {type(whole).__name__} fails"
            f" on {TOKENS} tokens of text: {error}"
        ) from error
    return logits


@torch.inference_mode()
def _logits_of_part(model: PreTrainedModel) -> Tensor:
    output = model(
        input_ids=_text(model.config), use_cache=False, logits_to_keep=torch.arange(TOKENS)
    )
    logits: Tensor = output.logits[0].float()
    return logits
