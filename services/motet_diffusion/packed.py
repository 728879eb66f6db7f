"""A denoiser's convolutions with weights in the order in which oneDNN reads them, laid out once.

torch brings the weights into that order at every call, and small pictures go through a slower loop of its own besides.
The operators are those that torch's compiler puts in the place of convolutions when it freezes a model. Which order is
best depends on the size of what comes in, so it is made for the first size that is drawn; others are torch's business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LAY_OUT = "_reorder_convolution_weight"
_CONVOLVE = "_convolution_pointwise"


def pack(denoiser: nn.Module) -> None:
    """Replace the convolutions of a denoiser on the CPU; a model elsewhere, or of another type, is left as it is."""
    if not _can(next(denoiser.parameters())):
        return
    denoiser.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # what oneDNN is fastest with
    for parent in list(denoiser.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and child.padding_mode == "zeros" and not isinstance(child.padding, str):
                setattr(parent, name, PackedConv(child))


def _can(parameter: Tensor) -> bool:
    known = all(hasattr(torch.ops.mkldnn, name) for name in (_LAY_OUT, _CONVOLVE))
    return known and parameter.device.type == "cpu" and parameter.dtype == torch.float32


class PackedConv(nn.Module):
    """`nn.Conv2d` with its weights twice: as they were, and laid out for what comes in first."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = conv
        self.in_channels, self.out_channels = conv.in_channels, conv.out_channels
        self._how = (list(map(int, conv.padding)), list(conv.stride), list(conv.dilation), conv.groups)
        self._packed: Tensor | None = None
        self._size = torch.Size()

    @property
    def weight(self) -> Tensor:
        """Models ask for its type."""
        return self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            self._packed = getattr(torch.ops.mkldnn, _LAY_OUT)(self.conv.weight, *self._how, [1, *x.shape[1:]])
            self._size = x.shape[2:]
        out: Tensor
        if x.shape[2:] != self._size:
            out = self.conv(x)
            return out
        x = x.contiguous(memory_format=torch.channels_last)
        out = getattr(torch.ops.mkldnn, _CONVOLVE)(x, self._packed, self.conv.bias, *self._how, "none", [], "")
        return out
