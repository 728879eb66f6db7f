"""Measure recurrences of state-space and linear-attention layers beside their torch twins.

.venv/bin/python benchmarks/run.py recurrences [--threads 1] [--seconds 0.3]

Prints the minimum of repeated runs in milliseconds, native and torch, for one layer in the shapes
of Bamba-9B, Jamba-Mini, Qwen3-Next and Kimi-Linear. A column is a number of sequences by tokens of
each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.support.measures import fastest
from motet_kernels.recurrent.packed_rows import PackedRows
from motet_kernels.recurrent.scans import conv_scan, delta_scan, mamba1_scan, mamba2_scan
from motet_kernels.runtime import native

STEPS = ((1, 1), (8, 1), (32, 1), (1, 512))  # rows, tokens of each

Case = tuple[Callable[..., Tensor], tuple[int, ...], Callable[[int], tuple[Tensor | None, ...]]]


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def delta_inputs(key_heads: int, per_dim: bool) -> Callable[[int], tuple[Tensor | None, ...]]:
    def inputs(n: int) -> tuple[Tensor | None, ...]:
        decay = -torch.rand(n, 32, 128) if per_dim else -torch.rand(n, 32)
        return (
            unit(n, key_heads, 128),
            unit(n, key_heads, 128),
            torch.randn(n, 32, 128),
            decay,
            torch.rand(n, 32),
        )

    return inputs


def mamba2_inputs(n: int) -> tuple[Tensor | None, ...]:
    return (
        torch.randn(n, 128, 64),
        torch.rand(n, 128),
        -torch.rand(128),
        torch.randn(n, 1, 128),
        torch.randn(n, 1, 128),
    )


def mamba1_inputs(n: int) -> tuple[Tensor | None, ...]:
    return (
        torch.randn(n, 8192),
        torch.rand(n, 8192),
        -torch.rand(8192, 16),
        torch.randn(n, 16),
        torch.randn(n, 16),
    )


def conv_inputs(n: int) -> tuple[Tensor | None, ...]:
    return torch.randn(n, 8448), torch.randn(4, 8448), torch.randn(8448)


CASES: dict[str, Case] = {
    "Mamba-2, 128 heads of 64 x 128": (mamba2_scan, (128, 64, 128), mamba2_inputs),
    "Mamba-1, 8192 channels of 16": (mamba1_scan, (8192, 16), mamba1_inputs),
    "delta rule, 32 heads of 128 x 128": (
        delta_scan,
        (32, 128, 128),
        delta_inputs(16, per_dim=False),
    ),
    "the same, a decay per dimension": (delta_scan, (32, 128, 128), delta_inputs(32, per_dim=True)),
    "convolution, 8448 channels, 4 taps": (conv_scan, (3, 8448), conv_inputs),
}


@torch.inference_mode()
def measure(case: Case, rows: int, tokens: int, seconds: float) -> float:
    scan, shape, inputs = case
    state = torch.zeros(rows, *shape)
    packed = PackedRows(torch.arange(rows), [row * tokens for row in range(rows + 1)])
    arguments = inputs(rows * tokens)
    return fastest(lambda: scan(state, packed, *arguments), seconds, least=3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds per measurement")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    isa = native.load()["isa"]
    print(f"{isa} / torch, ms, {options.threads} threads")
    print("| shape | " + " | ".join(f"{rows} x {tokens}" for rows, tokens in STEPS) + " |")
    print("|---" * (1 + len(STEPS)) + "|")
    for name, case in CASES.items():
        figures = []
        for rows, tokens in STEPS:
            native.select("")
            ours = measure(case, rows, tokens, options.seconds)
            native.select("off")
            figures.append(f"{ours:.3g} / {measure(case, rows, tokens, options.seconds):.3g}")
        print(f"| {name} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
