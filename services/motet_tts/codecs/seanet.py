"""Run a Mimi decoder's convolutions on a GPU: one launch each, activation and residual fused.

Source of the network: SEANet (Tagliasacchi et al. 2020), as transformers' `MimiDecoderModel` holds
it. The layout is steps by channels, as the transformer between the convolutions has it anyway.

Shapes: B streams, N new steps, C channels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from motet_kernels import gpu
from motet_kernels.audio.codec_conv import convolve
from motet_kernels.audio.packed_conv import Activation, Context, PackedConv
from motet_kernels.runtime.errors import KernelError

from .stream_context import ContextBuffers

log = logging.getLogger(__name__)

Contexts = Sequence[Context | None]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Apply a convolution, with the activation of its inputs; `index` is its number among all."""

    conv: PackedConv
    activation: Activation
    index: int

    def __call__(
        self, x_BNC: Tensor, contexts: Contexts, residual_BNC: Tensor | None = None
    ) -> Tensor:
        context = contexts[self.index]
        return convolve(
            x_BNC, self.conv, self.activation, residual_BMO=residual_BNC, context=context
        )


@dataclass(frozen=True, slots=True)
class _Residual:
    """Apply layers whose last one adds the block's input, through the shortcut if there is one."""

    layers: list[_Layer]
    shortcut: _Layer | None

    def __call__(self, x_BNC: Tensor, contexts: Contexts) -> Tensor:
        residual_BNC = x_BNC if self.shortcut is None else self.shortcut(x_BNC, contexts)
        for layer in self.layers[:-1]:
            x_BNC = layer(x_BNC, contexts)
        return self.layers[-1](x_BNC, contexts, residual_BNC)


class FusedSeanet:
    """Run a `MimiDecoderModel` or similar decoder as fused convolutions.

    Raises KernelError if its layers are not in an order that can be fused.
    """

    def __init__(self, decoder: Any):
        self._convs: list[PackedConv] = []
        self._up = None if decoder.upsample is None else self._layer(decoder.upsample, Activation())
        self._chain = self._fuse_activations(decoder.decoder_seanet.layers)
        self.contexts = ContextBuffers(self._convs)

    def upsample(self, latents_BNC: Tensor, contexts: Contexts) -> Tensor:
        """Upsample latents to the steps of the transformer."""
        return latents_BNC if self._up is None else self._up(latents_BNC.contiguous(), contexts)

    def decode(self, hidden_BNC: Tensor, contexts: Contexts) -> Tensor:
        """Decode to samples `[B, N * samples of a step]`."""
        for part in self._chain:
            hidden_BNC = part(hidden_BNC, contexts)
        return hidden_BNC[..., 0]

    def _fuse_activations(self, modules: Iterable[Any]) -> list[_Layer | _Residual]:
        """Fuse each activation into the layer after it; return layers and residual blocks."""
        chain: list[_Layer | _Residual] = []
        activation: Activation | None = None
        for module in modules:
            if hasattr(module, "conv"):
                chain.append(self._layer(module, activation or Activation()))
                activation = None
            elif activation is None and isinstance(module, nn.ELU):
                activation = Activation("elu", module.alpha)
            elif activation is None and hasattr(module, "block"):
                chain.append(self._residual(module))
            else:
                raise KernelError(
                    f"decoder: a {type(module).__name__} is at a place where it cannot be fused"
                )
        if activation is not None or not chain:
            raise KernelError("decoder: it must end with a convolution")
        return chain

    def _residual(self, module: Any) -> _Residual:
        shortcut = (
            self._layer(module.shortcut, Activation()) if hasattr(module.shortcut, "conv") else None
        )
        layers = [
            layer for layer in self._fuse_activations(module.block) if isinstance(layer, _Layer)
        ]
        if len(layers) != sum(hasattr(part, "conv") for part in module.block):
            raise KernelError("decoder: a residual block is nested in another one")
        return _Residual(layers, shortcut)

    def _layer(self, module: Any, activation: Activation) -> _Layer:
        self._convs.append(PackedConv.of(module.conv))
        return _Layer(self._convs[-1], activation, len(self._convs) - 1)


def fused_seanet(decoder: Any) -> FusedSeanet | None:
    """Return the fused decoder; None without a GPU kernel for it."""
    if not gpu.takes(next(decoder.parameters())):
        return None
    try:
        return FusedSeanet(decoder)
    except KernelError as error:
        log.warning("%s is not fused: %s", type(decoder).__name__, error)
        return None
