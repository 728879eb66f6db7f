"""The memory behind the block tables: keys and values of every layer, in blocks.

Shapes: P blocks, S slots per block, K key/value heads, D head dimension (values may have another), N packed tokens,
B rows, M blocks per row, T = M·S keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class KvCache:
    """One pair of tensors `[num_blocks + 1, block_size, heads, dim]` per layer.

    The last block belongs to nobody and stays zero: block tables are padded with it, because a masked key still
    takes part in the matrix product, and a stray NaN of another request must not.
    """

    def __init__(self, layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.null_block = num_blocks
        blocks = (num_blocks + 1, block_size)
        self._keys = [torch.zeros(*blocks, s.heads, s.key_dim, dtype=dtype) for s in layers]
        self._values = [torch.zeros(*blocks, s.heads, s.value_dim, dtype=dtype) for s in layers]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in [*self._keys, *self._values])

    def write(self, layer: int, slots_N: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> None:
        """Store the packed tokens of a step. A slot is `block · block_size + offset`."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots_N, key_NKD)
        self._values[layer].flatten(0, 1).index_copy_(0, slots_N, value_NKD)

    def gather(self, layer: int, tables_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole rows, `[B, K, T, D]` each, in the order of their positions."""
        return _gather(self._keys[layer], tables_BM), _gather(self._values[layer], tables_BM)

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that a failed request wrote NaN into, before anyone else gets them."""
        for tensor in (*self._keys, *self._values):
            tensor[blocks] = 0


def bytes_per_block(layers: list[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    return sum(s.elements for s in layers) * block_size * dtype.itemsize


def _gather(cache_PSKD: Tensor, tables_BM: Tensor) -> Tensor:
    # Blocks as flat rows: index_select copies those as wholes, twice as fast as it copies blocks of three dimensions.
    blocks = cache_PSKD.flatten(1).index_select(0, tables_BM.view(-1))
    return blocks.view(len(tables_BM), -1, *cache_PSKD.shape[2:]).transpose(1, 2)
