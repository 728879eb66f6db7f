"""Define cases that work row by row: norms, gated activations, rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from motet_kernels import gates, norm
from motet_kernels.attention import rotary

from .case import Case, Sizes, compiled, nbytes_of, random


def norms(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    x_NC, residual_NC = (random(device, sizes.rows, sizes.channels) for _ in range(2))
    weight_C = torch.randn(sizes.channels, device=device)
    for name, ours, twin, args in (
        ("rms_norm", norm.rms_norm, norm.rms_norm_torch, (x_NC, weight_C, 1e-6)),
        ("layer_norm", norm.layer_norm, norm.layer_norm_torch, (x_NC, weight_C, weight_C, 1e-6)),
        (
            "add_rms_norm",
            norm.add_rms_norm,
            _add_rms_norm_torch,
            (x_NC, residual_NC, weight_C, 1e-6),
        ),
    ):
        passes = 4 if ours is norm.add_rms_norm else 2
        yield Case(
            name, partial(ours, *args), compiled(device, twin, *args), passes * nbytes_of(x_NC)
        )


def _add_rms_norm_torch(
    x: Tensor, residual: Tensor, weight_C: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, norm.rms_norm_torch(total, weight_C, eps)


def activations(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    x_NC = random(device, sizes.rows, 2 * sizes.channels)
    for name in ("silu", "gelu_tanh"):
        peers = compiled(device, gates.gated_torch, x_NC, name)
        yield Case(
            f"gated, {name}", partial(gates.gated, x_NC, name), peers, 3 * nbytes_of(x_NC) // 2
        )


def rotations(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    turned, every = sizes.heads + sizes.kv_heads, sizes.heads + 2 * sizes.kv_heads
    x_NC = random(device, sizes.rows, every * sizes.dim)
    cos_NR, sin_NR = (torch.randn(sizes.rows, sizes.dim, device=device) for _ in range(2))
    args = (x_NC[:, : turned * sizes.dim], sizes.heads, sizes.dim, cos_NR, sin_NR)
    moved = 2 * nbytes_of(x_NC)
    peers = compiled(device, rotary.rotate_heads_torch, *args)
    yield Case(
        "rotate_heads",
        partial(rotary.rotate_heads, *args),
        peers,
        moved * turned // every + nbytes_of(cos_NR, sin_NR),
    )
    blocks = -(-sizes.rows // sizes.slots)
    keys, values = (
        random(device, blocks, sizes.kv_heads, sizes.slots, sizes.dim) for _ in range(2)
    )
    slots_N = torch.randperm(blocks * sizes.slots, device=device)[: sizes.rows]
    heads = rotary.PackedHeads(x_NC, sizes.heads, sizes.kv_heads, sizes.dim, cos_NR, sin_NR)
    run = partial(rotary.rotate_store_kv, heads, keys, values, slots_N)
    yield Case("rotate_store_kv", run, nbytes=moved + nbytes_of(cos_NR, sin_NR))
