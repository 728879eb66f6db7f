"""Pack the 1-D convolutions of `codec_conv.py`: weights, activation, and context of earlier chunks.

Shapes: as in `codec_conv.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.runtime.errors import KernelError

KINDS = ("none", "elu", "leaky_relu")


@dataclass(frozen=True, slots=True)
class Activation:
    """Describe the activation of inputs below zero; others stay as they are.

    "elu" is `slope · (exp(x) - 1)`, "leaky_relu" is `slope · x`.
    """

    kind: str = "none"
    slope: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise KernelError(f"kind: {self.kind!r} must be one of {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Hold inputs of earlier chunks that causal convolutions continue from.

    kept_SRC: context rows, of x's type.
    rows_2B: int32; for each stream, the row to read the last R inputs from (-1: no history, zeros)
        and a different row to write the new ones to (-1: they are not kept). A row belongs to one
        stream only.
    """

    kept_SRC: Tensor
    rows_2B: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedConv:
    """Hold a convolution with weights in the order that the kernels read.

    taps: `[K, C, U · O]`, oldest input first; `[K, U · C]` for a depthwise convolution.
    bias: `[U · O]`.
    left: zeros before the first step where there is no context.
    more: number of output steps beyond the input steps.
    cut: output steps to drop at the beginning and at the end.
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
        """Pack a torch convolution.

        Raises `KernelError` for a plain convolution with a stride or a padding mode other than
        zeros, and for a transposed one with dilation or output padding.
        """
        _check_conv(conv)
        (width,), (stride,), (dilation,), (padding,) = (
            conv.kernel_size,
            conv.stride,
            conv.dilation,
            _padding(conv),
        )
        weight = conv.weight.detach()
        depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.groups > 1
        weight = (
            weight[:, 0] if depthwise else _dense(weight, conv.groups)
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
        pieces = (
            F.pad(weight, (0, (reach + 1) * stride - width))
            .unflatten(-1, (reach + 1, stride))
            .flip(-2)
        )
        taps = pieces.permute(1, 2, 0) if depthwise else pieces.permute(2, 0, 3, 1)
        cut = padding, (reach + 1) * stride - width + padding
        return cls(
            taps.flatten(-2).contiguous(), bias, conv.in_channels, stride, 1, reach, reach, cut
        )

    @property
    def reach(self) -> int:
        """Return R: how many steps before the newest one an output depends on."""
        return (len(self.taps) - 1) * self.dilation

    @property
    def depthwise(self) -> bool:
        """Return True if the convolution is depthwise: each channel depends on itself only."""
        return self.taps.ndim == 2

    @property
    def outputs(self) -> int:
        """Return O, the number of output channels."""
        return self.taps.shape[-1] // self.stride


def _dense(weight_AXK: Tensor, groups: int) -> Tensor:
    """Return the weight of a grouped convolution as a dense one, `[A, groups · X, K]`.

    Weights between a group and the channels of other groups are zero.
    """
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
    """Raise `KernelError` for convolutions that are not supported."""
    if isinstance(conv, nn.Conv1d):
        if conv.stride != (1,) or conv.padding_mode != "zeros":
            raise KernelError(
                f"conv: stride {conv.stride[0]}, padding {conv.padding_mode!r} must be 1 and 'zeros'"
            )
    elif conv.dilation != (1,) or conv.output_padding != (0,):
        found = f"dilation {conv.dilation[0]}, output_padding {conv.output_padding[0]}"
        raise KernelError(f"conv: {found} of a transposed convolution must be 1 and 0")
