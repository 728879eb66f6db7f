"""Convolutions over time as codec decoders and vocoders chain them: activation, convolution, residual in one launch.

SEANet (Tagliasacchi et al. 2020; Mimi: Défossez et al. 2024, arXiv:2410.00037) is causal: what a convolution reaches
back to is kept from chunk to chunk. HiFi-GAN (Kong et al. 2020) is not. Time is the second dimension and channels lie
side by side, so a transposed convolution is a plain one whose outputs are U steps each: nothing is interleaved.

Shapes: B streams, N steps, C input channels, O output channels, K taps, U steps made of one, M = N or what padding
makes of it, R remembered steps, S places for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import gpu
from .arguments import check_device, check_floats, check_integers
from .errors import KernelError

KINDS = ("none", "elu", "leaky_relu")


@dataclass(frozen=True, slots=True)
class Activation:
    """Of inputs below zero: `slope · (exp(x) - 1)` ("elu") or `slope · x` ("leaky_relu"). Others stay as they are."""

    kind: str = "none"
    slope: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise KernelError(f"kind: {self.kind!r} must be one of {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What convolutions that go on from an earlier chunk remember, in places `kept_SRC`, of x's type.

    `rows_2B`: int32, of each stream the place where the last R inputs lie (-1: there were none, they are zeros) and
    another one where they are put. A place is given to one stream alone; who has none (-1) is not remembered.
    """

    kept_SRC: Tensor
    rows_2B: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedConv:
    """A convolution as kernels take it.

    taps: `[K, C, U · O]`, oldest input first; of channels that are each on their own `[K, U · C]`. bias: `[U · O]`.
    left: zeros before the first step, where there is no context; more: steps that come out beyond those that go in.
    cut: steps that are left out of what came out, at the beginning and at the end.
    """

    taps: Tensor
    bias: Tensor | None
    channels: int
    stride: int
    dilation: int
    left: int
    more: int
    cut: tuple[int, int]

    @classmethod
    def of(cls, conv: nn.Conv1d | nn.ConvTranspose1d) -> PackedConv:
        """Raises `KernelError` for a plain convolution that leaves out steps and a transposed one with gaps."""
        _check_conv(conv)
        (width,), (stride,), (dilation,), (padding,) = conv.kernel_size, conv.stride, conv.dilation, _padding(conv)
        weight = conv.weight.detach()
        alone = conv.groups == conv.in_channels == conv.out_channels and conv.groups > 1
        weight = (
            weight[:, 0] if alone else _dense(weight, conv.groups)
        )  # `[C, K]`, or `[O, C, K]`, transposed the other way
        bias = None if conv.bias is None else conv.bias.detach().repeat(stride)
        if isinstance(conv, nn.Conv1d):
            taps = weight.permute(*reversed(range(weight.ndim)))
            return cls(
                taps.contiguous(),
                bias,
                conv.in_channels,
                1,
                dilation,
                padding,
                2 * padding - (width - 1) * dilation,
                (0, 0),
            )
        reach = -(-width // stride) - 1
        pieces = F.pad(weight, (0, (reach + 1) * stride - width)).unflatten(-1, (reach + 1, stride)).flip(-2)
        taps = pieces.permute(1, 2, 0) if alone else pieces.permute(2, 0, 3, 1)
        cut = padding, (reach + 1) * stride - width + padding
        return cls(taps.flatten(-2).contiguous(), bias, conv.in_channels, stride, 1, reach, reach, cut)

    @property
    def reach(self) -> int:
        """R: steps before the newest one that an output depends on."""
        return (len(self.taps) - 1) * self.dilation

    @property
    def alone(self) -> bool:
        """Whether each channel depends on itself only."""
        return self.taps.ndim == 2

    @property
    def outputs(self) -> int:
        """O."""
        return self.taps.shape[-1] // self.stride


def convolve(
    x_BNC: Tensor,
    conv: PackedConv,
    activation: Activation | None = None,
    *,
    residual_BMO: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """`conv(activation(x)) + bias + residual`, `[B, M, O]` in x's type, sums in float32.

    With a context a convolution is causal, goes on from what is remembered, gives U · N steps and remembers its last
    inputs. Without one it is padded with zeros as the module says. Taps and bias are of x's type. A residual has the
    shape of what comes out, and there is none for a transposed convolution. A place of a context that is not there is
    as none on a GPU. Raises `KernelError` on others.
    """
    _check(x_BNC, conv, context)
    steps = x_BNC.shape[1] + (0 if context is not None else conv.more)
    if steps < 0 or not x_BNC.shape[1]:
        raise KernelError(
            f"x_BNC: {x_BNC.shape[1]} steps are too few for {len(conv.taps)} taps, dilation {conv.dilation}"
        )
    if residual_BMO is not None:
        _check_residual(residual_BMO, x_BNC, (len(x_BNC), steps, conv.outputs), conv)
    activation = activation or Activation()
    if gpu.takes(x_BNC):
        from .gpu import codec_conv as kernels

        out_BMO = kernels.convolve(x_BNC, conv, activation, residual_BMO, context)
    else:
        out_BMO = convolve_torch(x_BNC, conv, activation, residual_BMO, context)
    made_BMO = out_BMO.view(len(x_BNC), steps * conv.stride, conv.outputs)
    if context is not None or conv.cut == (0, 0):
        return made_BMO
    return made_BMO[:, conv.cut[0] : max(conv.cut[0], made_BMO.shape[1] - conv.cut[1])]


def convolve_torch(
    x_BNC: Tensor, conv: PackedConv, activation: Activation, residual_BMO: Tensor | None, context: Context | None
) -> Tensor:
    """The twin: `[B, M, U · O]`, nothing cut."""
    kind = torch.promote_types(x_BNC.dtype, torch.float32)
    if context is None:
        joined_BNC = F.pad(x_BNC, (0, 0, conv.left, conv.more + conv.reach - conv.left))
    else:
        before_B, after_B = context.rows_2B.long()
        known_B11 = (before_B >= 0)[:, None, None]
        joined_BNC = torch.cat([torch.where(known_B11, context.kept_SRC[before_B], 0), x_BNC], dim=1)
        there_B = after_B >= 0
        context.kept_SRC[after_B[there_B]] = joined_BNC[there_B, joined_BNC.shape[1] - conv.reach :]
    active_BCN = _activated(joined_BNC.to(kind), activation).mT
    bias = None if conv.bias is None else conv.bias.to(kind)
    taps = conv.taps.to(kind)
    if conv.alone:  # output o is made of channel o % C
        spread = active_BCN.repeat(1, conv.stride, 1)
        out_BMO = F.conv1d(spread, taps.mT[:, None], bias, dilation=conv.dilation, groups=taps.shape[1]).mT
    else:
        out_BMO = F.conv1d(active_BCN, taps.permute(2, 1, 0), bias, dilation=conv.dilation).mT
    return (out_BMO if residual_BMO is None else out_BMO + residual_BMO).to(x_BNC.dtype).contiguous()


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation.kind == "elu":
        return F.elu(x, activation.slope)
    return F.leaky_relu(x, activation.slope) if activation.kind == "leaky_relu" else x


def _dense(weight_AXK: Tensor, groups: int) -> Tensor:
    """`[A, groups · X, K]`: what a group does not see is zero."""
    if groups == 1:
        return weight_AXK
    weight_GAXK = weight_AXK.unflatten(0, (groups, -1))
    blocks = [torch.block_diag(*weight_GAXK[..., tap]) for tap in range(weight_AXK.shape[-1])]
    return torch.stack(blocks, dim=-1)


def _padding(conv: nn.Conv1d | nn.ConvTranspose1d) -> tuple[int, ...]:
    if isinstance(conv.padding, str):
        raise KernelError(f"conv: padding {conv.padding!r} must be a number")
    return tuple(conv.padding)


def _check_conv(conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
    """KernelError for what is not computed here."""
    if isinstance(conv, nn.Conv1d):
        if conv.stride != (1,) or conv.padding_mode != "zeros":
            raise KernelError(f"conv: stride {conv.stride[0]}, padding {conv.padding_mode!r} must be 1 and 'zeros'")
    elif conv.dilation != (1,) or conv.output_padding != (0,):
        found = f"dilation {conv.dilation[0]}, output_padding {conv.output_padding[0]}"
        raise KernelError(f"conv: {found} of a transposed convolution must be 1 and 0")


def _check(x_BNC: Tensor, conv: PackedConv, context: Context | None) -> None:
    if x_BNC.dtype != torch.float64:  # which the tests' oracle is
        check_floats("x_BNC", x_BNC, 3)
    elif gpu.takes(x_BNC):
        raise KernelError("x_BNC: torch.float64 must be float32 or bfloat16, on a GPU also float16")
    if x_BNC.shape[-1] != conv.channels:
        raise KernelError(f"x_BNC: {x_BNC.shape[-1]} channels must be {conv.channels}, as conv's")
    for name, part in (("conv.taps", conv.taps), ("conv.bias", conv.bias)):
        if part is not None:
            _check_like(name, part, x_BNC)
    if context is None:
        return
    _check_like("kept_SRC", context.kept_SRC, x_BNC)
    if context.kept_SRC.shape[1:] != (conv.reach, conv.channels) or not context.kept_SRC[0].is_contiguous():
        found = f"{list(context.kept_SRC.shape)}, strides {list(context.kept_SRC.stride())},"
        raise KernelError(f"kept_SRC: {found} must be dense [S, {conv.reach}, {conv.channels}]")
    check_integers("rows_2B", context.rows_2B, 2, torch.int32)
    check_device("rows_2B", context.rows_2B, "x_BNC", x_BNC)
    if context.rows_2B.shape != (2, len(x_BNC)) or not context.rows_2B.is_contiguous():
        raise KernelError(f"rows_2B: {list(context.rows_2B.shape)} must be dense [2, {len(x_BNC)}]")


def _check_residual(residual_BMO: Tensor, x_BNC: Tensor, shape: tuple[int, int, int], conv: PackedConv) -> None:
    if conv.stride > 1 or conv.cut != (0, 0) or residual_BMO.shape != shape:
        wanted = "none for a transposed convolution" if conv.stride > 1 else f"{list(shape)}, as what comes out"
        raise KernelError(f"residual_BMO: {list(residual_BMO.shape)} must be {wanted}")
    _check_like("residual_BMO", residual_BMO, x_BNC)
    if residual_BMO.stride(-1) != 1 and residual_BMO.shape[-1] > 1:
        raise KernelError(f"residual_BMO: stride {residual_BMO.stride(-1)} of the last dimension must be 1")


def _check_like(name: str, part: Tensor, x_BNC: Tensor) -> None:
    if part.dtype != x_BNC.dtype:
        raise KernelError(f"{name}: {part.dtype} must be {x_BNC.dtype}, as x_BNC")
    check_device(name, part, "x_BNC", x_BNC)
