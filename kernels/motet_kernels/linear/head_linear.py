"""Multiply by a matrix per head, as multi-head latent attention does before and after attention.

The input is rounded to the weights' type, and sums are float32. As with `Linear`, an output depends
on its input row alone, bit for bit; the torch twin does not guarantee this, nor does a GPU, which
multiplies all heads at once (`torch.bmm`, cuBLAS) with weights stored as `[H, N, K]`.

Shapes: M rows, H heads, N output features, K input features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels import gpu
from motet_kernels.linear import panels
from motet_kernels.runtime.arguments import check_device, check_floats, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

FORMATS = ("float32", "bfloat16")
GPU_FORMATS = (*FORMATS, "float16")

_HEADS = Kernel("motet_linear_heads", "piiipipiiiiiii")


class HeadLinear(nn.Module):
    """Compute `out[m, h] = W[h] · x[m, h]`; made by `HeadLinear.pack`."""

    packed: Tensor

    def __init__(self, packed: Tensor, shape: tuple[int, int, int]):
        super().__init__()
        self.heads, self.out_features, self.in_features = shape
        self._plain = packed.shape == shape  # for a GPU; panels have more dimensions
        self.register_buffer("packed", packed, persistent=False)

    @classmethod
    def pack(
        cls, weight_HNK: Tensor, form: str, device: torch.device | str | None = None
    ) -> HeadLinear:
        """Pack weights in a format of FORMATS, on a GPU of GPU_FORMATS, to compute on `device`.

        The default device is the weights' own. The tensor is not kept. Raises `KernelError` on
        another format, type or number of dimensions.
        """
        device = weight_HNK.device if device is None else torch.device(device)
        formats = GPU_FORMATS if gpu.is_gpu(device) else FORMATS
        if form not in formats:
            raise KernelError(f"form: {form!r} is not one of {', '.join(formats)}")
        if weight_HNK.dim() != 3 or weight_HNK.dtype not in [
            getattr(torch, kind) for kind in formats
        ]:
            what = f"{weight_HNK.dtype} {list(weight_HNK.shape)}"
            raise KernelError(
                f"weight_HNK: {what} must be three dimensions of {' or '.join(formats)}"
            )
        heads, features, inputs = weight_HNK.shape
        if gpu.is_gpu(device):
            rows = weight_HNK.detach().to(device, getattr(torch, form), copy=True).contiguous()
            return cls(rows, (heads, features, inputs))
        padded = F.pad(weight_HNK.to(getattr(torch, form)), (0, 0, 0, -features % panels.PANEL))
        return cls(panels.pack_floats(padded.flatten(0, 1)), (heads, features, inputs))

    def forward(self, x_MHK: Tensor, out_MHN: Tensor | None = None) -> Tensor:
        """Return `[M, H, N]` in the type of x, written to `out_MHN` where given.

        Both may be strided by row and by head. Raises `KernelError` on tensors that do not fit.
        """
        check_floats("x_MHK", x_MHK, 3)
        if x_MHK.shape[1:] != (self.heads, self.in_features):
            raise KernelError(
                f"x_MHK: shape {list(x_MHK.shape)} must be M x {self.heads} x {self.in_features}"
            )
        shape = (len(x_MHK), self.heads, self.out_features)
        if out_MHN is None:
            out_MHN = x_MHK.new_empty(shape)
        if out_MHN.shape != shape or out_MHN.dtype != x_MHK.dtype:
            raise KernelError(
                f"out_MHN: {out_MHN.dtype} {list(out_MHN.shape)} must be {x_MHK.dtype} {list(shape)}"
            )
        check_floats("out_MHN", out_MHN, 3)
        check_device("x_MHK", x_MHK, "the weight", self.packed)
        if self._plain and x_MHK.dtype == self.packed.dtype:
            return self._multiply(x_MHK, out_MHN)
        kernel = _HEADS.native() if is_cpu(x_MHK) and not self._plain else None
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

    def _multiply(self, x_MHK: Tensor, out_MHN: Tensor) -> Tensor:
        torch.bmm(x_MHK.transpose(0, 1), self.packed.mT, out=out_MHN.transpose(0, 1))
        return out_MHN

    def forward_torch(self, x_MHK: Tensor) -> Tensor:
        """Compute `forward` in torch, summed in float32: its twin."""
        x_HMK = x_MHK.transpose(0, 1).to(self.packed.dtype).float()
        return (x_HMK @ self.weight().mT).transpose(0, 1).to(x_MHK.dtype)

    def weight(self) -> Tensor:
        """Return the weights as they are used, in float32 `[H, N, K]`."""
        if self._plain:
            return self.packed.float()
        rows = panels.unpack_floats(self.packed).unflatten(0, (self.heads, -1))
        output: Tensor = rows[:, : self.out_features, : self.in_features]
        return output
