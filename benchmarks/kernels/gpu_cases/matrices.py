"""Define cases of 8-bit and 4-bit matrix products beside bfloat16, and of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from motet_kernels.linear.expert_linear import ExpertLinear, ExpertRows
from motet_kernels.linear.group_weights import GroupWeights
from motet_kernels.linear.grouped_linear import GroupedLinear
from motet_kernels.linear.lora import LoraFactors
from motet_kernels.linear.pack import pack_linear
from motet_kernels.linear.segments import Segments

from .case import Case, Run, Sizes, nbytes_of, random


def roundings(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    from motet_kernels.gpu.linear.quantization import quantize_rows  # it imports Triton

    x_NC = random(device, sizes.rows, sizes.channels)
    run = partial(quantize_rows, x_NC, sizes.channels)
    yield Case("quantize_rows", run, nbytes=nbytes_of(x_NC) * 3 // 2)


def products(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    weight_NK = random(device, sizes.features, sizes.channels)
    for form in ("int8", "int4"):
        linear = pack_linear(weight_NK.float(), None, form, device)
        for rows in sizes.multiplied:
            x_MK = random(device, rows, sizes.channels)
            peers: dict[str, Run] = {"cuBLAS, bfloat16": partial(F.linear, x_MK, weight_NK)}
            moved = linear.nbytes + nbytes_of(x_MK) + 2 * rows * sizes.features
            yield Case(
                f"{form}, {rows} rows",
                partial(linear, x_MK),
                peers,
                moved,
                2 * rows * weight_NK.numel(),
            )


def grouped(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield int4 in groups of 128 with zero points, as in GPTQ and AWQ, and int8 in groups of 32."""
    weight_NK = random(device, sizes.features, sizes.channels)
    for name, kind, group in (("int4:128", torch.uint8, 128), ("int8:32", torch.int8, 32)):
        codes_NK = torch.randint(0, 16, weight_NK.shape).to(kind)
        scale_NG = torch.rand(sizes.features, -(-sizes.channels // group))
        shift_NG = torch.rand_like(scale_NG) if kind == torch.uint8 else None
        linear = GroupedLinear(GroupWeights(codes_NK, scale_NG, shift_NG, group), None, device)
        for rows in sizes.multiplied:
            x_MK = random(device, rows, sizes.channels)
            peers: dict[str, Run] = {"cuBLAS, bfloat16": partial(F.linear, x_MK, weight_NK)}
            moved = linear.nbytes + nbytes_of(x_MK) + 2 * rows * sizes.features
            yield Case(
                f"{name}, {rows} rows",
                partial(linear, x_MK),
                peers,
                moved,
                2 * rows * weight_NK.numel(),
            )


def experts(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield int4 matrices of eight experts, two for each token, in one launch."""
    number, chosen = 8, 2
    weight_ENK = random(device, number, max(1, sizes.features // number), sizes.channels)
    linear = ExpertLinear.quantized(weight_ENK.float(), None, "int4", device)
    for tokens in sizes.multiplied:
        index_Tk = torch.rand(tokens, number, device=device).topk(chosen, dim=1).indices
        rows = ExpertRows.of(index_Tk, number)
        x_RK = random(device, tokens * chosen, sizes.channels)
        moved = linear.nbytes + nbytes_of(x_RK) + 2 * len(x_RK) * linear.out_features
        operations = 2 * len(x_RK) * linear.out_features * linear.in_features
        yield Case(
            f"int4, {tokens} tokens",
            partial(linear, x_RK, rows),
            nbytes=moved,
            operations=operations,
        )


def adapters(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield rows with an adapter each, and a prompt with one, beside the product they add to."""
    channels, rank = sizes.channels, 16
    weight_NK = random(device, channels, channels)
    for name, rows, slots in (
        ("own", max(sizes.batch), max(sizes.batch)),
        ("prompt", max(sizes.multiplied), 1),
    ):
        factors = LoraFactors(slots, rank, channels, channels, torch.bfloat16, device)
        for slot in range(slots):
            factors.put(slot, random(device, rank, channels), random(device, channels, rank), 1.0)
        x_MK, out_MN = random(device, rows, channels), random(device, rows, channels)
        segments = Segments.of([row % slots for row in range(rows)], device)
        peers: dict[str, Run] = {"cuBLAS, the product": partial(F.linear, x_MK, weight_NK)}
        moved = factors.nbytes + nbytes_of(x_MK) + 2 * nbytes_of(out_MN)
        run = partial(factors.add, x_MK, out_MN, segments)
        yield Case(f"{name}, {rows} rows", run, peers, moved, 4 * rows * rank * channels)
