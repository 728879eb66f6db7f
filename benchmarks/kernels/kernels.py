"""Measure the engine's kernels on this CPU beside torch's for the same work.

.venv/bin/python benchmarks/run.py kernels [--attention] [--matrices] [--threads 2] [--seconds 1]

Milliseconds are the fastest of repeated runs. Attention: the heads of Qwen3-0.6B (16 queries, 8
keys, 128 wide), one layer after another, so that decode reads its keys from memory; its peer is
torch's scaled_dot_product_attention on contiguous keys, without block tables. GB/s counts keys and
values once.

Matrices: those of Qwen3-0.6B, with so many copies in turn that weights come from memory; GB/s
counts the weights once. Peers: torch's `F.linear` for float32 and bfloat16, `_int_mm` with rounding
of its input and scaling of its output for int8, and `_weight_int4pack_mm_for_cpu` with bfloat16
input for int4.

Where the processor has no instructions for bfloat16, torch computes in float32 beside bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.support.measures import fastest
from motet_kernels.attention.paged_attention import paged_attention
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import FORMATS, pack_linear
from motet_kernels.runtime import native
from motet_kernels.runtime.memory import huge_zeros

HEADS, KV_HEADS, DIM, SLOTS = 16, 8, 128, 16
SCALE = DIM**-0.5
DECODE = ((1, 192), (8, 192), (32, 192), (8, 4096))  # rows, keys of each
PREFILL = (512, 2048)
LAYERS_BYTES = 300e6
MATRICES = {
    "qkv": (4096, 1024),
    "gate and up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
ROWS = (1, 8, 32, 512)


def in_turn(
    run: Callable[[Tensor, Tensor], object], layers: list[tuple[Tensor, Tensor]]
) -> Callable[[], object]:
    """Return a function that calls `run` with the next layer's keys and values each time."""
    turn = itertools.cycle(layers)
    return lambda: run(*next(turn))


def pages(
    rows: int, keys: int, queries: int, dtype: torch.dtype
) -> tuple[PagedBatch, list[tuple[Tensor, Tensor]]]:
    blocks = -(-keys // SLOTS)
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    tables = torch.randperm(rows * blocks).view(rows, blocks).int()
    batch = PagedBatch(tables, starts, torch.full((rows,), keys, dtype=torch.int32))
    shape = (rows * blocks, KV_HEADS, SLOTS, DIM)
    nbytes = 2 * tables.numel() * KV_HEADS * SLOTS * DIM * dtype.itemsize
    count = max(1, min(28, int(LAYERS_BYTES / nbytes)))
    return batch, [
        (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(count)
    ]


def torch_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that torch computes in beside ours."""
    return dtype if native.is_multiplying_bfloat16() else torch.float32


def dense(batch: PagedBatch, layers: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    def gather(cache_PKSD: Tensor) -> Tensor:
        rows = cache_PKSD[batch.tables_BM.long()].transpose(1, 2).flatten(2, 3)
        return rows.to(torch_dtype(rows.dtype)).contiguous()

    return [(gather(key), gather(value)) for key, value in layers]


def decode(rows: int, keys: int, dtype: torch.dtype, seconds: float) -> str:
    batch, layers = pages(rows, keys, 1, dtype)
    query = torch.randn(rows, HEADS, DIM)
    ours = fastest(
        in_turn(lambda k, v: paged_attention(query, k, v, batch, scale=SCALE), layers), seconds
    )
    grouped = query.view(rows, KV_HEADS, HEADS // KV_HEADS, DIM).to(torch_dtype(dtype))
    torchs = fastest(
        in_turn(
            lambda k, v: F.scaled_dot_product_attention(grouped, k, v, scale=SCALE),
            dense(batch, layers),
        ),
        seconds,
    )
    rate = 2 * rows * keys * KV_HEADS * DIM * dtype.itemsize / ours / 1e6
    return f"| decode {rows} x {keys}, {dtype} | {ours:.3g} | {rate:.1f} GB/s | {torchs:.3g} | {torchs / ours:.2f} |"


def prefill(tokens: int, dtype: torch.dtype, seconds: float) -> str:
    batch, layers = pages(1, tokens, tokens, dtype)
    layers = layers[:1]
    query = torch.randn(tokens, HEADS, DIM)
    ours = fastest(
        in_turn(lambda k, v: paged_attention(query, k, v, batch, scale=SCALE), layers), seconds
    )
    (key, value), dense_query = dense(batch, layers)[0], query.transpose(0, 1)[None].contiguous()
    dense_query = dense_query.to(torch_dtype(dtype))
    mask = torch.full((tokens, tokens), -torch.inf, dtype=dense_query.dtype).triu(1)

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(
            dense_query, key, value, attn_mask=mask, scale=SCALE, enable_gqa=True
        )

    torchs = fastest(masked, seconds)
    rate = 4 * HEADS * DIM * tokens * (tokens + 1) / 2 / ours / 1e6
    return f"| prefill {tokens}, {dtype} | {ours:.3g} | {rate:.0f} GFLOP/s | {torchs:.3g} | {torchs / ours:.2f} |"


def attention(seconds: float) -> None:
    print("| attention | ours, ms | rate | torch SDPA, ms | torch / ours |\n|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        for rows, keys in DECODE:
            print(decode(rows, keys, dtype, seconds), flush=True)
        for tokens in PREFILL:
            print(prefill(tokens, dtype, seconds), flush=True)


def packed(features: int, inputs: int, form: str) -> list[Linear]:
    """Return packed copies of one random matrix, more than any cache holds."""
    first = pack_linear(torch.randn(features, inputs), None, form)
    copies = [first]
    for _ in range(int(LAYERS_BYTES / first.packed.nbytes)):
        weights = huge_zeros(tuple(first.packed.shape), first.packed.dtype).copy_(first.packed)
        copies.append(Linear(weights, first.scale_N, None, (features, inputs), form))
    return copies


def int8_linear(weight_KN: Tensor, scale_N: Tensor, x_MK: Tensor) -> Tensor:
    scale_M1 = x_MK.abs().amax(1, keepdim=True) / 127
    return torch._int_mm((x_MK / scale_M1).round_().to(torch.int8), weight_KN) * scale_M1 * scale_N


def int4_linear(weight: Tensor, scales: Tensor, x_MK: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK.bfloat16(), weight, 32, scales).float()


def float_linear(weight: Tensor, x_MK: Tensor) -> Tensor:
    return F.linear(x_MK.to(weight.dtype), weight).float()


def torch_matrices(features: int, inputs: int, form: str) -> list[Callable[[Tensor], Tensor]]:
    """Return torch's products with such a matrix, for as many copies."""
    nbytes = features * inputs * {"int8": 1, "int4": 0.5}.get(form, 4)
    copies = range(1 + int(LAYERS_BYTES / nbytes))
    if form == "int4":
        scales = torch.ones(inputs // 32, features, 2, dtype=torch.bfloat16)
        quads = torch.randint(0, 16, (features, inputs), dtype=torch.int32)
        return [
            partial(
                int4_linear, torch.ops.aten._convert_weight_to_int4pack_for_cpu(quads, 1), scales
            )
            for _ in copies
        ]
    if form == "int8":
        bytes_NK = torch.randint(-127, 128, (features, inputs), dtype=torch.int8)
        return [partial(int8_linear, bytes_NK.clone().T, torch.ones(features)) for _ in copies]
    dtype = torch_dtype(torch.bfloat16 if form == "bfloat16" else torch.float32)
    return [partial(float_linear, torch.randn(features, inputs).to(dtype)) for _ in copies]


def matrix(name: str, form: str, seconds: float) -> None:
    features, inputs = MATRICES[name]
    ours, torchs = packed(features, inputs, form), torch_matrices(features, inputs, form)
    nbytes = ours[0].packed.nbytes
    for rows in ROWS[:-1] if name == "head" else ROWS:
        x = torch.randn(rows, inputs)
        mine, theirs = (fastest(through(matrices, x), seconds) for matrices in (ours, torchs))
        rates = (
            f"{nbytes / mine / 1e6:.1f} GB/s | {2e-6 * rows * features * inputs / mine:.0f} GFLOP/s"
        )
        print(
            f"| {name}, {rows} rows, {form} | {mine:.3g} | {rates} | {theirs:.3g} | {theirs / mine:.2f} |",
            flush=True,
        )


def through(copies: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], Tensor]:
    """Return a function that multiplies x by the next copy each time."""
    turn = itertools.cycle(copies)
    return lambda: next(turn)(x)


def matrices(seconds: float) -> None:
    print(
        "| x · Wᵀ | ours, ms | memory | arithmetic | torch, ms | torch / ours |\n|---|---|---|---|---|---|"
    )
    for name in MATRICES:
        for form in FORMATS:
            matrix(name, form, seconds)


SECTIONS = {"attention": attention, "matrices": matrices}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in SECTIONS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per measurement")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{native.load()['isa']}, {options.threads} threads\n")
    with torch.inference_mode():
        for name in [name for name in SECTIONS if getattr(options, name)] or SECTIONS:
            SECTIONS[name](options.seconds)


if __name__ == "__main__":
    main()
