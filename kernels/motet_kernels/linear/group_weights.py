"""Hold weights of 4 or 8 bits in groups of inputs, as checkpoints store them.

    weight[n, k] = scale[n, g] · (code[n, k] - offset) + shift[n, g],  g = k // group

Shapes: N output features, K input features, G groups of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motet_kernels.runtime.errors import KernelError

BLOCK = 32
FLOAT8 = torch.float8_e4m3fn
_FORMATS = {torch.uint8: "int4", torch.int8: "int8", FLOAT8: "float8"}


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """Hold a matrix in codes, scales float32 `[N, G]`, and shifts of the same shape or None.

    `order_K`: column j of the codes is input `order_K[j]`. A group is of a multiple of 16 inputs,
        of 32 for int4; the last one may be shorter.
    Raises `KernelError` on parts that do not fit each other, and on values that are not finite.
    """

    codes_NK: Tensor
    scale_NG: Tensor
    shift_NG: Tensor | None
    group: int
    order_K: Tensor | None = None

    def __post_init__(self) -> None:
        if (
            self.codes_NK.dtype not in _FORMATS
            or self.codes_NK.dim() != 2
            or 0 in self.codes_NK.shape
        ):
            what = f"{self.codes_NK.dtype} {list(self.codes_NK.shape)}"
            raise KernelError(f"codes_NK: {what} must be [N, K] of uint8, int8 or float8_e4m3fn")
        multiple = BLOCK if self.format == "int4" else BLOCK // 2
        if self.group < 1 or self.group % multiple:
            raise KernelError(
                f"group: {self.group} must be a multiple of {multiple} for {self.format}"
            )
        features, inputs = self.codes_NK.shape
        wanted = (features, -(-inputs // self.group))
        for name, part in (("scale_NG", self.scale_NG), ("shift_NG", self.shift_NG)):
            if part is None:
                continue
            if part.dtype != torch.float32 or part.shape != wanted:
                raise KernelError(
                    f"{name}: {part.dtype} {list(part.shape)} must be float32 {list(wanted)}"
                )
            if not bool(part.isfinite().all()):
                raise KernelError(f"{name}: must be finite; repair the checkpoint")
        if self.format == "float8" and not bool(self.codes_NK.float().isfinite().all()):
            raise KernelError("codes_NK: must be finite; repair the checkpoint")
        if self.order_K is not None and not torch.equal(
            self.order_K.sort().values, torch.arange(inputs)
        ):
            raise KernelError(f"order_K: must be each of the {inputs} inputs once")

    @property
    def format(self) -> str:
        """Return the name of the codes' format."""
        return _FORMATS[self.codes_NK.dtype]

    @property
    def offset(self) -> float:
        """Return the number that is subtracted from each code."""
        return 8.0 if self.format == "int4" and self.shift_NG is None else 0.0

    def dense(self) -> Tensor:
        """Return the weights in float32 `[N, K]`, inputs in their original order."""
        weight_NK = dequantize(
            self.codes_NK.float(), self.scale_NG, self.shift_NG, self.group, self.offset
        )
        return in_input_order(weight_NK, self.order_K)

    def permuted(self, rows_N: Tensor) -> GroupWeights:
        """Return the weights with output features in another order."""
        shift_NG = None if self.shift_NG is None else self.shift_NG[rows_N]
        return replace(
            self, codes_NK=self.codes_NK[rows_N], scale_NG=self.scale_NG[rows_N], shift_NG=shift_NG
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
        kinds = [
            (p.format, p.group, p.shift_NG is None, p.codes_NK.shape[1]) for p in (part, first)
        ]
        return same_order and kinds[0] == kinds[1]

    return all(map(alike, parts))


def joined(parts: Sequence[GroupWeights]) -> GroupWeights:
    """Return one matrix with the rows of all parts, for which `can_join` holds."""
    shifts = [part.shift_NG for part in parts if part.shift_NG is not None]
    return replace(
        parts[0],
        codes_NK=_cat([part.codes_NK for part in parts]),
        scale_NG=torch.cat([part.scale_NG for part in parts]),
        shift_NG=torch.cat(shifts) if shifts else None,
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
