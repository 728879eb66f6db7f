"""Hold weights of 2, 4 or 8 bits in groups of inputs, as checkpoints store them.

    weight[n, k] = scale[n, g] · (level(code[n, k]) - offset) + shift[n, g],  g = k // group

The level of a code is the code itself, or what a table says (`levels.py`).

Shapes: N output features, K input features, G groups of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motet_kernels.linear import scales
from motet_kernels.linear.levels import LEVELS
from motet_kernels.linear.scales import Scales
from motet_kernels.runtime.errors import KernelError

BLOCK = 32
FLOAT8 = torch.float8_e4m3fn
_FORMATS = {torch.uint8: "int4", torch.int8: "int8", FLOAT8: "float8"}


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """Hold a matrix in codes, scales `[N, G]`, and shifts of the same shape or None.

    `order_K`: column j of the codes is input `order_K[j]`. `levels`: the name of a table for codes
        of 4 bits. `narrow`: codes of uint8 are from 0 to 3, and take 2 bits on a CPU. A group is of
        a multiple of 16 inputs, of 32 for most tables; the last one may be shorter.
    Raises `KernelError` on parts that do not fit each other, and on values that are not finite.
    """

    codes_NK: Tensor
    scale_NG: Scales
    shift_NG: Scales | None
    group: int
    order_K: Tensor | None = None
    levels: str | None = None
    narrow: bool = False

    def __post_init__(self) -> None:
        codes_NK = self.codes_NK
        if codes_NK.dtype not in _FORMATS or codes_NK.dim() != 2 or 0 in codes_NK.shape:
            what = f"{codes_NK.dtype} {list(codes_NK.shape)}"
            raise KernelError(f"codes_NK: {what} must be [N, K] of uint8, int8 or float8_e4m3fn")
        if self.levels is not None and (self.levels not in LEVELS or codes_NK.dtype != torch.uint8):
            known = ", ".join(LEVELS)
            raise KernelError(f"levels: {self.levels!r} must be of {known}, for codes of uint8")
        if self.narrow and (self.format != "int4" or int(codes_NK.max()) > 3):
            raise KernelError("narrow: is for codes of uint8 up to 3, without a table")
        multiple = BLOCK if self.levels not in (None, "fp4") else BLOCK // 2
        if self.group < 1 or self.group % multiple:
            raise KernelError(
                f"group: {self.group} must be a multiple of {multiple} for {self.format}"
            )
        self._check_scales()
        if self.format == "float8" and self.shift_NG is not None:
            raise KernelError("shift_NG: float8 has none")
        if self.format == "float8" and not bool(codes_NK.float().isfinite().all()):
            raise KernelError("codes_NK: must be finite; repair the checkpoint")
        inputs = codes_NK.shape[1]
        if self.order_K is not None and not torch.equal(
            self.order_K.sort().values, torch.arange(inputs)
        ):
            raise KernelError(f"order_K: must be each of the {inputs} inputs once")

    def _check_scales(self) -> None:
        features, inputs = self.codes_NK.shape
        wanted = (features, -(-inputs // self.group))
        for name, part in (("scale_NG", self.scale_NG), ("shift_NG", self.shift_NG)):
            if part is None:
                continue
            kind = part.dtype if isinstance(part, Tensor) else torch.float32
            if tuple(part.shape) != wanted or kind != torch.float32:
                raise KernelError(
                    f"{name}: {kind} {list(part.shape)} must be float32 {list(wanted)}"
                )
            if not bool(scales.dense(part).isfinite().all()):
                raise KernelError(f"{name}: must be finite; repair the checkpoint")

    @property
    def format(self) -> str:
        """Return the name of the codes' format."""
        return self.levels or _FORMATS[self.codes_NK.dtype]

    @property
    def offset(self) -> float:
        """Return what is subtracted from each level: 8 from 4-bit codes without table and shift."""
        return 8.0 if self.format == "int4" and self.shift_NG is None else 0.0

    def dense(self) -> Tensor:
        """Return the weights in float32 `[N, K]`, inputs in their original order."""
        levels_NK = self.codes_NK.float()
        if self.levels is not None:
            levels_NK = LEVELS[self.levels].tensor[self.codes_NK.long()]
        shift_NG = None if self.shift_NG is None else scales.dense(self.shift_NG)
        weight_NK = dequantize(
            levels_NK, scales.dense(self.scale_NG), shift_NG, self.group, self.offset
        )
        return in_input_order(weight_NK, self.order_K)

    def permuted(self, rows_N: Tensor) -> GroupWeights:
        """Return the weights with output features in another order, or some of them."""
        return replace(
            self,
            codes_NK=self.codes_NK.view(torch.uint8)[rows_N].view(self.codes_NK.dtype),
            scale_NG=scales.rows(self.scale_NG, rows_N),
            shift_NG=None if self.shift_NG is None else scales.rows(self.shift_NG, rows_N),
        )


def can_join(parts: Sequence[GroupWeights]) -> bool:
    """Return True if products of one input with these weights can be computed as one.

    They must have the same format, group size and input order.
    """
    first = parts[0]

    def alike(part: GroupWeights) -> bool:
        if part.order_K is None or first.order_K is None:
            same_order = part.order_K is first.order_K
        else:
            same_order = torch.equal(part.order_K, first.order_K)
        kinds = [(p.format, p.narrow, p.group, p.codes_NK.shape[1]) for p in (part, first)]
        same_scales = scales.alike(part.scale_NG, first.scale_NG)
        same_shifts = scales.alike(part.shift_NG, first.shift_NG)
        return same_order and same_scales and same_shifts and kinds[0] == kinds[1]

    return all(map(alike, parts))


def joined(parts: Sequence[GroupWeights]) -> GroupWeights:
    """Return one matrix with the rows of all parts, for which `can_join` holds."""
    shifts = [part.shift_NG for part in parts if part.shift_NG is not None]
    return replace(
        parts[0],
        codes_NK=_cat([part.codes_NK for part in parts]),
        scale_NG=scales.stacked([part.scale_NG for part in parts]),
        shift_NG=scales.stacked(shifts) if shifts else None,
    )


def quantize_float8(weight_NK: Tensor) -> GroupWeights:
    """Return float8 codes with a scale per output, whose largest code is 448.

    Raises `KernelError` on values that are not finite.
    """
    wide_NK = weight_NK.detach().float()
    if not bool(wide_NK.isfinite().all()):
        raise KernelError("weight_NK: must be finite; repair the checkpoint")
    scale_N1 = (wide_NK.abs().amax(1, keepdim=True) / 448).clamp(min=1.2e-38)
    return GroupWeights(
        (wide_NK / scale_N1).to(FLOAT8), scale_N1, None, -(-wide_NK.shape[1] // BLOCK) * BLOCK
    )


def dequantize(
    codes_NK: Tensor, scale_NG: Tensor, shift_NG: Tensor | None, group: int, offset: float
) -> Tensor:
    """Return the float32 weights that codes represent."""
    inputs = codes_NK.shape[1]
    weight_NK = scale_NG.repeat_interleave(group, 1)[:, :inputs] * (codes_NK - offset)
    return (
        weight_NK
        if shift_NG is None
        else weight_NK + shift_NG.repeat_interleave(group, 1)[:, :inputs]
    )


def in_input_order(weight_NK: Tensor, order_K: Tensor | None) -> Tensor:
    return (
        weight_NK
        if order_K is None
        else torch.empty_like(weight_NK).index_copy_(1, order_K.long(), weight_NK)
    )


def _cat(codes: Sequence[Tensor]) -> Tensor:
    """Concatenate codes as bytes: torch does not concatenate float8."""
    return torch.cat([part.view(torch.uint8) for part in codes]).view(codes[0].dtype)
