"""Compute 1-D convolutions over steps with dense channels on a CPU, in less than half the products.

Toom-Cook's algorithm (Winograd 1980; for networks Lavin and Gray 2016): four outputs and four taps
take 7 products instead of 16. Nothing is padded: an output needs all of its inputs, so that a
sequence can be convolved in pieces that overlap. The results differ from a plain convolution's by
a few roundings of float32.

Shapes: N steps, C input channels, O output channels, K taps, B earlier steps, A later ones,
M = B + N + A - dilation · (K - 1) outputs, G groups of taps, P points, T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels.runtime.arguments import check_floats, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

_CONV = Kernel("motet_conv", "pipi" + "pp" + "pipi" + "pp" + "iiiiiii" + "f")

TILE = 4  # outputs of a tile, and taps of a group
_PANEL = 32
_ROOTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5)  # the seventh point is infinity
# The inverse of the points' Vandermonde matrix, transposed; rows are scaled by _SCALES. As in csrc/conv.cpp.
_INPUT = (
    (-2, 4, 2.5, -5, -0.5, 1, 0),
    (0, 2, -2, -4.5, 0.5, 1, 0),
    (0, -2, 6, -3.5, -1.5, 1, 0),
    (0, 0.5, -0.75, -1, 0.75, 0.5, 0),
    (0, -0.5, 1.25, 0, -1.25, 0.5, 0),
    (0, 4, 0, -5, 0, 1, 0),
    (0, -2, 4, 2.5, -5, -0.5, 1),
)
_SCALES = (-2, -3, 9, 18, -30, 45 / 32, 1)


@dataclass(frozen=True, slots=True, eq=False)
class ValidConv:
    """Hold a convolution's transformed weights.

    weights: `[P, ceil(O / 32), G · C, 32]`, float32; P is 1 where nothing is transformed.
    bias: `[O]`.
    """

    weights: Tensor
    bias: Tensor | None
    channels: int
    outputs: int
    taps: int
    dilation: int

    @classmethod
    def of(cls, taps_KCO: Tensor, bias_O: Tensor | None, dilation: int = 1) -> ValidConv:
        """Transform the taps, oldest input first, in float64. One or two are left as they are."""
        taps, channels, outputs = taps_KCO.shape
        points = taps_KCO.double()[None]
        if taps > 2:
            padded = F.pad(points[0], (0, 0, 0, 0, 0, -taps % TILE))
            points = torch.einsum(
                "pk,gkco->pgco", _powers(TILE, scaled=True), padded.unflatten(0, (-1, TILE))
            )
        rows = F.pad(points.flatten(1, 2), (0, -outputs % _PANEL))
        weights = rows.unflatten(-1, (-1, _PANEL)).transpose(1, 2).float().contiguous()
        bias = None if bias_O is None else bias_O.float().contiguous()
        return cls(weights, bias, channels, outputs, taps, dilation)

    @property
    def reach(self) -> int:
        """Return how many inputs before its newest one an output depends on."""
        return (self.taps - 1) * self.dilation

    @property
    def _transformed(self) -> bool:
        return len(self.weights) > 1

    @property
    def _groups(self) -> int:
        return self.weights.shape[2] // self.channels


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Hold steps in pieces that are not joined: `before`, then `new`, then zeros.

    before: `[B, C]`, or so many zeros.
    new: `[N, C]`.
    after: A, a number of zeros.
    """

    before: Tensor | int
    new: Tensor
    after: int = 0

    def __len__(self) -> int:
        before = self.before if isinstance(self.before, int) else len(self.before)
        return before + len(self.new) + self.after

    def joined(self) -> Tensor:
        """Return the steps as one tensor."""
        zeros = self.new.new_zeros(self.after, self.new.shape[1])
        before = self.before
        if isinstance(before, int):
            before = self.new.new_zeros(before, self.new.shape[1])
        return torch.cat([before, self.new, zeros])

    def tail(self, first: int) -> Tensor:
        """Return a copy of the steps from `first` on."""
        before = self.before if isinstance(self.before, int) else len(self.before)
        kept = self.joined()[first:] if self.after or first < before else self.new[first - before :]
        return kept.clone()


def convolve_valid(
    x: Steps, conv: ValidConv, slope: float = 1.0, residual: Steps | None = None
) -> Tensor:
    """Return `conv(leaky_relu(x, slope)) + bias + residual`, `[M, O]`, on the CPU.

    The residual has M steps or more. Raises `KernelError` on arguments that do not fit or are not
    dense float32, and where x has no more steps than the convolution's reach.
    """
    steps = _checked(x, conv, residual)
    native = _CONV.native()
    if native is None:
        return convolve_valid_torch(x, conv, slope, residual)
    out_MO = torch.empty(steps, conv.outputs)
    tiles, rows = _tiles(steps, conv)
    scratch = torch.empty(len(conv.weights) * rows * conv.channels)
    native(
        *_pointers(x), conv.weights.data_ptr(), 0 if conv.bias is None else conv.bias.data_ptr(),
        *((0, 0, 0, 0) if residual is None else _pointers(residual)),
        out_MO.data_ptr(), scratch.data_ptr(), steps, conv.channels, conv.outputs, conv._groups,
        conv.dilation, tiles, len(conv.weights), slope,
    )  # fmt: skip
    return out_MO


def convolve_valid_torch(
    x: Steps, conv: ValidConv, slope: float = 1.0, residual: Steps | None = None
) -> Tensor:
    """Compute `convolve_valid` in torch: its twin."""
    active_NC = F.leaky_relu(x.joined(), slope)
    steps = len(active_NC) - conv.reach
    tiles, rows = _tiles(steps, conv)
    outputs, points = (TILE, len(_INPUT)) if conv._transformed else (1, 1)
    row_R = torch.arange(rows)
    first_R = row_R // conv.dilation * outputs * conv.dilation + row_R % conv.dilation
    at_RP = first_R[:, None] + torch.arange(points) * conv.dilation
    known_RP1 = (at_RP < len(active_NC))[..., None]
    inputs_RPC = torch.where(known_RP1, active_NC[at_RP.clamp(max=len(active_NC) - 1)], 0)
    if conv._transformed:
        inputs_RPC = torch.einsum("pj,rjc->rpc", torch.tensor(_INPUT), inputs_RPC)
    depth = [inputs_RPC[group * conv.dilation :][:tiles] for group in range(conv._groups)]
    weights = conv.weights.transpose(1, 2).flatten(2)
    made_PTO = (torch.cat(depth, dim=-1).transpose(0, 1) @ weights)[..., : conv.outputs]
    if conv._transformed:
        made_PTO = torch.einsum("pi,pto->ito", _powers(TILE).float(), made_PTO)
    out_MO = torch.empty(steps, conv.outputs)
    for index, made_TO in enumerate(made_PTO):
        step_T = first_R[:tiles] + index * conv.dilation
        out_MO[step_T[step_T < steps]] = made_TO[step_T < steps]
    out_MO = out_MO if conv.bias is None else out_MO + conv.bias
    return out_MO if residual is None else out_MO + residual.joined()[:steps]


def _powers(count: int, *, scaled: bool = False) -> Tensor:
    """Return the powers 0 … count - 1 of all points, `[P, count]`, by _SCALES if wanted."""
    rows = [[root**power for power in range(count)] for root in _ROOTS]
    powers = torch.tensor([*rows, [0.0] * (count - 1) + [1.0]], dtype=torch.float64)
    return powers / torch.tensor(_SCALES, dtype=torch.float64)[:, None] if scaled else powers


def _tiles(steps: int, conv: ValidConv) -> tuple[int, int]:
    """Return the number of tiles that begin before `steps`, and of rows of transformed inputs."""
    size = (TILE if conv._transformed else 1) * conv.dilation
    tiles = steps // size * conv.dilation + min(conv.dilation, steps % size)
    return tiles, tiles + (conv._groups - 1) * conv.dilation


def _pointers(steps: Steps) -> tuple[int, int, int, int]:
    """Return address and length of both pieces; the address of zeros is 0."""
    before = (
        (0, steps.before)
        if isinstance(steps.before, int)
        else (steps.before.data_ptr(), len(steps.before))
    )
    return *before, steps.new.data_ptr(), len(steps.new)


def _checked(x: Steps, conv: ValidConv, residual: Steps | None) -> int:
    """Return the number of output steps."""
    steps = len(x) - conv.reach
    if steps < 1:
        raise KernelError(f"x: {len(x)} steps must be more than the reach {conv.reach}")
    if residual is not None and len(residual) < steps:
        raise KernelError(
            f"residual: {len(residual)} steps must be at least {steps}, as the outputs"
        )
    for name, part, width in (("x", x, conv.channels), ("residual", residual, conv.outputs)):
        for piece in () if part is None else (part.before, part.new):
            if not isinstance(piece, int):
                _check_piece(name, piece, width)
    return steps


def _check_piece(name: str, piece: Tensor, width: int) -> None:
    check_floats(name, piece, 2)
    dense = is_cpu(piece) and piece.is_contiguous() and piece.shape[1] == width
    if not dense or piece.dtype != torch.float32:
        found = f"{piece.dtype} {list(piece.shape)} on {piece.device}"
        raise KernelError(f"{name}: {found} must be dense float32 [steps, {width}] on the CPU")
