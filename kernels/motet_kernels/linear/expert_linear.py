"""Multiply each row by the matrix of its expert, of many in codes of 4 or 8 bits, on a GPU.

All matrices have the same size, format and groups, and lie behind each other. Rows are sorted by
expert once for both products of a layer, on their device, so that the host does not wait for it.

Shapes: T tokens, k experts of each, R = T · k rows, E experts, N output features, K input features,
G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels import gpu
from motet_kernels.linear.group_weights import GroupWeights, dequantize, quantize_float8
from motet_kernels.linear.grouped_linear import pack_rows, unpack_rows
from motet_kernels.linear.levels import LEVELS
from motet_kernels.linear.quantization import GROUP, quantize_channels, quantize_groups
from motet_kernels.linear.scales import dense, narrowed
from motet_kernels.runtime.errors import KernelError

FORMATS = ("int8", "int4", "float8")
_FEW, _MANY = 16, 64  # rows of a tile


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Say which rows are whose: R rows in the order of their experts.

    order_R: place of a row among the routes `[T · k]`. expert_R: its expert; E for none. tiles_X3:
    expert, first row and number of rows, int32; 0 rows: not used. tile: most rows of one.
    """

    order_R: Tensor
    expert_R: Tensor
    tiles_X3: Tensor
    tile: int

    @classmethod
    def of(cls, index_Tk: Tensor, experts: int) -> ExpertRows:
        """Sort the routes of tokens; an index that is no expert's has no tile."""
        flat_R = index_Tk.reshape(-1)
        flat_R = torch.where((flat_R >= 0) & (flat_R < experts), flat_R, experts)
        expert_R, order_R = flat_R.sort(stable=True)
        tile = _FEW if len(flat_R) <= _FEW * experts else _MANY
        ones_R = torch.ones_like(expert_R)
        counts_E = ones_R.new_zeros(experts + 1).scatter_add_(0, expert_R, ones_R)[:experts]
        starts_E, tiles_E = counts_E.cumsum(0) - counts_E, (counts_E + tile - 1) // tile
        ends_E = tiles_E.cumsum(0)
        number_X = torch.arange(len(flat_R) // tile + experts, device=flat_R.device)
        expert_X = torch.searchsorted(ends_E, number_X, right=True)
        is_used_X = expert_X < experts
        expert_X = expert_X.clamp(max=experts - 1)
        within_X = (number_X - (ends_E - tiles_E)[expert_X]) * tile
        count_X = (counts_E[expert_X] - within_X).clamp(max=tile) * is_used_X
        tiles_X3 = torch.stack((expert_X, starts_E[expert_X] + within_X, count_X), dim=1)
        return cls(order_R, expert_R, tiles_X3.to(torch.int32), tile)


class ExpertLinear(nn.Module):
    """Compute `y = x · W[e]ᵀ + b[e]` for rows in the order of `ExpertRows`.

    Raises KernelError for matrices of different sizes, formats or groups.
    """

    packed: Tensor
    scale_ENG: Tensor
    shift_ENG: Tensor | None
    bias_EN: Tensor | None
    levels: Tensor | None
    order_EK: Tensor | None

    def __init__(
        self, weights: Sequence[GroupWeights], bias_EN: Tensor | None, device: torch.device
    ):
        super().__init__()
        first = weights[0]
        if len({_kind(one) for one in weights}) > 1:
            raise KernelError("weights: must be of one size and format for all experts")
        self.out_features, self.in_features = first.codes_NK.shape
        self.experts, self.codes, self.offset = len(weights), first.format, first.offset
        self.nibbles = first.codes_NK.dtype == torch.uint8
        packed = torch.stack([pack_rows(w.codes_NK) for w in weights])
        self.group = min(first.group, packed.shape[2] * (2 if self.nibbles else 1))
        self.register_buffer("packed", packed.to(device))
        self.register_buffer("scale_ENG", _stack([dense(w.scale_NG) for w in weights], device))
        shifts = [dense(w.shift_NG) for w in weights if w.shift_NG is not None]
        self.register_buffer("shift_ENG", _stack(shifts, device) if shifts else None)
        orders = [w.order_K for w in weights if w.order_K is not None]
        self.register_buffer("order_EK", torch.stack(orders).to(device) if orders else None)
        levels = LEVELS.get(first.format)
        self.register_buffer("levels", None if levels is None else levels.tensor.to(device))
        bias_EN = None if bias_EN is None else bias_EN.detach().to(device, torch.float32, copy=True)
        self.register_buffer("bias_EN", bias_EN)

    @classmethod
    def quantized(
        cls, weight_ENK: Tensor, bias_EN: Tensor | None, form: str, device: torch.device
    ) -> ExpertLinear:
        """Return matrices of floats in a format of FORMATS.

        They represent what `pack_linear` makes of each; rows are taken in as they are. Raises
        KernelError on another format, and on weights that are not finite.
        """
        if form not in FORMATS:
            raise KernelError(f"form: {form!r} must be one of {', '.join(FORMATS)}")
        return cls(
            [_quantized(weight_NK.detach(), form) for weight_NK in weight_ENK], bias_EN, device
        )

    def forward(self, x_RK: Tensor, rows: ExpertRows) -> Tensor:
        """Return `[R, N]` in the type of x; rows of no expert are zero."""
        if x_RK.dim() != 2 or x_RK.shape != (len(rows.expert_R), self.in_features):
            raise KernelError(
                f"x_RK: shape {list(x_RK.shape)} must be {[len(rows.expert_R), self.in_features]}"
            )
        if self.order_EK is not None:
            expert_R = rows.expert_R.clamp(max=self.experts - 1)
            x_RK = x_RK.gather(1, self.order_EK[expert_R])
        if not gpu.takes(x_RK):
            return self._multiply(x_RK, rows)
        from motet_kernels.gpu.linear.expert_linear import expert_linear

        return expert_linear(x_RK.contiguous(), rows.tiles_X3, rows.tile, self)

    def forward_torch(self, x_RK: Tensor, rows: ExpertRows) -> Tensor:
        """Compute `forward` in torch, one expert after the other: its twin."""
        if self.order_EK is not None:
            x_RK = x_RK.gather(1, self.order_EK[rows.expert_R.clamp(max=self.experts - 1)])
        return self._multiply(x_RK, rows)

    def _multiply(self, x_RK: Tensor, rows: ExpertRows) -> Tensor:
        out_RN = x_RK.new_zeros(len(x_RK), self.out_features)
        for expert in rows.expert_R.unique().tolist():
            if expert < self.experts:
                is_own_R = rows.expert_R == expert
                bias_N = None if self.bias_EN is None else self.bias_EN[expert]
                product = F.linear(x_RK[is_own_R].float(), self._codes_of(expert), bias_N)
                out_RN[is_own_R] = product.to(x_RK.dtype)
        return out_RN

    def _codes_of(self, expert: int) -> Tensor:
        """Return the weights of an expert, float32 `[N, K]`, inputs in the order of the codes."""
        codes_NK = unpack_rows(self.packed[expert], self.codes, self.nibbles)
        codes_NK = codes_NK[:, : self.in_features]
        if self.levels is not None:
            codes_NK = self.levels[codes_NK.long()]
        shift_NG = None if self.shift_ENG is None else self.shift_ENG[expert].float()
        scale_NG = self.scale_ENG[expert].float()
        return dequantize(codes_NK.float(), scale_NG, shift_NG, self.group, self.offset)

    @property
    def nbytes(self) -> int:
        """Return the memory of weights, scales and biases in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers())


def _kind(weights: GroupWeights) -> tuple[object, ...]:
    """Return what the matrices of all experts must have in common."""
    parts = (weights.shift_NG is None, weights.order_K is None)
    return weights.format, weights.group, weights.codes_NK.shape, *parts


def _quantized(weight_NK: Tensor, form: str) -> GroupWeights:
    if form == "float8":
        return quantize_float8(weight_NK)
    inputs = weight_NK.shape[1]
    if form == "int4":
        q_NK, scale_NG = quantize_groups(weight_NK)
        codes_NK = (q_NK[:, :inputs] + 8).to(torch.uint8)
        return GroupWeights(codes_NK, scale_NG.float(), None, GROUP)
    q_NK, scale_N = quantize_channels(weight_NK)
    return GroupWeights(q_NK, scale_N.unsqueeze(1), None, -(-inputs // GROUP) * GROUP)


def _stack(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return numbers of all experts, in 16 bits where that is exact."""
    return narrowed(torch.stack(list(parts))).to(device)
