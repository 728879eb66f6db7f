"""What `gpu_kernels.py` measures: each public kernel at the sizes of large models, beside what torch has for the same.

Peers are the twin compiled by torch ("compiled") where it can be, and the library's own operator where there is one.
Shapes: N rows, C channels, H query heads, K key heads, D dim, S sequences, T keys of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gates, group_norm, guidance, kv, modulate, norm, rotary, sampling
from motet_kernels.attention import PagedBatch, attention_torch, paged_attention

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """rows: tokens of a step. batch, keys: sequences that decode and what each sees. prompt: tokens of a prefill."""

    rows: int = 4096
    channels: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    slots: int = 16
    batch: tuple[int, ...] = (16, 64)
    keys: int = 4096
    prompt: int = 8192
    draws: int = 256
    vocab: int = 151_936
    pictures: int = 8
    pixels: int = 64  # of a latent's side


QUICK = Sizes(
    rows=3, channels=32, heads=4, kv_heads=2, dim=16, batch=(2,), keys=20, prompt=9,
    draws=2, vocab=100, pictures=1, pixels=2,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """nbytes: read and written at the least; operations: of matrix products."""

    name: str
    ours: Run
    peers: dict[str, Run] = field(default_factory=dict)
    nbytes: int = 0
    operations: int = 0


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _peers(device: torch.device, twin: Callable[..., object], *args: object, **others: Run) -> dict[str, Run]:
    """The twin as torch compiles it, where that is worth its time."""
    if device.type != "cuda":
        return others
    return {"compiled": partial(torch.compile(twin), *args), **others}


def _random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


# ---------------------------------------------------------------------------------------------------------- point-wise
def norms(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    x_NC = _random(device, sizes.rows, sizes.channels)
    weight_C = torch.randn(sizes.channels, device=device)
    for name, ours, twin, extra in (
        ("rms_norm", norm.rms_norm, norm.rms_norm_torch, (weight_C, 1e-6)),
        ("layer_norm", norm.layer_norm, norm.layer_norm_torch, (weight_C, weight_C, 1e-6)),
    ):
        yield Case(name, partial(ours, x_NC, *extra), _peers(device, twin, x_NC, *extra), 2 * _bytes(x_NC))


def activations(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    x_NC = _random(device, sizes.rows, 2 * sizes.channels)
    for name in ("silu", "gelu_tanh"):
        peers = _peers(device, gates.gated_torch, x_NC, name)
        yield Case(f"gated, {name}", partial(gates.gated, x_NC, name), peers, 3 * _bytes(x_NC) // 2)


def rotations(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    heads = sizes.heads + sizes.kv_heads
    x_NC = _random(device, sizes.rows, heads * sizes.dim)
    cos_NR, sin_NR = (torch.randn(sizes.rows, sizes.dim, device=device) for _ in range(2))
    args = (x_NC, sizes.heads, sizes.dim, cos_NR, sin_NR)
    nbytes = 2 * _bytes(x_NC) + _bytes(cos_NR, sin_NR)
    peers = _peers(device, rotary.rotate_heads_torch, *args)
    yield Case("rotate_heads", partial(rotary.rotate_heads, *args), peers, nbytes)


def modulations(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    x_BSC = _random(device, 2, sizes.rows // 2 or 1, sizes.channels)
    shift_B1C, factor_B1C = (_random(device, 2, 1, sizes.channels) for _ in range(2))
    normed, added = (x_BSC, 1e-6, factor_B1C, shift_B1C), (x_BSC, factor_B1C, x_BSC.clone())
    peers = _peers(device, modulate.modulated_norm_torch, *normed)
    yield Case("modulated_norm", partial(modulate.modulated_norm, *normed), peers, 2 * _bytes(x_BSC))
    peers = _peers(device, modulate.gated_add_torch, *added)
    yield Case("gated_add", partial(modulate.gated_add, *added), peers, 3 * _bytes(x_BSC))


def image_norms(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    channels = min(sizes.channels, 320)
    x = _random(device, sizes.pictures, channels, sizes.pixels, sizes.pixels)
    weight_C = torch.ones(channels, device=device)
    args = (x, weight_C, weight_C, 8, 1e-5)
    for silu in (False, True):
        run, twin = (partial(f, silu=silu) for f in (group_norm.group_norm, group_norm.group_norm_torch))
        name = "group_norm and SiLU" if silu else "group_norm"
        yield Case(name, partial(run, *args), _peers(device, twin, *args), 2 * _bytes(x))


def guided(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    without, with_text = (_random(device, 4, sizes.pixels, sizes.pixels) for _ in range(2))
    args = (without, with_text, 7.5)
    yield Case(
        "guided",
        partial(guidance.guided, *args),
        _peers(device, guidance.guided_torch, *args),
        3 * _bytes(without),
    )


# ----------------------------------------------------------------------------------------------------------- attention
def stores(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    blocks = -(-sizes.rows // sizes.slots)
    key, value = (_random(device, sizes.rows, sizes.kv_heads, sizes.dim) for _ in range(2))
    keys, values = (_random(device, blocks, sizes.kv_heads, sizes.slots, sizes.dim) for _ in range(2))
    slots_N = torch.randperm(blocks * sizes.slots, device=device)[: sizes.rows]
    yield Case("store_kv", partial(kv.store_kv, key, value, keys, values, slots_N), nbytes=2 * _bytes(key, value))


def attention(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    for sequences in sizes.batch:
        yield _attended(sizes, device, sequences, queries=1, keys=sizes.keys, name=f"decode {sequences} x {sizes.keys}")
    yield _attended(sizes, device, 1, queries=sizes.prompt, keys=sizes.prompt, name=f"prefill {sizes.prompt}")


def _attended(sizes: Sizes, device: torch.device, sequences: int, *, queries: int, keys: int, name: str) -> Case:
    blocks = -(-keys // sizes.slots)
    tables = torch.randperm(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    starts = torch.arange(sequences + 1, dtype=torch.int32) * queries
    lengths = torch.full((sequences,), keys, dtype=torch.int32)
    batch = PagedBatch(tables, starts, lengths).to(device)
    query = _random(device, sequences * queries, sizes.heads, sizes.dim)
    shape = (sequences * blocks, sizes.kv_heads, sizes.slots, sizes.dim)
    key, value = _random(device, *shape), _random(device, *shape)
    scale = sizes.dim**-0.5
    dense_q = query.view(sequences, queries, sizes.heads, sizes.dim).transpose(1, 2).contiguous()
    dense_k, dense_v = (_random(device, sequences, sizes.kv_heads, keys, sizes.dim) for _ in range(2))
    causal = queries > 1

    def library() -> Tensor:
        return F.scaled_dot_product_attention(dense_q, dense_k, dense_v, is_causal=causal, scale=scale, enable_gqa=True)

    peers: dict[str, Run] = {"SDPA on keys in one piece": library}
    if device.type != "cuda":
        peers["twin"] = partial(attention_torch, query, key, value, batch, scale=scale)
    pairs = sequences * queries * keys // (2 if causal else 1)
    run = partial(paged_attention, query, key, value, batch, scale=scale)
    return Case(name, run, peers, _bytes(query, query, key, value), 4 * pairs * sizes.heads * sizes.dim)


# ------------------------------------------------------------------------------------------------------------ sampling
def draws(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    logits_RV = _random(device, sizes.draws, sizes.vocab)
    kinds = {
        "greedy": sampling.Choice(0.0),
        "all tokens": sampling.Choice(1.0),
        "top-k 50, top-p 0.9": sampling.Choice(1.0, top_k=50, top_p=0.9),
    }
    for name, choice in kinds.items():
        choices = [choice._replace(seed=row) for row in range(sizes.draws)]
        peers: dict[str, Run] = {"twin": partial(sampling.draw_torch, logits_RV, choices)}
        yield Case(f"draw, {name}", partial(sampling.draw, logits_RV, choices), peers, _bytes(logits_RV))


NOUNS: dict[str, Callable[[Sizes, torch.device], Iterator[Case]]] = {
    "norm": norms,
    "gates": activations,
    "rotary": rotations,
    "modulate": modulations,
    "group_norm": image_norms,
    "guidance": guided,
    "kv": stores,
    "attention": attention,
    "sampling": draws,
}
