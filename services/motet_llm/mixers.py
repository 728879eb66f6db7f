"""Puts the mixers of this package in the places of transformers' own: latent attention and recurrent layers."""

from __future__ import annotations

from transformers import PreTrainedModel

from . import mla, recurrent
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
    """Replace what a loaded model has of them, before its matrices are packed. The number of modules replaced.

    Raises ConfigError for a mixer that is not supported, by name.
    """
    return install_recurrent(model) + install_latent(model)


def install_recurrent(model: PreTrainedModel) -> int:
    _number_layers(model)
    return recurrent.install(model, RECURRENT)


def install_latent(model: PreTrainedModel) -> int:
    return mla.install(model)


def _number_layers(model: PreTrainedModel) -> None:
    """Zamba and Zamba-2 build attention without its index (None, -1) and pass the hybrid layer's along."""
    for index, layer in enumerate(getattr(model.base_model, "layers", ())):
        for module in layer.modules():
            if hasattr(module, "layer_idx") and module.layer_idx in (None, -1):
                module.layer_idx = index
