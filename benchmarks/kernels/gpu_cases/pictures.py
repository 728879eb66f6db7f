"""Define cases of diffusion models: modulation, group norm, guidance."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from motet_kernels import group_norm, guidance, modulate

from .case import Case, Sizes, compiled, nbytes_of, random


def modulations(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    x_BSC = random(device, 2, sizes.rows // 2 or 1, sizes.channels)
    shift_B1C, factor_B1C = (random(device, 2, 1, sizes.channels) for _ in range(2))
    normed, added = (x_BSC, 1e-6, factor_B1C, shift_B1C), (x_BSC, factor_B1C, x_BSC.clone())
    peers = compiled(device, modulate.modulated_norm_torch, *normed)
    yield Case(
        "modulated_norm", partial(modulate.modulated_norm, *normed), peers, 2 * nbytes_of(x_BSC)
    )
    peers = compiled(device, modulate.gated_add_torch, *added)
    yield Case("gated_add", partial(modulate.gated_add, *added), peers, 3 * nbytes_of(x_BSC))


def norms(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    channels = min(sizes.channels, 320)
    x = random(device, sizes.pictures, channels, sizes.pixels, sizes.pixels)
    weight_C = torch.ones(channels, device=device)
    args = (x, weight_C, weight_C, 8, 1e-5)
    for silu in (False, True):
        run, twin = (
            partial(f, silu=silu) for f in (group_norm.group_norm, group_norm.group_norm_torch)
        )
        name = "group_norm and SiLU" if silu else "group_norm"
        yield Case(name, partial(run, *args), compiled(device, twin, *args), 2 * nbytes_of(x))


def guided(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    sample, without, with_text = (
        random(device, sizes.pictures, 4, sizes.pixels, sizes.pixels) for _ in range(3)
    )
    half, whole = (without, with_text, 7.5), (sample, without, with_text, 7.5, 0.9, -0.1)
    peers = compiled(device, guidance.guided_torch, *half)
    yield Case("guided", partial(guidance.guided, *half), peers, 3 * nbytes_of(without))
    peers = compiled(device, guidance.guided_step_torch, *whole)
    yield Case("guided_step", partial(guidance.guided_step, *whole), peers, 4 * nbytes_of(without))
