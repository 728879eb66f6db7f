"""Multiply by the weights of `linear.py` in GPU layout: row-major, on the activations' device.

| format | weights | scales | implementation |
|---|---|---|---|
| float32, bfloat16, float16 | `[N, K]` | | torch (cuBLAS), sums in float32 |
| int8 | int8 `[N, 128 B]`, zero after K | float32 `[N]` | `gpu/linear.py`, exact integer sums |
| int4 | uint8 `[N, 64 B]`, scales apart | bfloat16 `[N, 4 B]` | `gpu/linear.py` |

A byte of int4 holds two weights of a block of 128 inputs, plus 8: byte j holds the block's input j
in its lower half and input 64 + j in its upper one, so that each half covers consecutive inputs.
Rows are float32, bfloat16 or float16. A product whose weights are of another type than the rows
widens both to float32: correct, but slow.

Shapes: M rows, N output features, K input features, B = ⌈K/128⌉ blocks, G = 4 B groups of 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.linear.linear import Linear, rows_of
from motet_kernels.linear.quantization import GROUP, quantize_channels, quantize_groups, round_trip
from motet_kernels.linear.row_layout import BLOCK, pack_nibbles, unpack_nibbles
from motet_kernels.runtime.arguments import FLOATS, check_device


class RowLinear(Linear):
    """Multiply by row-major weights, as a `Linear`.

    The module's table specifies `packed` and `scale_N`.
    """

    inputs = (*FLOATS, torch.float16)

    @classmethod
    @torch.no_grad()
    def from_rows(
        cls, weight_NK: Tensor, bias_N: Tensor | None, form: str, device: torch.device
    ) -> RowLinear:
        """Pack checked weights; they are rounded on `device`."""
        weight_NK, shape = weight_NK.detach().to(device), (weight_NK.shape[0], weight_NK.shape[1])
        scales = None
        if form == "int8":
            packed, scales = quantize_channels(weight_NK)
            packed = F.pad(packed, (0, -shape[1] % BLOCK))
        elif form == "int4":
            packed, scales = pack_nibbles(*quantize_groups(weight_NK))
        else:
            packed = weight_NK.to(getattr(torch, form), copy=True)
        bias_dtype = packed.dtype if packed.is_floating_point() else torch.float32
        bias_N = None if bias_N is None else bias_N.detach().to(device, bias_dtype, copy=True)
        return cls(packed.contiguous(), scales, bias_N, shape, form)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product as `Linear.forward` does.

        In a float format with a bias, the product is rounded before the residual is added.
        """
        shape = self.check(x, residual)
        check_device("x", x, "the weight", self.packed)
        if self.is_exact and x.dtype == self.packed.dtype:
            return self._product(x, residual)
        if self.is_exact or not gpu.takes(x):
            return self.forward_torch(x, residual)
        from motet_kernels.gpu.linear import linear as kernels

        multiply = kernels.int8_linear if self.format == "int8" else kernels.int4_linear
        assert self.scale_N is not None
        x_MK = _rows(x)
        residual_MN = None if residual is None else _rows(residual)
        return multiply(x_MK, self.packed, self.scale_N, self.bias_N, residual_MN).view(shape)

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Multiply tensors of one type with torch, with bias or residual in its epilogue."""
        if residual is None:
            return F.linear(x, self.packed, self.bias_N)
        if self.bias_N is not None:
            return F.linear(x, self.packed, self.bias_N).add_(residual)
        x_MK, residual_MN = (part.reshape(-1, part.shape[-1]) for part in (x, residual))
        return torch.addmm(residual_MN, x_MK, self.packed.T).view(residual.shape)

    def round_input(self, x_MK: Tensor) -> Tensor:
        if self.format == "int8":
            return round_trip(x_MK.float(), None)
        if self.format == "int4":
            return x_MK.bfloat16().float() if x_MK.dtype == torch.float32 else x_MK.float()
        return x_MK.to(self.packed.dtype).float()

    def weight(self, start: int = 0, stop: int | None = None) -> Tensor:
        part, scales = (
            self.packed[start:stop],
            None if self.scale_N is None else self.scale_N[start:stop],
        )
        if self.format == "int4":
            part = unpack_nibbles(part).unflatten(1, (-1, GROUP))
        if scales is not None:
            part = (part.float() * scales.float().unsqueeze(-1)).flatten(1)
        return part[:, : self.in_features].float()

    def _read_rows(self, ids: Tensor, ids_M: Tensor) -> Tensor:
        return F.embedding(ids, self.packed).float()

    def _addresses(self) -> tuple[int, int | None, int | None]:
        return 0, None, None  # unused: launches take tensors


def _rows(x: Tensor) -> Tensor:
    return rows_of(x, x.shape[-1])[0].view(-1, x.shape[-1])
