"""x · Wᵀ with a matrix for each head: what multi-head latent attention does before and after it attends.

The input is rounded to the weights' type, and sums are float32.
As with `Linear`, an output depends on its input row alone, bit for bit; the torch twin does not keep this.

Shapes: M rows, H heads, N output features, K input features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import panels
from .arguments import check_device, check_floats, is_cpu
from .errors import KernelError
from .native import Kernel

FORMATS = ("float32", "bfloat16")

_HEADS = Kernel("motet_linear_heads", "piiipipiiiiiii")


class HeadLinear(nn.Module):
    """`out[m, h] = W[h] · x[m, h]`, made by `HeadLinear.pack`."""

    packed: Tensor

    def __init__(self, packed: Tensor, shape: tuple[int, int, int]):
        super().__init__()
        self.heads, self.out_features, self.in_features = shape
        self.register_buffer("packed", packed, persistent=False)

    @classmethod
    def pack(cls, weight_HNK: Tensor, form: str) -> HeadLinear:
        """Weights (float32 or bfloat16) in a format of FORMATS. The tensor given is not kept."""
        if form not in FORMATS:
            raise KernelError(f"form: {form!r} is not one of {', '.join(FORMATS)}")
        check_floats("weight_HNK", weight_HNK.contiguous(), 3)
        heads, features, inputs = weight_HNK.shape
        padded = F.pad(weight_HNK.to(getattr(torch, form)), (0, 0, 0, -features % panels.PANEL))
        return cls(panels.pack_floats(padded.flatten(0, 1)), (heads, features, inputs))

    def forward(self, x_MHK: Tensor, out_MHN: Tensor | None = None) -> Tensor:
        """`[M, H, N]` in the type of x, written to `out_MHN` where given. Both may be strided by row and by head."""
        check_floats("x_MHK", x_MHK, 3)
        if x_MHK.shape[1:] != (self.heads, self.in_features):
            raise KernelError(f"x_MHK: shape {list(x_MHK.shape)} must be M x {self.heads} x {self.in_features}")
        shape = (len(x_MHK), self.heads, self.out_features)
        if out_MHN is None:
            out_MHN = x_MHK.new_empty(shape)
        if out_MHN.shape != shape or out_MHN.dtype != x_MHK.dtype:
            raise KernelError(f"out_MHN: {out_MHN.dtype} {list(out_MHN.shape)} must be {x_MHK.dtype} {list(shape)}")
        check_floats("out_MHN", out_MHN, 3)
        check_device("x_MHK", x_MHK, "the weight", self.packed)
        kernel = _HEADS.native() if is_cpu(x_MHK) else None
        if kernel is None:
            return out_MHN.copy_(self.forward_torch(x_MHK))
        is_bf16 = x_MHK.dtype == torch.bfloat16
        kernel(
            x_MHK.data_ptr(),
            is_bf16,
            *x_MHK.stride()[:2],
            self.packed.data_ptr(),
            self.packed.dtype == torch.bfloat16,
            out_MHN.data_ptr(),
            is_bf16,
            *out_MHN.stride()[:2],
            *shape[:2],
            self.out_features,
            self.in_features,
        )
        return out_MHN

    def forward_torch(self, x_MHK: Tensor) -> Tensor:
        """The twin, summed in float32."""
        x_HMK = x_MHK.transpose(0, 1).to(self.packed.dtype).float()
        return (x_HMK @ self.weight().mT).transpose(0, 1).to(x_MHK.dtype)

    def weight(self) -> Tensor:
        """The weights as they are used, in float32 `[H, N, K]`."""
        rows = panels.unpack_floats(self.packed).unflatten(0, (self.heads, -1))
        return rows[:, : self.out_features, : self.in_features]
