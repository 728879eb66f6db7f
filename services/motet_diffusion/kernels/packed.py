"""Lay out the weights of a denoiser's convolutions once, in the order that oneDNN reads.

torch reorders the weights at every call, and small pictures take a slower path besides. The
operators are those that torch's compiler substitutes for convolutions when it freezes a model. The
best layout depends on the input size, so it is made for the first size that is drawn; other sizes
use torch's own convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LAY_OUT = "_reorder_convolution_weight"
_CONVOLVE = "_convolution_pointwise"


def pack(denoiser: nn.Module) -> None:
    """Replace the convolutions of a float32 denoiser on the CPU; leave others unchanged."""
    if not _can(next(denoiser.parameters())):
        return
    for parent in list(denoiser.modules()):
        if isinstance(parent, nn.Conv2d):  # oneDNN's fastest layout, which others do not have
            parent.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for name, child in list(parent.named_children()):
            if (
                type(child) is nn.Conv2d
                and child.padding_mode == "zeros"
                and not isinstance(child.padding, str)
            ):
                setattr(parent, name, PackedConv(child))


def _can(parameter: Tensor) -> bool:
    materialized = all(hasattr(torch.ops.mkldnn, name) for name in (_LAY_OUT, _CONVOLVE))
    return materialized and parameter.device.type == "cpu" and parameter.dtype == torch.float32


class PackedConv(nn.Module):
    """Replace `nn.Conv2d`: keep its weights, and a copy packed for the size of the first input.

    Inputs of other sizes use the original weights.
    """

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = conv
        self.in_channels, self.out_channels = conv.in_channels, conv.out_channels
        self._how = (
            list(map(int, conv.padding)),
            list(conv.stride),
            list(conv.dilation),
            conv.groups,
        )
        self._packed: Tensor | None = None
        self._size = torch.Size()

    @property
    def weight(self) -> Tensor:
        """Return the original weight; models read its dtype."""
        return self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            self._packed = getattr(torch.ops.mkldnn, _LAY_OUT)(
                self.conv.weight, *self._how, [1, *x.shape[1:]]
            )
            self._size = x.shape[2:]
        out: Tensor
        if x.shape[2:] != self._size:
            out = self.conv(x)
            return out
        x = x.contiguous(memory_format=torch.channels_last)
        out = getattr(torch.ops.mkldnn, _CONVOLVE)(
            x, self._packed, self.conv.bias, *self._how, "none", [], ""
        )
        return out
