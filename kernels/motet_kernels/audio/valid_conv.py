"""Compute 1-D convolutions over steps with dense channels on a CPU, in less than half the products.

Toom-Cook's algorithm (Winograd 1980; for networks Lavin and Gray 2016): four outputs and four taps
take 7 products instead of 16. Nothing is padded: an output needs all of its inputs, so that a
sequence can be convolved in pieces that overlap. The results differ from a plain convolution's by
a few roundings of float32.

Shapes: N steps, C input channels, O output channels, K taps, M = N - dilation · (K - 1) outputs,
G groups of taps, P points, T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels.runtime.arguments import check_floats
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

_CONV = Kernel("motet_conv", "pppppp" + "iiiiiiii" + "f")

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
            points = torch.einsum("pk,gkco->pgco", _powers(TILE, scaled=True), padded.unflatten(0, (-1, TILE)))
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


def convolve_valid(
    x_NC: Tensor, conv: ValidConv, slope: float = 1.0, residual_MO: Tensor | None = None
) -> Tensor:
    """Return `conv(leaky_relu(x, slope)) + bias + residual`, `[M, O]`, on the CPU.

    Raises `KernelError` on arguments that do not fit or are not dense float32, and where x has no
    more steps than the convolution's reach.
    """
    steps = _checked(x_NC, conv, residual_MO)
    native = _CONV.native()
    if native is None:
        return convolve_valid_torch(x_NC, conv, slope, residual_MO)
    out_MO = torch.empty(steps, conv.outputs)
    tiles, rows = _tiles(steps, conv)
    scratch = torch.empty(len(conv.weights) * rows * conv.channels)
    native(
        x_NC.data_ptr(), conv.weights.data_ptr(),
        0 if conv.bias is None else conv.bias.data_ptr(),
        0 if residual_MO is None else residual_MO.data_ptr(),
        out_MO.data_ptr(), scratch.data_ptr(), len(x_NC), steps, conv.channels, conv.outputs,
        conv._groups, conv.dilation, tiles, len(conv.weights), slope,
    )  # fmt: skip
    return out_MO


def convolve_valid_torch(
    x_NC: Tensor, conv: ValidConv, slope: float = 1.0, residual_MO: Tensor | None = None
) -> Tensor:
    """Compute `convolve_valid` in torch: its twin."""
    steps = len(x_NC) - conv.reach
    tiles, rows = _tiles(steps, conv)
    outputs, points = (TILE, len(_INPUT)) if conv._transformed else (1, 1)
    row_R = torch.arange(rows)
    first_R = row_R // conv.dilation * outputs * conv.dilation + row_R % conv.dilation
    at_RP = first_R[:, None] + torch.arange(points) * conv.dilation
    active_NC = F.leaky_relu(x_NC, slope)
    inputs_RPC = torch.where((at_RP < len(x_NC))[..., None], active_NC[at_RP.clamp(max=len(x_NC) - 1)], 0)
    if conv._transformed:
        inputs_RPC = torch.einsum("pj,rjc->rpc", torch.tensor(_INPUT), inputs_RPC)
    depth = [
        inputs_RPC[group * conv.dilation :][:tiles] for group in range(conv._groups)
    ]
    made_PTO = torch.cat(depth, dim=-1).transpose(0, 1) @ conv.weights.transpose(1, 2).flatten(2)
    made_PTO = made_PTO[..., : conv.outputs]
    if conv._transformed:
        made_PTO = torch.einsum("pi,pto->ito", _powers(TILE).float(), made_PTO)
    out_MO = torch.empty(steps, conv.outputs)
    for index, made_TO in enumerate(made_PTO):
        step_T = first_R[:tiles] + index * conv.dilation
        out_MO[step_T[step_T < steps]] = made_TO[step_T < steps]
    for part in (conv.bias, residual_MO):
        out_MO = out_MO if part is None else out_MO + part
    return out_MO


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


def _checked(x_NC: Tensor, conv: ValidConv, residual_MO: Tensor | None) -> int:
    """Return the number of output steps."""
    steps = len(x_NC) - conv.reach
    for name, part, shape in (
        ("x_NC", x_NC, (len(x_NC), conv.channels)),
        ("residual_MO", residual_MO, (steps, conv.outputs)),
    ):
        if part is None:
            continue
        check_floats(name, part, 2)
        if part.dtype != torch.float32 or part.device.type != "cpu" or not part.is_contiguous() or part.shape != shape:
            raise KernelError(
                f"{name}: {part.dtype} {list(part.shape)} on {part.device} must be dense float32 {list(shape)} on the CPU"
            )
    if steps < 1:
        raise KernelError(f"x_NC: {len(x_NC)} steps must be more than the reach {conv.reach}")
    return steps
