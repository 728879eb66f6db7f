"""Compute how much memory a model needs: for `motet plan` and for the engine's own pool.

The KV cache is one pool of equal blocks. Layers with the same eviction (none, or the same window or
chunk) form a kind; every kind is divided into groups of at most `g` layers, where `g` is the number of
layers of the smallest kind. A block holds `block_size` tokens of one group's layers, and all groups
store into the same `g` tensors (the scheme of vLLM's hybrid KV cache manager). Recurrent state is
kept per sequence, outside the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from motet_shared.errors import ConfigError

from .graph_sizes import StepShape, graph_bytes, graph_sizes
from .model_shape import LayerCache, ModelShape
from .weight_formats import WEIGHT_FORMATS, CheckpointCodes, WeightFormat, weight_bytes

STATE_BYTES = 4  # bytes per number: recurrent state is float32


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """Sink and window of layers with full attention, in tokens that are whole blocks.

    A query sees the `first` tokens of a sequence, the `last` ones before its own block, and its
    block up to itself.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Group layers with one block table, by their indices in the model.

    Layer `layers[j]` lives in storage tensor `j`.
    window: number of tokens that a query attends to, including itself.
    chunk: a query attends to the tokens of its own chunk of that length, up to itself. Neither: all
        tokens, or those of `sink_window`.
    """

    layers: tuple[int, ...]
    window: int | None = None
    sink_window: SinkWindow | None = None
    chunk: int | None = None

    @property
    def full_attention(self) -> bool:
        """Return True if every query attends to all tokens up to itself."""
        return not self.is_local and self.sink_window is None

    @property
    def is_local(self) -> bool:
        """Return True if the model's own windows or chunks bound what a query attends to."""
        return self.window is not None or self.chunk is not None

    def first_seen(self, position: int) -> int:
        """Return the first token that a query at `position` sees, except for gaps of `sink_window`."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def gap(self, position: int, block_size: int) -> range:
        """Return the indices of blocks to which no query at `position` or later attends."""
        if self.sink_window is not None:
            first = self.sink_window.first // block_size
            return range(first, max(first, (position - self.sink_window.last) // block_size))
        return range(self.first_seen(position) // block_size)

    def most_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Return the most blocks that a sequence of `tokens` tokens holds at a time.

        `step_tokens` is the most tokens computed per step. A local group holds the blocks of the
        window (or chunk) and of the step, which may begin and end inside a block.
        """
        whole = -(-tokens // block_size)
        if self.sink_window is not None:
            kept = (self.sink_window.first + self.sink_window.last) // block_size
            return min(whole, kept + (step_tokens + block_size - 2) // block_size + 1)
        most_seen = self.window or self.chunk
        if most_seen is None:
            return whole
        kept = most_seen - 1 + step_tokens
        return min(whole, (kept + block_size - 2) // block_size + 1)


def group_layers(
    windows: Mapping[int, int | None],
    sink_window: SinkWindow | None = None,
    chunks: Mapping[int, int] | None = None,
) -> list[KvGroup]:
    """Divide layers (index: window) into groups; chunks: by layer, of those that have chunks.

    Groups that are not local (with full attention, or `sink_window`) come first, then the others by
    window and chunk.
    """
    kinds: dict[tuple[int | None, int | None], list[int]] = {}
    for layer, window in sorted(windows.items()):
        kinds.setdefault((window, (chunks or {}).get(layer)), []).append(layer)
    size = min(map(len, kinds.values()), default=1)
    return [
        KvGroup(
            tuple(layers[start : start + size]),
            window,
            sink_window if window is None and chunk is None else None,
            chunk,
        )
        for (window, chunk), layers in sorted(
            kinds.items(), key=lambda kind: tuple(size or 0 for size in kind[0])
        )
        for start in range(0, len(layers), size)
    ]


def slot_sizes(sizes: Mapping[int, int], groups: Iterable[KvGroup]) -> list[int]:
    """Return the size per token of each storage tensor: that of its widest layer.

    `sizes` is by layer, in any unit.
    """
    slots: list[int] = []
    for group in groups:
        for index, layer in enumerate(group.layers):
            if index == len(slots):
                slots.append(0)
            slots[index] = max(slots[index], sizes[layer])
    return slots


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Describe the layout of a model's layers in a pool of blocks of `block_bytes` bytes."""

    groups: tuple[KvGroup, ...]
    block_size: int
    block_bytes: int

    def blocks_for(self, tokens: int, step_tokens: int) -> int:
        """Return the most blocks that a sequence of `tokens` tokens holds, over all groups."""
        return sum(group.most_blocks(tokens, step_tokens, self.block_size) for group in self.groups)

    def blocks_in(self, memory: int) -> int:
        """Return the blocks of a pool of at most `memory` bytes, excluding the padding block."""
        return max(0, memory // self.block_bytes - 1)

    def longest(self, num_blocks: int, step_tokens: int) -> int:
        """Return the tokens of the longest sequence in `num_blocks`; 2^40 if unlimited.

        Sequences are unlimited if all layers have windows.
        """
        low, high = 0, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high)
                if self.blocks_for(middle, step_tokens) <= num_blocks
                else (low, middle)
            )
        return low


def kv_layout(
    windows: Mapping[int, int | None],
    token_bytes: Mapping[int, int],
    block_size: int,
    sink_window: SinkWindow | None = None,
    chunks: Mapping[int, int] | None = None,
) -> KvLayout:
    """Return the layout of layers that cache `token_bytes` per token; all maps are by layer.

    Raises ConfigError if no layer has a KV cache, or a chunk does not consist of whole blocks.
    """
    if not windows:
        raise ConfigError(
            "model: has no layer with a KV cache; give a model with attention", param="model"
        )
    if broken := [size for size in (chunks or {}).values() if size % block_size]:
        raise ConfigError(
            f"block_size={block_size}: layers attend in chunks of {broken[0]} tokens; give a number"
            " that divides that",
            param="block_size",
        )
    groups = group_layers(windows, sink_window, chunks)
    return KvLayout(tuple(groups), block_size, sum(slot_sizes(token_bytes, groups)) * block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """Number format of the KV cache: bytes per number, and per row of a head for its scale."""

    name: str
    element_bytes: int
    row_bytes: int = 0

    def token_bytes(self, layer: LayerCache) -> int:
        """Return the bytes that a token occupies in a layer."""
        return layer.elements * self.element_bytes + layer.rows * self.row_bytes


KV_FORMATS = {
    "float32": KvFormat(name="float32", element_bytes=4),
    "bfloat16": KvFormat(name="bfloat16", element_bytes=2),
    "int8": KvFormat(name="int8", element_bytes=1, row_bytes=4),
    "float8": KvFormat(name="float8", element_bytes=1, row_bytes=4),
}


def layout_of(layers: Iterable[LayerCache], block_size: int, kv: KvFormat) -> KvLayout:
    """Return the layout of a model that is known only by its shape."""
    attending = {index: layer for index, layer in enumerate(layers) if layer.elements}
    windows = {index: layer.window for index, layer in attending.items()}
    sizes = {index: kv.token_bytes(layer) for index, layer in attending.items()}
    chunks = {i: layer.chunk for i, layer in attending.items() if layer.chunk is not None}
    return kv_layout(windows, sizes, block_size, chunks=chunks)


def state_bytes(layers: Iterable[LayerCache]) -> int:
    """Return the bytes of recurrent state of one sequence."""
    return sum(layer.state for layer in layers) * STATE_BYTES


def format_bytes(number: int) -> str:
    """Format bytes for display, in a unit that keeps significant digits."""
    unit, size = next(
        ((u, s) for u, s in (("GiB", 1 << 30), ("MiB", 1 << 20)) if number >= s), ("KiB", 1 << 10)
    )
    return f"{number / size:.2f} {unit}"


# --------------------------------------------------------------------------------------------- plan
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Divide memory by use, and hold the resulting capacity; sizes in bytes.

    kv: the pool, in whole blocks.
    num_blocks: blocks for sequences; the pool has one more, which pads block tables.
    graphs: decode steps as CUDA graphs.
    states: recurrent state of `max_running` sequences and as many snapshots for the prefix cache.
    per_sequence: KV of one sequence of `context` tokens; per_token: bytes of a further token as
        long as no window evicts.
    sequences: how many sequences of `context` tokens fit into the pool; running: at most
        `max_running` of them.
    longest: longest single sequence in tokens, at most the model's own limit.
    """

    memory: int
    weights: int
    activations: int
    graphs: int
    overhead: int
    states: int
    kv: int
    block_size: int
    block_bytes: int
    num_blocks: int
    context: int
    per_token: int
    per_sequence: int
    sequences: int
    running: int
    longest: int

    @property
    def used(self) -> int:
        """Return the bytes of all uses together."""
        own = self.weights + self.activations + self.graphs
        return own + self.overhead + self.states + self.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hold engine settings that determine memory, with the engine's defaults.

    codes: formats of a quantized checkpoint's own codes; None: it has none.
    activation_bytes: bytes of one activation.
    cuda_graphs: decode steps are captured as CUDA graphs.
    overhead: bytes besides weights, activations, states and KV cache.
    """

    weights: WeightFormat = WEIGHT_FORMATS["bfloat16"]
    codes: CheckpointCodes | None = None
    kv: KvFormat = KV_FORMATS["bfloat16"]
    activation_bytes: int = 4
    block_size: int = 16
    token_budget: int = 512
    max_running: int = 64
    prefix_cache: bool = True
    cuda_graphs: bool = False
    overhead: int = 0


def activation_bytes(shape: ModelShape, settings: Settings) -> int:
    """Return the most bytes that one step allocates at a time.

    This is a layer's rows for every token of the budget, and the logits. Rows: residual stream,
    normed input, attention's input and output, and the widest product with its activation. Logits:
    float32, twice, because sampling makes a copy.
    """
    rows = settings.token_budget * (4 * shape.hidden + 2 * shape.widest) * settings.activation_bytes
    return rows + 2 * settings.max_running * shape.vocab * 4


def _graph_bytes(shape: ModelShape, settings: Settings, layout: KvLayout, context: int) -> int:
    """Return the bytes of CUDA graphs; a model with recurrent state has none."""
    if not settings.cuda_graphs or state_bytes(shape.layers):
        return 0
    step = StepShape(
        hidden=shape.hidden,
        widest=shape.widest,
        vocab=shape.vocab,
        elements=max(layer.elements for layer in shape.layers),
        groups=len(layout.groups),
        element_bytes=settings.activation_bytes,
    )
    sizes = graph_sizes(settings.max_running, context, settings.block_size)
    return graph_bytes(sizes, step, settings.block_size)


def plan(shape: ModelShape, settings: Settings, memory: int, context: int) -> Plan:
    """Divide `memory` bytes among weights, activations, states and the KV pool.

    Raises ConfigError if weights or one sequence do not fit, with the memory that would suffice.
    """
    if shape.context and context > shape.context:
        raise ConfigError(
            f"context={context}: the model goes up to {shape.context} tokens; give at most that",
            param="context",
        )
    layout = layout_of(shape.layers, settings.block_size, settings.kv)
    slots = settings.max_running * (2 if settings.prefix_cache else 1)
    weights, states = (
        weight_bytes(shape, settings.weights, settings.codes),
        slots * state_bytes(shape.layers),
    )
    activations = activation_bytes(shape, settings)
    graphs = _graph_bytes(shape, settings, layout, shape.context or context)
    taken = weights + activations + graphs + settings.overhead + states
    per_sequence = layout.blocks_for(context, settings.token_budget)
    num_blocks = layout.blocks_in(memory - taken)
    if num_blocks < per_sequence:
        least = taken + (per_sequence + 1) * layout.block_bytes
        raise ConfigError(
            f"memory={format_bytes(memory)}: weights, activations, graphs, states and overhead take"
            f" {format_bytes(taken)}, and a sequence of {context} tokens"
            f" {format_bytes(least - taken)}; give at least {format_bytes(least)}, a shorter context,"
            " or smaller weights",
            param="memory",
        )
    longest = layout.longest(num_blocks, settings.token_budget)
    return Plan(
        memory=memory,
        weights=weights,
        activations=activations,
        graphs=graphs,
        overhead=settings.overhead,
        states=states,
        kv=(num_blocks + 1) * layout.block_bytes,
        block_size=settings.block_size,
        block_bytes=layout.block_bytes,
        num_blocks=num_blocks,
        context=context,
        per_token=sum(map(settings.kv.token_bytes, shape.layers)),
        per_sequence=per_sequence * layout.block_bytes,
        sequences=num_blocks // per_sequence,
        running=min(num_blocks // per_sequence, settings.max_running),
        longest=min(longest, shape.context or longest),
    )
