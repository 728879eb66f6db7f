"""Install the latent attention and recurrent mixers of this package in transformers' models."""

from __future__ import annotations

from transformers import PreTrainedModel

from motet_llm.attention import latent as mla

from . import recurrent
from .delta_net import KimiDeltaAttention, OlmoHybridDeltaNet, Qwen3NextDeltaNet, Qwen35DeltaNet
from .mamba import Mamba1, Mamba2, ZambaMamba
from .short_conv import ShortConv

RECURRENT: dict[str, type[recurrent.Mixer]] = {
    "BailingHybridDeltaAttention": KimiDeltaAttention,
    "BambaMixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "FalconMambaMixer": Mamba1,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "JambaMambaMixer": Mamba1,
    "KimiLinearDeltaAttention": KimiDeltaAttention,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm2ShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
    "Mamba2Mixer": Mamba2,
    "MambaMixer": Mamba1,
    "NemotronHMamba2Mixer": Mamba2,
    "OlmoHybridGatedDeltaNet": OlmoHybridDeltaNet,
    "Qwen3NextGatedDeltaNet": Qwen3NextDeltaNet,
    "Qwen3_5GatedDeltaNet": Qwen35DeltaNet,
    "Qwen3_5MoeGatedDeltaNet": Qwen35DeltaNet,
    "Zamba2MambaMixer": Mamba2,
    "ZambaMambaMixer": ZambaMamba,
}


def install(model: PreTrainedModel) -> int:
    """Replace the mixers of a loaded model, before its matrices are packed; return how many.

    Raises ConfigError that names a mixer which is not supported.
    """
    return install_recurrent(model) + install_latent(model)


def install_recurrent(model: PreTrainedModel) -> int:
    _number_layers(model)
    return recurrent.install(model, RECURRENT)


def install_latent(model: PreTrainedModel) -> int:
    return mla.install(model)


def _number_layers(model: PreTrainedModel) -> None:
    """Set missing layer indices: Zamba and Zamba-2 build attention without one (None, -1).

    They pass that of the hybrid layer along instead.
    """
    for index, layer in enumerate(getattr(model.base_model, "layers", ())):
        for module in layer.modules():
            if hasattr(module, "layer_idx") and module.layer_idx in (None, -1):
                module.layer_idx = index
