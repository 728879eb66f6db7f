"""Bound a model's tokens per second on a processor by memory bandwidth and arithmetic.

A step takes at least the time to read its data and the time to compute it (Williams et al.,
"Roofline", 2009). Real engines stay below this bound; benchmarks measure by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

from .capacity import STATE_BYTES, KvFormat
from .model_shape import ModelShape
from .weight_formats import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Describe the capabilities of a processor.

    memory: bytes.
    bandwidth: bytes/s read.
    bf16, int8: dense operations per second, where a multiply-add counts as two.
    """

    name: str
    memory: int
    bandwidth: float
    bf16: float
    int8: float


def _gpu(
    name: str, gib: int, gigabytes_per_second: float, bf16_tera: float, int8_tera: float
) -> Processor:
    return Processor(
        name=name,
        memory=gib << 30,
        bandwidth=gigabytes_per_second * 1e9,
        bf16=bf16_tera * 1e12,
        int8=int8_tera * 1e12,
    )


# Figures of vendors' data sheets; those "with sparsity" are halved. T4 and V100 have float16, not
# bfloat16.
GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA data sheets: B200 (DGX B200, per GPU), H200, H100 SXM5 and PCIe
        _gpu("B200", 180, 8000, 2250, 4500),
        _gpu("H200", 141, 4800, 989, 1979),
        _gpu("H100", 80, 3350, 989, 1979),
        _gpu("H100-PCIe", 80, 2000, 756, 1513),
        # NVIDIA A100 data sheet (SXM), A10, L4, L40S, T4
        _gpu("A100", 80, 2039, 312, 624),
        _gpu("A100-40GB", 40, 1555, 312, 624),
        _gpu("L40S", 48, 864, 362, 733),
        _gpu("L4", 24, 300, 121, 242),
        _gpu("A10", 24, 600, 125, 250),
        _gpu("T4", 16, 320, 65, 130),
        # NVIDIA Ada and Blackwell architecture white papers (GeForce); Ampere GA102 white paper.
        # bf16 with fp32 accumulation
        _gpu("RTX5090", 32, 1792, 209.5, 838),
        _gpu("RTX4090", 24, 1008, 165.2, 660.6),
        _gpu("RTX3090", 24, 936, 71, 284),
        # AMD data sheets: Instinct MI300X, MI325X
        _gpu("MI300X", 192, 5300, 1307, 2615),
        _gpu("MI325X", 256, 6000, 1307, 2615),
    )
}


@dataclass(frozen=True, slots=True)
class Bound:
    """Hold an upper bound of tokens per second, and its cause: "bandwidth" or "compute"."""

    tokens_per_second: float
    limit: str


def _bound(
    tokens: float, bytes_read: float, operations: float, processor: Processor, format: WeightFormat
) -> Bound:
    reading = bytes_read / processor.bandwidth
    computing = operations / getattr(processor, format.compute)
    return Bound(
        tokens / max(reading, computing), "bandwidth" if reading >= computing else "compute"
    )


def decode_bound(
    shape: ModelShape,
    processor: Processor,
    format: WeightFormat,
    *,
    batch: int,
    context: int,
    kv: KvFormat,
) -> Bound:
    """Return the bound of decoding `batch` sequences of `context` tokens.

    A step reads the weights once, and the cache of every sequence: t = max(bytes / bandwidth,
        operations / rate).
    """
    matrices = matrix_bytes_read(shape, format, batch)
    seen = [min(context, layer.window or layer.chunk or context) for layer in shape.layers]
    cached = sum(kv.token_bytes(layer) * n for layer, n in zip(shape.layers, seen, strict=True))
    state = 2 * sum(layer.state for layer in shape.layers) * STATE_BYTES  # read and written
    attention = 2 * sum(layer.score_width * n for layer, n in zip(shape.layers, seen, strict=True))
    operations = batch * (2 * _active_matrices(shape) + attention)
    return _bound(batch, matrices + batch * (cached + state), operations, processor, format)


def prefill_bound(
    shape: ModelShape, processor: Processor, format: WeightFormat, *, tokens: int
) -> Bound:
    """Return the bound of a prompt of `tokens` tokens in one step, with the last token's logits."""
    pairs = [
        _pairs(tokens, layer.window or layer.chunk) * layer.score_width for layer in shape.layers
    ]
    operations = (
        2 * tokens * (_active_matrices(shape) - _head(shape)) + 2 * sum(pairs) + 2 * _head(shape)
    )
    return _bound(tokens, matrix_bytes_read(shape, format, tokens), operations, processor, format)


def matrix_bytes_read(shape: ModelShape, format: WeightFormat, tokens: int) -> float:
    """Return the bytes of all matrices that at least one of `tokens` tokens uses.

    Each token is assumed to choose its experts uniformly and independently.
    """
    parameters = shape.parameters
    touched = 1 - (1 - shape.expert_share) ** tokens
    elements = parameters.matrices - parameters.experts * (1 - touched)
    share = elements / max(parameters.matrices, 1)
    return format.matrix_bytes(parameters.matrices, parameters.matrix_rows) * share


def _active_matrices(shape: ModelShape) -> int:
    return shape.parameters.matrices - shape.parameters.experts + shape.parameters.active_experts


def _head(shape: ModelShape) -> int:
    return shape.vocab * shape.hidden


def _pairs(tokens: int, window: int | None) -> int:
    """Return the number of (query, visible key) pairs in a causal prompt."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window
