"""Products with weights of 8 and of 4 bits, beside those of bfloat16, whose time the shorter weights are to beat."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from motet_kernels.linear import Linear

from .case import Case, Run, Sizes, nbytes_of, random


def roundings(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    from motet_kernels.gpu.quantization import quantize_rows  # it imports Triton

    x_NC = random(device, sizes.rows, sizes.channels)
    run = partial(quantize_rows, x_NC, sizes.channels)
    yield Case("quantize_rows", run, nbytes=nbytes_of(x_NC) * 3 // 2)


def products(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    weight_NK = random(device, sizes.features, sizes.channels)
    for form in ("int8", "int4"):
        linear = Linear.pack(weight_NK.float(), None, form, device)
        for rows in sizes.multiplied:
            x_MK = random(device, rows, sizes.channels)
            peers: dict[str, Run] = {"cuBLAS, bfloat16": partial(F.linear, x_MK, weight_NK)}
            moved = linear.nbytes + nbytes_of(x_MK) + 2 * rows * sizes.features
            yield Case(f"{form}, {rows} rows", partial(linear, x_MK), peers, moved, 2 * rows * weight_NK.numel())
