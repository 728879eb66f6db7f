"""Multiply float32 or bfloat16 rows by weights that are packed once, in one of four formats.

An output row depends on its input row alone, bit for bit: neither on the number of rows nor on
their order. On the CPU the native kernels guarantee this by construction (csrc/linear_float.cpp,
linear_integer.cpp); the torch twin does not, nor do the products of a GPU (`row_linear.py`), which
has its own layout for the same formats.

| format | weights | input | memory per weight |
|---|---|---|---|
| float32 | exact | float32 | 32 bits |
| bfloat16 | bfloat16 | bfloat16 | 16 bits |
| int8 | per-channel scales | int8, a scale per row | 8 bits |
| int4 | scales per group of 32 | int8, a scale per row and group | 4.5 bits |

Shapes: M rows, N output features, K input features, P panels of 32 output features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.linear import panels
from motet_kernels.linear.quantization import GROUP, quantize_channels, quantize_groups, round_trip
from motet_kernels.runtime.arguments import FLOATS, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

# Panels that the twin unpacks at a time.
TWIN_PANELS = 64

_FLOAT = Kernel("motet_linear_float", "piipippipiiiii")
_INTEGER = Kernel("motet_linear_integer", "piippppipiiiii")
_ROWS = Kernel("motet_linear_rows", "pippii")


class Linear(nn.Module):
    """Compute `y = x · Wᵀ + b`, like `nn.Linear`; made by `pack_linear`."""

    packed: Tensor
    scale_N: Tensor | None
    bias_N: Tensor | None
    inputs: tuple[torch.dtype, ...] = FLOATS

    def __init__(
        self,
        packed: Tensor,
        scale_N: Tensor | None,
        bias_N: Tensor | None,
        shape: tuple[int, int],
        form: str,
    ):
        super().__init__()
        self.out_features, self.in_features = shape
        self.format = form
        self.register_buffer("packed", packed)
        self.register_buffer("scale_N", scale_N)
        self.register_buffer("bias_N", bias_N)
        self.is_exact = form not in ("int8", "int4")
        self.weight_arguments = self._addresses()  # of the native kernels

    def _addresses(self) -> tuple[int, int | None, int | None]:
        """Return the kernel arguments for the weights: their address, type or scales, and bias."""
        scale, bias = self.scale_N, self.bias_N
        kind = (
            self.format == "bfloat16"
            if self.is_exact
            else None
            if scale is None
            else scale.data_ptr()
        )
        return self.packed.data_ptr(), kind, None if bias is None else bias.data_ptr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, and take the addresses of its own weights."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight_arguments = self._addresses()

    @property
    def is_plain(self) -> bool:
        """Return True if this is all that a call computes: panels of a CPU, and no hooks."""
        return type(self) is Linear and not (self._forward_hooks or self._forward_pre_hooks)

    @classmethod
    def from_panels(cls, weight_NK: Tensor, bias_N: Tensor | None, form: str) -> Linear:
        """Pack checked weights in panels, for the CPU."""
        scale_N = None
        if form == "int8":
            q_NK, scale_N = quantize_channels(weight_NK)
            packed = panels.pack_bytes(q_NK)
            scale_N = F.pad(scale_N, (0, -len(scale_N) % panels.PANEL))
        elif form == "int4":
            packed = panels.pack_nibbles(*quantize_groups(weight_NK))
        else:
            packed = panels.pack_floats(weight_NK.to(getattr(torch, form)))
        bias_N = None if bias_N is None else bias_N.detach().float().clone()
        return cls(packed, scale_N, bias_N, (weight_NK.shape[0], weight_NK.shape[1]), form)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `[..., N]` in the type of x `[..., K]`.

        A `residual` of the result's shape and type is added before rounding. Raises `KernelError`
        as `check` does.
        """
        shape = self.check(x, residual)
        return self._multiply(x, residual, shape, x.dtype)

    def into(self, dtype: torch.dtype, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return what `forward` does, in `dtype`, float32 or bfloat16, if `is_plain`.

        The residual is of that type.
        """
        shape = self.check(x, residual, dtype)
        return self._multiply(x, residual, shape, dtype)

    def _multiply(
        self, x: Tensor, residual: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        kernel = (_FLOAT if self.is_exact else _INTEGER).native() if is_cpu(x) else None
        if kernel is None:
            wide = None if residual is None else residual.float()
            return self.forward_torch(x.float(), wide).to(dtype)
        out = x.new_empty(shape, dtype=dtype)
        _kept, inputs = input_arguments(x, self.in_features)
        _more, ends = output_arguments(residual, out, 0)
        kernel(
            *inputs, *self.weight_arguments, *ends,
            x.numel() // self.in_features, self.out_features, self.in_features,
        )  # fmt: skip
        return out

    def check(
        self, x: Tensor, residual: Tensor | None, dtype: torch.dtype | None = None
    ) -> tuple[int, ...]:
        """Return the product's shape; raise `KernelError` if x or the residual does not fit.

        dtype: of the result, by default that of x.
        """
        dtype = x.dtype if dtype is None else dtype
        if x.dtype not in self.inputs:
            raise KernelError(
                f"x: {x.dtype} must be {' or '.join(str(kind)[6:] for kind in self.inputs)}"
            )
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise KernelError(f"x: shape {list(x.shape)} must end with {self.in_features} features")
        shape = (*x.shape[:-1], self.out_features)
        if residual is not None and (residual.shape != shape or residual.dtype != dtype):
            raise KernelError(
                f"residual: {residual.dtype} {list(residual.shape)} must be {dtype} {list(shape)}, as the result"
            )
        return shape

    def forward_torch(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute `forward` in torch: its twin.

        Weights are unpacked to float32 a few panels at a time, which limits memory use.
        """
        x_MK = self.round_input(x.reshape(-1, self.in_features))
        step = TWIN_PANELS * panels.PANEL
        parts = [
            F.linear(x_MK, self.weight(n, min(n + step, self.out_features)))
            for n in range(0, self.out_features, step)
        ]
        out_MN = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.bias_N is not None:
            out_MN = out_MN + self.bias_N
        out = out_MN.view(*x.shape[:-1], self.out_features)
        return (out if residual is None else out + residual).to(x.dtype)

    def round_input(self, x_MK: Tensor) -> Tensor:
        """Return rows as the format's kernel rounds them, in float32."""
        x_MK = x_MK.float()
        if self.format == "float32":
            return x_MK
        if self.format == "bfloat16":
            return x_MK.bfloat16().float()
        return round_trip(x_MK, GROUP if self.format == "int4" else None)

    def weight(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows `start` to `stop` of the weights as they are used.

        They are float32 `[stop - start, K]`.
        """
        stop = self.out_features if stop is None else stop
        first = start // panels.PANEL
        part = self.packed[first : -(-stop // panels.PANEL)]
        if self.format == "int4":
            rows = panels.unpack_nibbles(part)
        elif self.scale_N is not None:
            rows = panels.unpack_bytes(part)
            rows = rows * self.scale_N[first * panels.PANEL :][: len(rows)].unsqueeze(1)
        else:
            rows = panels.unpack_floats(part)
        return rows[start - first * panels.PANEL : stop - first * panels.PANEL, : self.in_features]

    def rows(self, ids: Tensor) -> Tensor:
        """Return exact rows of float32 or bfloat16 weights, float32 `[..., K]`.

        So a tied embedding needs no copy of its own. Raises `KernelError` in the other formats, and
        on an id outside of the weights. On a GPU ids are not checked, which would synchronize with
        the device: such an id triggers a device assertion.
        """
        if not self.is_exact:
            raise KernelError(
                f"format: {self.format!r} has no exact rows; keep the embedding's own table"
            )
        ids_M = ids.reshape(-1).contiguous()
        if (
            is_cpu(ids)
            and len(ids_M)
            and not 0 <= int(ids_M.min()) <= int(ids_M.max()) < self.out_features
        ):
            low, high = int(ids_M.min()), int(ids_M.max())
            raise KernelError(f"ids: {low} to {high} must be from 0 to {self.out_features - 1}")
        return self._read_rows(ids, ids_M)

    def _read_rows(self, ids: Tensor, ids_M: Tensor) -> Tensor:
        native = _ROWS.native() if is_cpu(ids) and ids.dtype == torch.int64 else None
        if native is None:
            return self.rows_torch(ids)
        out = torch.empty(*ids.shape, self.in_features)
        packed, is_bf16, _ = self.weight_arguments
        native(packed, is_bf16, ids_M.data_ptr(), out.data_ptr(), len(ids_M), self.in_features)
        return out

    def rows_torch(self, ids: Tensor) -> Tensor:
        """Compute `rows` in torch: its twin."""
        panel, column = ids.reshape(-1) // panels.PANEL, ids.reshape(-1) % panels.PANEL
        found = (
            self.packed[panel, :, column]
            if self.format == "bfloat16"
            else self.packed[panel, :, :, column]
        )
        return found.flatten(1)[:, : self.in_features].float().view(*ids.shape, self.in_features)

    @property
    def nbytes(self) -> int:
        """Return the memory of weights, scales and bias in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"

    def _apply(self, *args: Any, **kwargs: Any) -> Linear:
        where = "the CPU" if is_cpu(self.packed) else self.packed.device
        raise KernelError(
            f"device: a packed {self.format} Linear stays on {where}, in its format; pack it again"
        )


def rows_of(x: Tensor, features: int) -> tuple[Tensor, int]:
    """Return a tensor with dense rows and their stride; copy only if x's strides require it."""
    if x.is_contiguous():
        return x, features
    x_MK = x.reshape(-1, features)
    if x_MK.stride(1) != 1 and features > 1:
        x_MK = x_MK.contiguous()
    return x_MK, x_MK.stride(0)


Arguments = tuple[int | None, ...]


def input_arguments(x: Tensor, features: int) -> tuple[Tensor, Arguments]:
    """Return rows of `features` numbers, to be kept alive, and a native product's arguments for them.

    They are address, type and stride.
    """
    x_MK, stride = rows_of(x, features)
    return x_MK, (x_MK.data_ptr(), x.dtype == torch.bfloat16, stride)


def output_arguments(
    residual: Tensor | None, out: Tensor, column: int
) -> tuple[Tensor | None, Arguments]:
    """Return rows of the residual, to be kept alive, and a native product's arguments for the output.

    They are address and stride of the residual, then address, type and stride of a dense `out`, of
    which columns from `column` on are written. The residual is as wide as `out`; its same columns
    are added.
    """
    width, begin = out.shape[-1], column * out.element_size()
    ends = (out.data_ptr() + begin, out.dtype == torch.bfloat16, width)
    if residual is None:
        return None, (None, 0, *ends)
    rows, stride = rows_of(residual, width)
    return rows, (rows.data_ptr() + begin, stride, *ends)
