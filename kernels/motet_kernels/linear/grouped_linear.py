"""Multiply by weights of 4 or 8 bits in groups of inputs, row by row: float8, and all on a GPU.

    weight[n, k] = scale[n, g] · (level(code[n, k]) - offset) + shift[n, g],  g = k // group

The input is not rounded, and sums are float32: the result is the checkpoint's own weights times the
input. On a CPU only float8 is multiplied so (csrc/linear_grouped.cpp; an output row depends on its
input row alone, bit for bit); integer codes are in `code_linear.py`.

| codes | memory layout, `[N, …]` bytes |
|---|---|
| uint8 from 0 to 15; offset 8 with neither table nor shift | byte j of 32 has inputs j, 16 + j |
| int8 | a byte each |
| float8_e4m3fn, finite | a byte each |

Shapes: M rows, N output features, K input features, G groups of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.linear.group_weights import (
    BLOCK,
    FLOAT8,
    GroupWeights,
    dequantize,
    in_input_order,
)
from motet_kernels.linear.levels import LEVELS
from motet_kernels.linear.linear import Linear, input_arguments, output_arguments
from motet_kernels.linear.scales import Scales, dense, narrowed
from motet_kernels.runtime.arguments import FLOATS, is_cpu
from motet_kernels.runtime.memory import huge_zeros
from motet_kernels.runtime.native import Kernel

_TWIN_ROWS = 2048  # rows that the twin unpacks at a time

_GROUPED = Kernel("motet_linear_grouped", "piipppip" + "pipiiiii")


class GroupedLinear(Linear):
    """Multiply by `GroupWeights`, as a `Linear`.

    `format` is the format of the codes and, after a colon, the group size.
    """

    inputs = (*FLOATS, torch.float16)

    def __init__(self, weights: GroupWeights, bias_N: Tensor | None, device: torch.device):
        features, inputs = weights.codes_NK.shape
        packed = pack_rows(weights.codes_NK)
        bias_N = None if bias_N is None else bias_N.detach().to(device, torch.float32, copy=True)
        nibbles = weights.codes_NK.dtype == torch.uint8
        group = min(weights.group, packed.shape[1] * (2 if nibbles else 1))
        super().__init__(
            packed.to(device), None, bias_N, (features, inputs), f"{weights.format}:{group}"
        )
        self.codes, self.nibbles = weights.format, nibbles
        self.group, self.offset = group, weights.offset
        self.register_buffer("scale_NG", _copied(weights.scale_NG, device))
        self.register_buffer(
            "shift_NG", None if weights.shift_NG is None else _copied(weights.shift_NG, device)
        )
        levels = LEVELS.get(weights.format)
        self.register_buffer("levels", None if levels is None else levels.tensor.to(device))
        self.register_buffer(
            "order_K", None if weights.order_K is None else weights.order_K.to(device, torch.int32)
        )
        self.is_exact = False

    @classmethod
    def of_rows(
        cls,
        packed: Tensor,
        scale_NG: Tensor,
        bias_N: Tensor | None,
        order_K: Tensor | None,
        inputs: int,
        group: int,
        form: str,
    ) -> GroupedLinear:
        """Return float8 on a CPU that keeps these tensors; `stored.py` checks that they fit."""
        made = cls.__new__(cls)
        Linear.__init__(made, packed, None, bias_N, (len(packed), inputs), form)
        made.codes, made.nibbles, made.group, made.offset = "float8", False, group, 0.0
        for name, tensor in (("scale_NG", scale_NG), ("order_K", order_K)):
            made.register_buffer(name, tensor)
        for name in ("shift_NG", "levels"):
            made.register_buffer(name, None)
        made.is_exact = False
        return made

    scale_NG: Tensor
    shift_NG: Tensor | None
    levels: Tensor | None
    order_K: Tensor | None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product as `Linear.forward` does."""
        shape = self.check(x, residual)
        if gpu.takes(x) and is_cpu(self.packed) == is_cpu(x):
            from motet_kernels.gpu.linear import grouped_linear as kernels

            x_MK = x.reshape(-1, self.in_features)
            x_MK = x_MK if self.order_K is None else x_MK[:, self.order_K]
            residual_MN = None if residual is None else residual.reshape(-1, self.out_features)
            return kernels.grouped_linear(x_MK.contiguous(), self, residual_MN).view(shape)
        if not self.is_native(x):
            return self.forward_torch(x, residual)
        out = x.new_empty(shape)
        self.write(x, residual, out, 0)
        return out

    def is_native(self, x: Tensor) -> bool:
        """Return True if the native kernel multiplies rows like x by this format."""
        known = self.codes == "float8" and is_cpu(x) and x.dtype in FLOATS
        return known and _GROUPED.native() is not None

    def write(self, x: Tensor, residual: Tensor | None, out: Tensor, column: int) -> None:
        """Write the product and `residual`, if given, to columns of a dense `out` from `column` on.

        The residual is as wide as `out`; its same columns are added. Native kernel only; the caller
        has checked that arguments fit and are of one type.
        """
        native = _GROUPED.native()
        assert native is not None
        _kept, inputs = input_arguments(x, self.in_features)
        _more, ends = output_arguments(residual, out, column)
        native(
            *(*inputs, self.packed.data_ptr(), self.scale_NG.data_ptr()),
            *(_address(self.order_K), self.group, _address(self.bias_N), *ends),
            *(x.numel() // self.in_features, self.out_features, self.in_features),
        )

    def forward_torch(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute `forward` in torch: its twin.

        Weights are unpacked some rows at a time, which limits memory use.
        """
        x_MK = x.reshape(-1, self.in_features).float()
        starts = range(0, self.out_features, _TWIN_ROWS)
        parts = [
            F.linear(x_MK, self.weight(n, min(n + _TWIN_ROWS, self.out_features))) for n in starts
        ]
        out_MN = torch.cat(parts, dim=1)
        if self.bias_N is not None:
            out_MN = out_MN + self.bias_N
        out = out_MN.view(*x.shape[:-1], self.out_features)
        return (out if residual is None else out + residual).to(x.dtype)

    def round_input(self, x_MK: Tensor) -> Tensor:
        return x_MK.float()

    def weight(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows `start` to `stop` of the weights, in float32 `[stop - start, K]`."""
        return self._weight(self.packed[start:stop], slice(start, stop))

    def read(self, ids: Tensor) -> Tensor:
        """Return rows of the weights by index, float32 `[..., K]`: an embedding lookup in codes."""
        flat = ids.reshape(-1)
        return self._weight(self.packed[flat], flat).view(*ids.shape, self.in_features)

    def _weight(self, packed: Tensor, rows: slice | Tensor) -> Tensor:
        codes_NK = unpack_rows(packed, self.codes, self.nibbles)[:, : self.in_features]
        if self.levels is not None:
            codes_NK = self.levels[codes_NK.long()]
        shift_NG = None if self.shift_NG is None else self.shift_NG[rows].float()
        scale_NG = self.scale_NG[rows].float()
        weight_NK = dequantize(codes_NK.float(), scale_NG, shift_NG, self.group, self.offset)
        return in_input_order(weight_NK, self.order_K)


def _copied(scales: Scales, device: torch.device) -> Tensor:
    """Return a contiguous copy on `device`: on a GPU in 16 bits where that is exact."""
    numbers_NG = dense(scales)
    if device.type != "cpu":
        numbers_NG = narrowed(numbers_NG)
    return numbers_NG.to(device, copy=True, memory_format=torch.contiguous_format)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pack_rows(codes_NK: Tensor) -> Tensor:
    """Return bytes `[N, …]`, K padded to whole blocks of 32."""
    padded_NK = F.pad(codes_NK.view(torch.uint8), (0, -codes_NK.shape[1] % BLOCK))
    if codes_NK.dtype == torch.uint8:
        halves = padded_NK.unflatten(1, (-1, 2, BLOCK // 2))
        padded_NK = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return huge_zeros(tuple(padded_NK.shape), torch.uint8).copy_(padded_NK)


def unpack_rows(packed: Tensor, form: str, nibbles: bool) -> Tensor:
    """Return codes `[N, K]` in their own type, padding included."""
    if nibbles:
        both = packed.unflatten(1, (-1, BLOCK // 2))
        return torch.stack((both & 15, both >> 4), dim=2).flatten(1)
    return packed.view(torch.int8 if form == "int8" else FLOAT8)
