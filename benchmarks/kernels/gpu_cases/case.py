"""Define a case, and the sizes of large models that all cases share.

Shapes, here and in the other modules: N rows, C channels, H query heads, K key heads, D dim, S
sequences, T keys of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Define the sizes of all cases.

    rows: tokens of a step. batch, keys: decoding sequences and their context. prompt: tokens of a
    prefill.
    """

    rows: int = 4096
    channels: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    slots: int = 16
    batch: tuple[int, ...] = (16, 64)
    keys: int = 4096
    prompt: int = 8192
    features: int = 24_576  # of a matrix
    multiplied: tuple[int, ...] = (1, 16, 512)  # rows by a matrix
    encoded: int = 1500  # tokens of a sequence in an encoder
    encoders: int = 8  # sequences
    layers: int = 32
    blocks: int = 64  # that are moved
    draws: int = 256
    vocab: int = 151_936
    pictures: int = 8
    pixels: int = 64  # of a latent's side
    seconds: int = 30  # of sound


QUICK = Sizes(
    rows=3, channels=32, heads=4, kv_heads=2, dim=16, batch=(2,), keys=20, prompt=9,
    features=24, multiplied=(1, 17), encoded=5, encoders=2, layers=2, blocks=2,
    draws=2, vocab=100, pictures=1, pixels=2, seconds=0,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Define a kernel call and its peers.

    nbytes: bytes that must be read and written. operations: operations of matrix products.
    """

    name: str
    ours: Run
    peers: dict[str, Run] = field(default_factory=dict)
    nbytes: int = 0
    operations: int = 0


def nbytes_of(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def compiled(device: torch.device, twin: Callable[..., object], *args: object) -> dict[str, Run]:
    """Return the twin compiled by torch as a peer; empty without a GPU."""
    return {"compiled": partial(torch.compile(twin), *args)} if device.type == "cuda" else {}


def random(device: torch.device, *shape: int) -> Tensor:
    """Return normally distributed numbers in bfloat16."""
    return torch.randn(*shape, device=device).bfloat16()
