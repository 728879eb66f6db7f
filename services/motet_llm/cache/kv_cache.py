"""Hold the memory behind the block tables, which groups of layers share.

Each group of layers has a block table of its own; all groups store into the same tensors and so
draw on one pool of blocks. `motet_models.capacity` has the rule, because capacity plans use it too.

Shapes: P blocks, K key/value heads, S slots per block, D head dimension (values may have another),
N packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet_kernels.attention.blocks import Blocks
from motet_kernels.attention.kv import store_kv
from motet_kernels.attention.kv_format import CODED, decode, row_size
from motet_kernels.attention.rotary import PackedHeads, rotate_store_kv
from motet_kernels.runtime.memory import huge_zeros
from motet_models.capacity import KvLayout, SinkWindow, kv_layout, slot_sizes

from .first_use import FirstUse

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Describe what one attention layer keeps per token.

    window: tokens attended to, the current one included.
    chunk: length of the chunks within which tokens are attended to.

    A latent layer (MLA) keeps one "head" that is key and value at once: its `value_dim` is 0.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None

    @property
    def elements(self) -> int:
        """Return the numbers per token, without scales."""
        return self.heads * (self.key_dim + self.value_dim)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes per token, scales included."""
        elements = sum(row_size(dim, dtype) for dim in (self.key_dim, self.value_dim) if dim)
        return self.heads * elements * dtype.itemsize


def layout_of(
    shapes: Mapping[int, LayerShape],
    block_size: int,
    dtype: torch.dtype,
    sink_window: SinkWindow | None = None,
) -> KvLayout:
    """Return how these layers share blocks."""
    windows = {layer: shape.window for layer, shape in shapes.items()}
    chunks = {layer: shape.chunk for layer, shape in shapes.items() if shape.chunk is not None}
    sizes = {layer: shape.nbytes(dtype) for layer, shape in shapes.items()}
    return kv_layout(windows, sizes, block_size, sink_window, chunks)


def zeros(rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Return zeroed memory `[rows, row_bytes]`; a CPU's pages are taken when first written to."""
    if device.type != "cpu":
        return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)
    return huge_zeros((rows, row_bytes), torch.uint8)


class KvCache:
    """Hold keys and values of every layer, `[P + 1, K, S, D]` each: views into shared storage.

    The last block is the null block: it stays zero and fills block tables where a window has
    passed.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        sink_window: SinkWindow | None = None,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.null_block = num_blocks
        self.device = device
        self.layout = layout_of(shapes, block_size, dtype, sink_window)
        self.groups = self.layout.groups
        self.group_of = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        held = {
            layer: shape.nbytes(dtype) if self.holds(layer) else 0
            for layer, shape in shapes.items()
        }
        sizes = slot_sizes(held, self.groups)
        storage = {
            j: zeros(num_blocks + 1, size * block_size, device)
            for j, size in enumerate(sizes)
            if size
        }
        self._storage = list(storage.values())
        self._first_use = FirstUse(self._storage if device.type == "cpu" else [])
        self._blocks = Blocks(self._storage)
        self._shapes = shapes
        self._storage_of: dict[int, Tensor] = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for group in self.groups:
            for j, layer in enumerate(group.layers):
                if self.holds(layer):
                    self._storage_of[layer] = storage[j]
                    self._layers[layer] = self.views(layer, storage[j])

    def holds(self, layer: int) -> bool:
        """Return True for a layer whose keys and values are in this process: every one."""
        return True

    def views(self, layer: int, storage: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as `layer` does, for storage `[P, X]` of P blocks of X bytes."""
        shape = self._shapes[layer]
        elements = storage.view(self.dtype)
        rows, key_size = shape.heads * self.block_size, row_size(shape.key_dim, self.dtype)
        key = elements[:, : rows * key_size].unflatten(1, (shape.heads, self.block_size, key_size))
        if not shape.value_dim:
            return key, key
        value_size = row_size(shape.value_dim, self.dtype)
        values = elements[:, rows * key_size :][:, : rows * value_size]
        return key, values.unflatten(1, (shape.heads, self.block_size, value_size))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._storage)

    def take_page(self, blocks: int) -> bool:
        """Take memory that the first `blocks` are yet to use; see `FirstUse.take_page`."""
        return self._first_use.take_page(blocks)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[P + 1, K, S, D]` of a layer.

        8-bit types have their scales appended to D. A latent layer returns its one tensor twice.
        """
        return self._layers[layer]

    def rows(self, layer: int) -> Tensor:
        """Return the storage of a layer's blocks, `[P + 1, X]`, X bytes each.

        Other groups use the same storage for layers of theirs.
        """
        return self._storage_of[layer]

    def bytes_in(self, layers: Iterable[int]) -> int:
        """Return the bytes of one block in all of these layers together."""
        return sum(self._storage_of[layer].shape[1] for layer in layers)

    def write(self, layer: int, key_NKD: Tensor, value_NKD: Tensor | None, slots_N: Tensor) -> None:
        """Store the packed tokens of a step. A latent layer has no values.

        slots_N: `block · block_size + offset` of each token.
        """
        key, value = self._layers[layer]
        store_kv(key_NKD, value_NKD, key, None if value_NKD is None else value, slots_N)

    def widths(self, layer: int) -> list[tuple[int, int]]:
        """Return heads and dimension of a layer's keys and of its values, as transfers have them.

        A latent layer has keys alone.
        """
        shape = self._shapes[layer]
        return [(shape.heads, dim) for dim in (shape.key_dim, shape.value_dim) if dim]

    def collect(self, layer: int, slots_N: Tensor) -> list[Tensor]:
        """Return rows of keys and of values for another engine, as `pick` does."""
        return self.pick(layer, slots_N)

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor | None, slots_N: Tensor) -> None:
        """Store keys and values that another engine has computed, as `write` does."""
        self.write(layer, key_NKD, value_NKD, slots_N)

    def put(self, layer: int, rows: Sequence[Tensor], slots_N: Tensor) -> None:
        """Store rows of keys and of values `[N, K, …]` as they are, in the cache's type.

        Scales are included.
        """
        for cache, row in zip(self.tensors(layer), rows, strict=True):
            blocks_N, places_N = slots_N // self.block_size, slots_N % self.block_size
            cache.view(torch.uint8)[blocks_N, :, places_N] = row.view(torch.uint8)

    def slots(self, table: Sequence[int], first: int, end: int) -> Tensor:
        """Return the slots of places `first` to `end` of a block table, on the cache's device."""
        places_N = torch.arange(first, end)
        begin = first // self.block_size
        blocks = torch.tensor(table[begin : -(-end // self.block_size)], dtype=torch.int64)
        slots_N = (
            blocks[places_N // self.block_size - begin] * self.block_size
            + places_N % self.block_size
        )
        return slots_N.to(self.device)

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """Return keys and values as `layer` does; of a latent layer its one tensor."""
        key, value = self._layers[layer]
        return (key,) if value is key else (key, value)

    def pick(self, layer: int, slots: Tensor) -> list[Tensor]:
        """Return rows of keys and of values `[N, K, …]`, as `put` takes them.

        A latent layer returns keys only.

        slots: `[N]` for all heads, or `[N, K]` for each head its own.
        """
        slots_NK = slots if slots.ndim == 2 else slots[:, None]
        caches = self.tensors(layer)
        heads_K = torch.arange(caches[0].shape[1], device=slots.device)
        return [self._rows(cache, slots_NK, heads_K) for cache in caches]

    def keys(self, layer: int, head: int, slots_N: Tensor) -> Tensor:
        """Return the keys of one head, float32 `[N, D]`."""
        rows_ND = self._rows(self._layers[layer][0], slots_N, head)
        return decode(rows_ND) if self.dtype in CODED else rows_ND.float()

    def _rows(self, cache_PKSD: Tensor, slots: Tensor, heads: Tensor | int) -> Tensor:
        """Return copies of the rows at these slots and heads, shaped by both broadcast together.

        The memory of all blocks is viewed as one tensor of rows that begin every `step` bytes:
        copying by a single index is five times as fast as indexing by three.
        """
        bytes_PKSD = cache_PKSD.view(torch.uint8)
        size, block = bytes_PKSD.shape[-1], bytes_PKSD.stride(0)
        step = math.gcd(size, block)
        last = (len(bytes_PKSD) - 1) * block + bytes_PKSD[0].numel() - size
        rows = bytes_PKSD.as_strided((last // step + 1, size), (step, 1))
        begins = (
            slots // self.block_size * block
            + (heads * self.block_size + slots % self.block_size) * size
        )
        picked = rows.index_select(0, (begins // step).flatten())
        return picked.view(*begins.shape, size).view(self.dtype)

    def write_heads(self, layer: int, heads: PackedHeads, slots_N: Tensor) -> Tensor:
        """Store a step's rotated keys and its values; return its rotated queries `[N, H, D]`."""
        return rotate_store_kv(heads, *self._layers[layer], slots_N)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of any group. No block may be both source and target."""
        self._blocks.copy(sources, targets)

    def read_block(self, block: int) -> Tensor:
        """Return the bytes of a block, all layers of its group, as a new tensor on the CPU."""
        return self._blocks.read([block])[0].cpu()

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Write what `read_block` returned into blocks."""
        self._blocks.write(blocks, contents)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero blocks into which a failed request wrote NaN, before they are allocated again."""
        for storage in self._storage:
            storage[list(blocks)] = 0
