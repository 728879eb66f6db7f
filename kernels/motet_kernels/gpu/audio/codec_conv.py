"""Compute convolutions over time as matrix products (implicit GEMM).

Taps times channels are the inner dimension, as in cuDNN (Chetlur et al. 2014, arXiv:1410.0759).
Nothing is gathered: a tap is the same tile of steps, loaded some steps earlier.

Rows are the steps of all streams, one stream after the other, so that short chunks share a tile and
its weights. Steps before a stream's first one come from its context row. Additional programs write
the new context to another row, which no program reads.

Shapes: B streams, N steps in and M out, C input channels, W outputs (channels of all U steps), K
taps, R context steps, S context rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from motet_kernels.audio.packed_conv import KINDS, Activation, Context, PackedConv
from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample

MIN_ROWS = 16  # rows of a tile of the smallest size that matrix units take
_ELU, _LEAKY = tl.constexpr(KINDS.index("elu")), tl.constexpr(KINDS.index("leaky_relu"))


@triton.jit
def _before(kept_ptr, rows_ptr, B, S, stride_s, stream, mask):
    """Return pointers to the context of each row's stream, and whether it has one."""
    place = tl.load(rows_ptr + stream, mask=mask & (stream < B), other=-1)
    return kept_ptr + place.to(tl.int64) * stride_s, (place >= 0) & (place < S)


@triton.jit
def _steps(x_ptr, at, kept_ptr, known, step, N, R, C, stride_n, channels, mask):
    """Return `[rows, channels]` of x, or of the context, at a step of each row's stream.

    Steps that are in neither are zeros.
    """
    inside = mask & (step >= 0) & (step < N)
    there = channels[None, :] < C
    x = tl.load(
        x_ptr + (at + step.to(tl.int64) * stride_n)[:, None] + channels[None, :],
        mask=inside[:, None] & there,
        other=0.0,
    )
    if kept_ptr is not None:
        earlier = mask & known & (step < 0) & (step >= -R)
        kept = tl.load(
            kept_ptr[:, None] + ((R + step) * C)[:, None] + channels[None, :],
            mask=earlier[:, None] & there,
            other=0.0,
        )
        x = tl.where(inside[:, None], x, kept)
    return x


@triton.jit
def _activated(x, slope, KIND: tl.constexpr):
    """Return the activation of x, in float32."""
    wide = x.to(tl.float32)
    if KIND == _ELU:
        wide = tl.where(wide > 0, wide, slope * (tl.exp(tl.minimum(wide, 0.0)) - 1.0))
    elif KIND == _LEAKY:
        wide = tl.where(wide > 0, wide, slope * wide)
    return wide


@triton.jit
def _store_context(
    x_ptr,
    kept_ptr,
    rows_ptr,
    B,
    N,
    C,
    R,
    S,
    stride_b,
    stride_n,
    stride_s,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the last R steps of every stream to its other context row.

    The programs of the first dimension share the work.
    """
    # Without a context there are no such programs.
    tl.static_assert(kept_ptr is not None)
    for first in range(tl.program_id(0) * BLOCK_M, B * R, tl.num_programs(0) * BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        stream, index = row // R, row % R
        mask = row < B * R
        before, known = _before(kept_ptr, rows_ptr, B, S, stride_s, stream, mask)
        place = tl.load(rows_ptr + B + stream, mask=mask, other=-1)
        target = kept_ptr + place.to(tl.int64) * stride_s + index * C
        there = mask & (place >= 0) & (place < S)
        for low in range(0, C, BLOCK_C):
            channels = low + tl.arange(0, BLOCK_C)
            step = N - R + index
            x = _steps(
                x_ptr,
                stream.to(tl.int64) * stride_b,
                before,
                known,
                step,
                N,
                R,
                C,
                stride_n,
                channels,
                mask,
            )
            tl.store(
                target[:, None] + channels[None, :],
                x,
                mask=there[:, None] & (channels < C)[None, :],
            )


@triton.jit
def _finish(out_MO, bias_ptr, residual_ptr, residual_at, out_ptr, row, outputs, mask, W):
    there = mask[:, None] & (outputs < W)[None, :]
    if bias_ptr is not None:
        out_MO += tl.load(bias_ptr + outputs, mask=outputs < W, other=0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + residual_at[:, None] + outputs[None, :], mask=there, other=0.0
        )
        out_MO += residual.to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * W + outputs[None, :], out_MO, mask=there)


@triton.jit
def _convolve(
    x_ptr, kept_ptr, rows_ptr, taps_ptr, bias_ptr, residual_ptr, out_ptr,
    B, N, M, C, W, K, R, S, left, dilation, stride_b, stride_n, stride_s, residual_stride_b, residual_stride_n, slope,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    if kept_ptr is not None and tl.program_id(1) * BLOCK_O >= W:
        _store_context(
            x_ptr, kept_ptr, rows_ptr, B, N, C, R, S, stride_b, stride_n, stride_s, BLOCK_M, BLOCK_C
        )
    else:
        row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        outputs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        stream, step = row // M, row % M
        mask = row < B * M
        at = stream.to(tl.int64) * stride_b
        before, known = None, None
        if kept_ptr is not None:
            before, known = _before(kept_ptr, rows_ptr, B, S, stride_s, stream, mask)
        parts = tl.cdiv(C, BLOCK_C)
        sums_MO = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
        for part in range(K * parts):
            tap = part // parts
            channels = (part % parts) * BLOCK_C + tl.arange(0, BLOCK_C)
            x = _steps(
                x_ptr,
                at,
                before,
                known,
                step + tap * dilation - left,
                N,
                R,
                C,
                stride_n,
                channels,
                mask,
            )
            inner = (tap * C + channels).to(tl.int64)
            taps_CO = tl.load(
                taps_ptr + inner[:, None] * W + outputs[None, :],
                mask=(channels < C)[:, None] & (outputs < W)[None, :],
                other=0.0,
            )
            active = _activated(x, slope, KIND).to(taps_CO.dtype)
            sums_MO = tl.dot(active, taps_CO, sums_MO, input_precision="ieee")
        residual_at = (
            stream.to(tl.int64) * residual_stride_b + step.to(tl.int64) * residual_stride_n
        )
        _finish(sums_MO, bias_ptr, residual_ptr, residual_at, out_ptr, row, outputs, mask, W)


@triton.jit
def _convolve_depthwise(
    x_ptr, kept_ptr, rows_ptr, taps_ptr, bias_ptr, residual_ptr, out_ptr,
    B, N, M, C, W, K, R, S, left, dilation, stride_b, stride_n, stride_s, residual_stride_b, residual_stride_n, slope,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(C, BLOCK_O)
    phase = tl.program_id(1) // parts  # which of the U output steps of an input step
    if kept_ptr is not None and phase * C >= W:
        _store_context(
            x_ptr, kept_ptr, rows_ptr, B, N, C, R, S, stride_b, stride_n, stride_s, BLOCK_M, BLOCK_O
        )
    else:
        row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        channels = tl.program_id(1) % parts * BLOCK_O + tl.arange(0, BLOCK_O)
        outputs = tl.where(channels < C, phase * C + channels, W)
        stream, step = row // M, row % M
        mask = row < B * M
        at = stream.to(tl.int64) * stride_b
        before, known = None, None
        if kept_ptr is not None:
            before, known = _before(kept_ptr, rows_ptr, B, S, stride_s, stream, mask)
        sums_MO = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
        for tap in range(K):
            x = _steps(
                x_ptr,
                at,
                before,
                known,
                step + tap * dilation - left,
                N,
                R,
                C,
                stride_n,
                channels,
                mask,
            )
            weight = tl.load(taps_ptr + tap * W + outputs, mask=outputs < W, other=0.0).to(
                tl.float32
            )
            sums_MO += _activated(x, slope, KIND) * weight[None, :]
        residual_at = (
            stream.to(tl.int64) * residual_stride_b + step.to(tl.int64) * residual_stride_n
        )
        _finish(sums_MO, bias_ptr, residual_ptr, residual_at, out_ptr, row, outputs, mask, W)


def _tile(rows: int, outputs: int, channels: int, *, warps: int = 4, stages: int) -> Config:
    return Config(
        warps=warps,
        stages=stages,
        constants={"BLOCK_M": rows, "BLOCK_O": outputs, "BLOCK_C": channels},
    )


# A chunk's first convolutions have few steps and many weights, its last ones many steps and few
# channels.
_FEW = GpuKernel(
    _convolve,
    _tile(MIN_ROWS, 32, 64, stages=4),
    _tile(MIN_ROWS, 64, 64, stages=3),
    _tile(MIN_ROWS, 32, 128, stages=3),
)
_MANY = GpuKernel(
    _convolve,
    _tile(64, 64, 32, stages=3),
    _tile(128, 64, 32, stages=3),
    _tile(64, 32, 64, stages=3),
)
_NARROW = GpuKernel(_convolve, _tile(128, 16, 32, stages=3), _tile(64, 16, 64, stages=3))
# Matrix units do not multiply float32: threads hold their factors in registers, hence small tiles.
_FEW_WIDE = GpuKernel(
    _convolve, _tile(MIN_ROWS, 64, 16, stages=3), _tile(MIN_ROWS, 32, 16, warps=2, stages=3)
)
_MANY_WIDE = GpuKernel(_convolve, _tile(64, 32, 16, stages=3), _tile(32, 32, 16, stages=3))
_NARROW_WIDE = GpuKernel(_convolve, _tile(64, 16, 16, stages=3), _tile(32, 16, 32, stages=3))
_DEPTHWISE = GpuKernel(
    _convolve_depthwise,
    *(
        Config(warps=4, constants={"BLOCK_M": rows, "BLOCK_O": outputs})
        for rows, outputs in ((8, 128), (4, 256))
    ),
)


def convolve(
    x_BNC: Tensor,
    conv: PackedConv,
    activation: Activation,
    residual_BMO: Tensor | None,
    context: Context | None,
) -> Tensor:
    """Compute `motet_kernels.audio.codec_conv.convolve_torch` with Triton."""
    (streams, steps, channels), outputs = x_BNC.shape, conv.taps.shape[-1]
    reach, left, made = conv.reach, conv.left, steps + conv.more
    if context is not None:
        left, made = reach, steps
    kept, rows = (
        (context.kept_SRC, context.rows_2B) if context is not None and reach else (None, None)
    )
    out_BMO = x_BNC.new_empty(streams, made, outputs)
    _kernel(conv, streams * made, x_BNC.dtype)(
        partial(_programs, streams * made, conv, kept is not None),
        *(x_BNC, kept, rows, conv.taps, conv.bias, residual_BMO, out_BMO),
        *(
            streams,
            steps,
            made,
            channels,
            outputs,
            len(conv.taps),
            reach,
            0 if kept is None else len(kept),
        ),
        *(left, conv.dilation, *x_BNC.stride()[:2], 0 if kept is None else kept.stride(0)),
        *((0, 0) if residual_BMO is None else residual_BMO.stride()[:2]),
        activation.slope,
        KIND=KINDS.index(activation.kind),
    )
    return out_BMO


def _kernel(conv: PackedConv, rows: int, dtype: torch.dtype) -> GpuKernel:
    if conv.depthwise:
        return _DEPTHWISE
    wide = dtype == torch.float32
    if rows <= MIN_ROWS:
        return _FEW_WIDE if wide else _FEW
    if conv.taps.shape[-1] <= 16:
        return _NARROW_WIDE if wide else _NARROW
    return _MANY_WIDE if wide else _MANY


def _programs(
    rows: int, conv: PackedConv, remembers: bool, constants: Constants
) -> tuple[int, int]:
    """Return the number of tiles of rows and of outputs, plus the programs that write the context.

    A depthwise convolution has tiles for each of the U steps.
    """
    phases, outputs = (conv.stride, conv.channels) if conv.depthwise else (1, conv.taps.shape[-1])
    return triton.cdiv(rows, constants["BLOCK_M"]), phases * triton.cdiv(
        outputs, constants["BLOCK_O"]
    ) + remembers


def samples() -> Iterator[LaunchSample]:
    """Yield Mimi's decoder for a frame of four sentences, its upsampling, and HiFi-GAN blocks."""
    elu, leaky = Activation("elu", 1.0), Activation("leaky_relu", 0.1)
    causal = {
        "7 taps, 512 to 1,024": (nn.Conv1d(512, 1024, 7), Activation(), 2),
        "1,024 to 8 x 512": (nn.ConvTranspose1d(1024, 512, 16, 8), elu, 2),
        "3 taps, 512 to 256": (nn.Conv1d(512, 256, 3), elu, 16),
        "128 to 4 x 64": (nn.ConvTranspose1d(128, 64, 8, 4), elu, 480),
        "3 taps, 64 to 1": (nn.Conv1d(64, 1, 3), elu, 1920),
        "512 channels to twice the steps": (
            nn.ConvTranspose1d(512, 512, 4, 2, groups=512, bias=False),
            Activation(),
            1,
        ),
    }
    whole = {
        "1 tap, 256 to 512, residual": (nn.Conv1d(256, 512, 1), elu, 16),
        "11 taps 5 apart, 128, residual": (
            nn.Conv1d(128, 128, 11, dilation=5, padding=25),
            leaky,
            512,
        ),
        "256 to 8 x 128": (nn.ConvTranspose1d(256, 128, 16, 8, padding=4), leaky, 64),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for label, (module, activation, steps) in (causal | whole).items():
            if dtype == torch.float16 and "residual" not in label:
                continue  # it compiles as bfloat16 does
            conv = PackedConv.of(module.to(dtype))  # type: ignore[arg-type]
            x_BNC = torch.zeros(4, steps, conv.channels, dtype=dtype)
            rows_2B = torch.zeros(2, 4, dtype=torch.int32)
            context = (
                Context(x_BNC.new_zeros(8, conv.reach, conv.channels), rows_2B)
                if label in causal
                else None
            )
            residual = x_BNC.new_zeros(4, steps, conv.outputs) if "residual" in label else None
            mma = not conv.depthwise and dtype != torch.float32
            yield LaunchSample(
                f"{label}, {dtype}",
                partial(convolve, x_BNC, conv, activation, residual, context),
                mma=mma,
            )
