"""Compute group norm in three launches: moments of pieces, factors per group, normalization.

The third launch includes the activation. A group of a picture has up to millions of elements, and
there are 32 groups: one program for each would leave most of a GPU idle. So a channel's pixels are
cut into pieces, whose moments are merged as in Chan et al. 1983. A piece's squares are summed about
its first pixel, which keeps them exact where the mean is far from zero.

Shapes: N pictures, C channels, P pixels, S pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, GpuKernel, LaunchSample

_MAX_PIECES = 64  # of a group, so that one program can merge them
_RESIDENT_PROGRAMS = 512  # programs that keep a GPU busy
_MIN_ELEMENTS = 4096  # of a program's piece, where there are as many
_SMALL_PICTURE = 512  # pixels: up to these, a program takes several channels


@triton.jit
def _group_moments(
    x_ptr,
    mean_ptr,
    squares_ptr,
    stride_n,
    stride_c,
    stride_p,
    C,
    P,
    piece,
    S,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    number, block, picture = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = number * piece
    last = tl.minimum(first + piece, P)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    base_ptr = (
        x_ptr
        + picture * stride_n
        + (block * CHANNELS).to(tl.int64) * stride_c
        + first.to(tl.int64) * stride_p
    )
    pixel = tl.arange(0, PIXELS)
    is_channel = channel < C
    at_channel = tl.arange(0, CHANNELS) * stride_c
    about = tl.load(base_ptr + at_channel, mask=is_channel, other=0.0).to(tl.float32)[:, None]
    offsets = at_channel[:, None] + pixel[None, :] * stride_p
    total = tl.zeros([CHANNELS, PIXELS], tl.float32)
    squares = tl.zeros([CHANNELS, PIXELS], tl.float32)
    for start in range(first, last, PIXELS):
        mask = is_channel[:, None] & (start + pixel < last)[None, :]
        x = tl.load(base_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        apart = tl.where(mask, x - about, 0.0)
        total += apart
        squares += apart * apart
        base_ptr += tl.cast(PIXELS, tl.int64) * stride_p
    count = (last - first).to(tl.float32)
    off = tl.sum(total, 1) / count
    out = (picture * C + channel) * S + number
    tl.store(mean_ptr + out, tl.sum(about, 1) + off, mask=is_channel)
    tl.store(squares_ptr + out, tl.sum(squares, 1) - off * off * count, mask=is_channel)


@triton.jit
def _group_factors(
    mean_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    factor_ptr,
    shift_ptr,
    P,
    piece,
    S,
    eps,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, picture = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = tl.num_programs(0)
    at = tl.arange(0, PARTS)
    mask = at < MEMBERS * S
    base = (picture * groups + group) * MEMBERS
    mean = tl.load(mean_ptr + base * S + at, mask=mask, other=0.0)
    squares = tl.load(squares_ptr + base * S + at, mask=mask, other=0.0)
    first = (at % S) * piece
    count = tl.where(mask, tl.minimum(P - first, piece), 0).to(tl.float32)
    every = tl.cast(P, tl.float32) * MEMBERS
    whole = tl.sum(mean * count, 0) / every
    apart = tl.where(mask, mean - whole, 0.0)
    variance = tl.sum(squares + apart * apart * count, 0) / every
    inverse = tl.rsqrt(variance + eps)
    member = tl.arange(0, BLOCK)
    known = member < MEMBERS
    weight = tl.load(weight_ptr + group * MEMBERS + member, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + group * MEMBERS + member, mask=known, other=0.0).to(tl.float32)
    tl.store(factor_ptr + base + member, weight * inverse, mask=known)
    tl.store(shift_ptr + base + member, bias - whole * inverse * weight, mask=known)


@triton.jit
def _group_norm(
    x_ptr,
    factor_ptr,
    shift_ptr,
    out_ptr,
    stride_n,
    stride_c,
    stride_p,
    out_stride_n,
    out_stride_c,
    out_stride_p,
    C,
    P,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    number, block, picture = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, lead = (number * PIXELS).to(tl.int64), (block * CHANNELS).to(tl.int64)
    near_channel, near_pixel = tl.arange(0, CHANNELS), tl.arange(0, PIXELS)
    is_channel = lead + near_channel < C
    mask = is_channel[:, None] & (first + near_pixel < P)[None, :]
    x_ptr += picture * stride_n + lead * stride_c + first * stride_p
    out_ptr += picture * out_stride_n + lead * out_stride_c + first * out_stride_p
    offsets = near_channel[:, None] * stride_c + near_pixel[None, :] * stride_p
    out_offsets = near_channel[:, None] * out_stride_c + near_pixel[None, :] * out_stride_p
    factor = tl.load(factor_ptr + picture * C + lead + near_channel, mask=is_channel, other=0.0)[
        :, None
    ]
    shift = tl.load(shift_ptr + picture * C + lead + near_channel, mask=is_channel, other=0.0)[
        :, None
    ]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    out = x * factor + shift
    if SILU:
        small = tl.exp(-tl.abs(out))  # never overflows, not even in masked elements
        out = out * tl.where(out < 0, small, 1.0) / (1.0 + small)
    tl.store(out_ptr + out_offsets, out, mask=mask)


def _tiles(warps: int, channels: int, pixels: int) -> Config:
    return Config(warps=warps, constants={"CHANNELS": channels, "PIXELS": pixels})


# By memory format: contiguous pixels; contiguous pixels, so few that a program takes several
# channels; contiguous channels.
_TILES = {
    "planes": (_tiles(4, 1, 2048), _tiles(4, 1, 4096), _tiles(8, 1, 4096)),
    "small": (_tiles(4, 8, 256), _tiles(4, 4, 512), _tiles(8, 8, 512)),
    "last": (_tiles(4, 64, 32), _tiles(4, 128, 16), _tiles(8, 128, 32)),
}
_MOMENTS = {order: GpuKernel(_group_moments, *tiles) for order, tiles in _TILES.items()}
_NORM = {order: GpuKernel(_group_norm, *tiles) for order, tiles in _TILES.items()}
_FACTORS = GpuKernel(_group_factors, Config(warps=4), Config(warps=8))


def group_norm(
    x: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """Compute `motet_kernels.group_norm.group_norm` with Triton."""
    if not x.numel():
        return torch.empty_like(x)
    x_NCP = _pixels(x)
    pictures, channels, pixels = x_NCP.shape
    order = _order(x_NCP)
    out_NCP = torch.empty_like(x_NCP)
    factor_NC, shift_NC = _factors(x_NCP, weight_C, bias_C, groups, eps, order)
    _NORM[order](
        lambda sizes: (
            triton.cdiv(pixels, sizes["PIXELS"]),
            triton.cdiv(channels, sizes["CHANNELS"]),
            pictures,
        ),
        *(x_NCP, factor_NC, shift_NC, out_NCP),
        *x_NCP.stride(),
        *out_NCP.stride(),
        *(channels, pixels),
        SILU=silu,
    )
    return _as(out_NCP, x)


def _factors(
    x_NCP: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, eps: float, order: str
) -> tuple[Tensor, Tensor]:
    """Return the factor and the shift of each channel of a picture, `[N, C]` each."""
    pictures, channels, pixels = x_NCP.shape
    piece = _piece(pictures, channels, pixels, order)
    pieces = triton.cdiv(pixels, piece)
    mean_NCS, squares_NCS = x_NCP.new_empty(2, pictures, channels, pieces, dtype=torch.float32)
    factor_NC, shift_NC = x_NCP.new_empty(2, pictures, channels, dtype=torch.float32)
    _MOMENTS[order](
        lambda sizes: (pieces, triton.cdiv(channels, sizes["CHANNELS"]), pictures),
        *(x_NCP, mean_NCS, squares_NCS),
        *x_NCP.stride(),
        *(channels, pixels, piece, pieces),
    )
    members = channels // groups
    _FACTORS(
        (groups, pictures),
        *(mean_NCS, squares_NCS, weight_C, bias_C, factor_NC, shift_NC),
        *(pixels, piece, pieces, eps),
        MEMBERS=members,
        PARTS=triton.next_power_of_2(members * pieces),
        BLOCK=triton.next_power_of_2(members),
    )
    return factor_NC, shift_NC


def _order(x_NCP: Tensor) -> str:
    if x_NCP.stride(1) == 1 and x_NCP.stride(2) != 1:
        return "last"
    return "planes" if x_NCP.shape[2] > _SMALL_PICTURE else "small"


def _piece(pictures: int, channels: int, pixels: int, order: str) -> int:
    """Return the pixels of a piece: as many pieces as keep a GPU busy, but not more."""
    width = _TILES[order][0].constants["CHANNELS"]
    wanted = min(
        max(triton.cdiv(_RESIDENT_PROGRAMS, pictures * triton.cdiv(channels, width)), 1),
        _MAX_PIECES,
    )
    value: int = max(
        triton.cdiv(pixels, wanted),
        min(_MIN_ELEMENTS // width, pixels),
        triton.cdiv(pixels, _MAX_PIECES),
    )
    return value


def _pixels(x: Tensor) -> Tensor:
    """Return `[N, C, P]` with contiguous channels or pixels: a view if x is dense in such order."""
    x_NCP = x.reshape(x.shape[0], x.shape[1], -1)
    return x_NCP if 1 in x_NCP.stride()[1:] else x_NCP.contiguous()


def _as(out_NCP: Tensor, x: Tensor) -> Tensor:
    """Return the result in x's shape and memory format."""
    if x.dim() > 3 and out_NCP.stride(1) == 1:
        pixels = out_NCP.transpose(1, 2).view(x.shape[0], *x.shape[2:], x.shape[1])
        return pixels.movedim(-1, 1)
    return out_NCP.view(x.shape)


def samples() -> Iterator[LaunchSample]:
    """Yield blocks of SDXL's denoiser and VAE, and the innermost of Stable Diffusion 1.5.

    The VAE's is of 1024 x 1024 pixels.
    """
    for dtype, channels, side in (
        (torch.bfloat16, 320, 128),
        (torch.float16, 128, 1024),
        (torch.float32, 640, 64),
        (torch.float16, 1280, 8),
    ):
        x_NCHW = torch.empty(1, channels, side, side, dtype=dtype, device="meta")
        weight_C = torch.zeros(channels, dtype=dtype)
        for order in (torch.contiguous_format, torch.channels_last):
            kind = "channels last" if order is torch.channels_last else "planes"
            label = f"{channels} x {side}², {kind}, {dtype}"
            given = x_NCHW.to(memory_format=order)
            yield LaunchSample(
                label, partial(group_norm, given, weight_C, weight_C, 32, 1e-5, True)
            )
