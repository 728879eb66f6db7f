"""Compute the 1-D convolutions of codec decoders and vocoders, fused with activation and residual.

SEANet (Tagliasacchi et al. 2020; Mimi: Défossez et al. 2024, arXiv:2410.00037) is causal: the
inputs that a convolution reaches back to are kept from chunk to chunk. HiFi-GAN (Kong et al. 2020)
is not causal. Activation, convolution and residual are one launch. Time is the second dimension and
channels are contiguous, so a transposed convolution is a plain one whose outputs are U steps each:
nothing is interleaved.

Shapes: B streams, N steps, C input channels, O output channels, K taps, U output steps per input
step, M = N plus the steps that padding adds or removes, R context steps, S context rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.audio.packed_conv import Activation, Context, PackedConv
from motet_kernels.runtime.arguments import check_device, check_floats, check_integers
from motet_kernels.runtime.errors import KernelError


def convolve(
    x_BNC: Tensor,
    conv: PackedConv,
    activation: Activation | None = None,
    *,
    residual_BMO: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """Return `conv(activation(x)) + bias + residual`, `[B, M, O]` in x's type, summed in float32.

    With a `context` the convolution is causal: it continues from the kept inputs, returns U · N
    steps and keeps its last inputs. Without one it is zero-padded as the torch module specifies.
    Taps and bias are of x's type. The residual has the shape of the output and is not allowed for a
    transposed convolution. On a GPU, a context row out of range counts as -1. Raises `KernelError`
    on arguments that do not fit.
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
        from motet_kernels.gpu.audio import codec_conv as kernels

        out_BMO = kernels.convolve(x_BNC, conv, activation, residual_BMO, context)
    else:
        out_BMO = convolve_torch(x_BNC, conv, activation, residual_BMO, context)
    made_BMO = out_BMO.view(len(x_BNC), steps * conv.stride, conv.outputs)
    if context is not None or conv.cut == (0, 0):
        return made_BMO
    return made_BMO[:, conv.cut[0] : max(conv.cut[0], made_BMO.shape[1] - conv.cut[1])]


def convolve_torch(
    x_BNC: Tensor,
    conv: PackedConv,
    activation: Activation,
    residual_BMO: Tensor | None,
    context: Context | None,
) -> Tensor:
    """Compute `convolve` in torch: its twin. Return `[B, M, U · O]`, nothing cut."""
    kind = torch.promote_types(x_BNC.dtype, torch.float32)
    if context is None:
        joined_BNC = F.pad(x_BNC, (0, 0, conv.left, conv.more + conv.reach - conv.left))
    else:
        before_B, after_B = context.rows_2B.long()
        known_B11 = (before_B >= 0)[:, None, None]
        joined_BNC = torch.cat(
            [torch.where(known_B11, context.kept_SRC[before_B], 0), x_BNC], dim=1
        )
        there_B = after_B >= 0
        context.kept_SRC[after_B[there_B]] = joined_BNC[there_B, joined_BNC.shape[1] - conv.reach :]
    active_BCN = _activated(joined_BNC.to(kind), activation).mT
    bias = None if conv.bias is None else conv.bias.to(kind)
    taps = conv.taps.to(kind)
    if conv.depthwise:  # output o depends on channel o % C
        spread = active_BCN.repeat(1, conv.stride, 1)
        out_BMO = F.conv1d(
            spread, taps.mT[:, None], bias, dilation=conv.dilation, groups=taps.shape[1]
        ).mT
    else:
        out_BMO = F.conv1d(active_BCN, taps.permute(2, 1, 0), bias, dilation=conv.dilation).mT
    return (
        (out_BMO if residual_BMO is None else out_BMO + residual_BMO).to(x_BNC.dtype).contiguous()
    )


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation.kind == "elu":
        return F.elu(x, activation.slope)
    return F.leaky_relu(x, activation.slope) if activation.kind == "leaky_relu" else x


def _check(x_BNC: Tensor, conv: PackedConv, context: Context | None) -> None:
    if x_BNC.dtype != torch.float64:  # the type of the tests' oracle
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
    if (
        context.kept_SRC.shape[1:] != (conv.reach, conv.channels)
        or not context.kept_SRC[0].is_contiguous()
    ):
        found = f"{list(context.kept_SRC.shape)}, strides {list(context.kept_SRC.stride())},"
        raise KernelError(f"kept_SRC: {found} must be dense [S, {conv.reach}, {conv.channels}]")
    check_integers("rows_2B", context.rows_2B, 2, torch.int32)
    check_device("rows_2B", context.rows_2B, "x_BNC", x_BNC)
    if context.rows_2B.shape != (2, len(x_BNC)) or not context.rows_2B.is_contiguous():
        raise KernelError(f"rows_2B: {list(context.rows_2B.shape)} must be dense [2, {len(x_BNC)}]")


def _check_residual(
    residual_BMO: Tensor, x_BNC: Tensor, shape: tuple[int, int, int], conv: PackedConv
) -> None:
    if conv.stride > 1 or conv.cut != (0, 0) or residual_BMO.shape != shape:
        wanted = (
            "none for a transposed convolution"
            if conv.stride > 1
            else f"{list(shape)}, as what comes out"
        )
        raise KernelError(f"residual_BMO: {list(residual_BMO.shape)} must be {wanted}")
    _check_like("residual_BMO", residual_BMO, x_BNC)
    if residual_BMO.stride(-1) != 1 and residual_BMO.shape[-1] > 1:
        raise KernelError(
            f"residual_BMO: stride {residual_BMO.stride(-1)} of the last dimension must be 1"
        )


def _check_like(name: str, part: Tensor, x_BNC: Tensor) -> None:
    if part.dtype != x_BNC.dtype:
        raise KernelError(f"{name}: {part.dtype} must be {x_BNC.dtype}, as x_BNC")
    check_device(name, part, "x_BNC", x_BNC)
