"""Multiply by weights in codes of 2, 4 or 8 bits, in panels, with the input rounded; on a CPU.

    weight[n, k] = scale[n, g] · (level(code[n, k]) - offset) + shift[n, g],  g = k // group

GPTQ, AWQ, compressed-tensors, bitsandbytes, MXFP4 and GGUF store weights so. An input row is rounded
to integers with a scale for each 32 of its numbers: of 8 bits, as by llama.cpp, or of 16 if
`precise` (beside `nf4` then, and beside `bnb_fp4` always, of 14).
Products are summed exactly in int32, groups in float32 from the first to the last. An output row
depends on its input row alone, bit for bit, where the native kernel computes (csrc/linear_codes.cpp).

Shapes: M rows, N output features, K input features, G groups of them, P = ⌈N/32⌉ panels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from motet_kernels.linear import panels
from motet_kernels.linear.group_weights import GroupWeights, dequantize, in_input_order
from motet_kernels.linear.levels import LEVELS, WIDE
from motet_kernels.linear.linear import Linear, input_arguments, output_arguments
from motet_kernels.linear.quantization import GROUP, round_trip
from motet_kernels.linear.scales import PackedScales, Scales, repeated
from motet_kernels.runtime.arguments import FLOATS, is_cpu
from motet_kernels.runtime.native import Kernel

_CODES = Kernel("motet_linear_codes", "piipipif" + "ipp" + "ipp" + "ipipp" + "ipiipiiii")
# The native kernel's numbers for codes that are their own levels, beside inputs of 8 and 16 bits.
_KINDS = {
    ("int4", False): 0,
    ("int8", False): 1,
    ("int4", True): 4,
    ("int8", True): 5,
    ("int2", False): 8,
    ("int2", True): 9,
}
_PACK = {"int2": panels.pack_codes2, "int8": panels.pack_codes8}  # pack_codes4 for all others
_UNPACK = {"int2": panels.unpack_codes2, "int8": panels.unpack_codes8}


@dataclass(frozen=True, kw_only=True)
class CodeParts:
    """Hold the parts of a `CodeLinear`.

    form: `format` of the layer, with its group size. codes: format of the codes.
    group: inputs per scale in the kernel, 16 or a multiple of 32.
    precise: inputs are rounded to 16 bits instead of 8, or to 14.
    """

    packed: Tensor
    bias_N: Tensor | None
    shape: tuple[int, int]
    form: str
    codes: str
    offset: float
    group: int
    scale: PackedScales
    shift: PackedScales | None
    order_K: Tensor | None
    precise: bool


class CodeLinear(Linear):
    """Multiply by `GroupWeights` of integer codes, as a `Linear`.

    `format` is the format of the codes and, after a colon, the group size.
    """

    inputs = FLOATS
    table: Tensor | None
    order_K: Tensor | None

    def __init__(self, weights: GroupWeights, bias_N: Tensor | None, *, precise: bool = False):
        features, inputs = weights.codes_NK.shape
        group = min(weights.group, -(-inputs // GROUP) * GROUP)
        codes = "int2" if weights.narrow else weights.format
        pack = _PACK.get(codes, panels.pack_codes4)
        # The kernel's groups are of 16 inputs or of a multiple of 32.
        own = group if group % GROUP == 0 else 16

        def packed(scales: Scales) -> PackedScales:
            return PackedScales(repeated(scales, group // own, -(-inputs // own)))

        self._set(
            CodeParts(
                packed=pack(weights.codes_NK),
                bias_N=None if bias_N is None else bias_N.detach().float().clone(),
                shape=(features, inputs),
                form=f"{codes}:{group}",
                codes=codes,
                offset=weights.offset,
                group=own,
                scale=packed(weights.scale_NG),
                shift=None if weights.shift_NG is None else packed(weights.shift_NG),
                order_K=None if weights.order_K is None else weights.order_K.to(torch.int32),
                precise=precise,
            )
        )

    @classmethod
    def of_parts(cls, parts: CodeParts) -> CodeLinear:
        """Return a matrix that keeps these tensors; `stored.py` checks that they fit."""
        made = cls.__new__(cls)
        made._set(parts)
        return made

    def _set(self, parts: CodeParts) -> None:
        super().__init__(parts.packed, None, parts.bias_N, parts.shape, parts.form)
        self.codes, self.offset, self.is_exact = parts.codes, parts.offset, False
        self.precise, levels = parts.precise, LEVELS.get(parts.codes)
        self.levels = None if levels is None else levels.table(precise=parts.precise)
        kind = _KINDS.get((self.codes, parts.precise))
        self._kind = kind if self.levels is None else self.levels.kind
        self.group, self.scale, self.shift = parts.group, parts.scale, parts.shift
        self.register_buffer("table", None if self.levels is None else self.levels.bytes)
        self.register_buffer("order_K", parts.order_K)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product as `Linear.forward` does."""
        shape = self.check(x, residual)
        if not self.is_native(x):
            return self.forward_torch(x, residual)
        out = x.new_empty(shape)
        self.write(x, residual, out, 0)
        return out

    @staticmethod
    def is_native(x: Tensor) -> bool:
        """Return True if the native kernel takes rows like x."""
        return is_cpu(x) and x.dtype in FLOATS and _CODES.native() is not None

    def write(self, x: Tensor, residual: Tensor | None, out: Tensor, column: int) -> None:
        """Write the product and `residual`, if given, to columns of a dense `out` from `column` on.

        The residual is as wide as `out`; its same columns are added. Native kernel only; the caller
        has checked that arguments fit and are of one type.
        """
        native = _CODES.native()
        assert native is not None
        _kept, inputs = input_arguments(x, self.in_features)
        _more, ends = output_arguments(residual, out, column)
        rows = x.numel() // self.in_features
        native(
            *inputs, *self.arguments(), *ends, None, 1, rows, self.out_features, self.in_features
        )

    def arguments(self) -> tuple[float | None, ...]:
        """Return the native kernel's arguments from weights to bias."""
        levels = self.levels
        offset = 128 if self.codes == "int8" else int(self.offset)
        if levels is not None:
            offset = levels.offset
        shift = (0, None, None) if self.shift is None else self.shift.arguments()
        numbers = (*self.scale.arguments(), *shift, self.scale.span)
        ends = (_address(self.order_K), self.group, _address(self.bias_N))
        unit = 1.0 if levels is None else levels.unit
        return (
            self.packed.data_ptr(),
            self._kind,
            _address(self.table),
            offset,
            unit,
            *numbers,
            *ends,
        )

    def round_input(self, x_MK: Tensor) -> Tensor:
        top = 8191 if self._kind == WIDE else 32767 if self.precise else 127
        x_MK = x_MK.float()
        if self.order_K is None:
            return round_trip(x_MK, GROUP, top)
        # Groups are of inputs that lie side by side among the codes.
        order_K = self.order_K.long()
        return in_input_order(round_trip(x_MK[:, order_K], GROUP, top), order_K)

    def weight(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the weights that are multiplied; those of `nf4` have rounded levels."""
        stop = self.out_features if stop is None else stop
        first, last = start // panels.PANEL, -(-stop // panels.PANEL)
        rows_M = torch.arange(start, stop)
        levels = None if self.levels is None else self.levels.rounded
        return self._weight(self.packed[first:last], rows_M, start - first * panels.PANEL, levels)

    def read(self, ids: Tensor) -> Tensor:
        """Return rows of the weights by index, float32 `[..., K]`: an embedding lookup in codes."""
        flat = ids.reshape(-1)
        one_each = panels.codes_of_rows(self.packed, flat)
        levels = None if self.levels is None else torch.tensor(self.levels.values)
        return self._weight(one_each, flat, 0, levels).view(*ids.shape, self.in_features)

    def _weight(self, packed: Tensor, rows_M: Tensor, first: int, levels: Tensor | None) -> Tensor:
        """Return the weights of outputs `rows_M`, whose codes are those from `first` on in `packed`."""
        unpack = _UNPACK.get(self.codes, panels.unpack_codes4)
        codes_MK = unpack(packed)[first : first + len(rows_M), : self.in_features]
        levels_MK = codes_MK.float()
        if levels is not None:
            levels_MK = levels[codes_MK.long()]
        shift_MG = None if self.shift is None else self.shift.of_rows(rows_M)
        weight_MK = dequantize(
            levels_MK, self.scale.of_rows(rows_M), shift_MG, self.group, self.offset
        )
        return in_input_order(weight_MK, self.order_K)

    def _addresses(self) -> tuple[int, int | None, int | None]:
        return 0, None, None  # unused: calls take them from the buffers


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
