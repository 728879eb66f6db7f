"""Store the keys and values of texts that decoders attend to (cross-attention), slot by slot.

An encoder reads the text of a sentence once; the layers of its decoder write their keys and values
of it when the sentence joins and read them with every frame. transformers' layers expect an
`EncoderDecoderCache`.

Shapes: B rows, H key-value heads, T positions of the longest text, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import EncoderDecoderCache

from .kv_slots import SlotBatch


@dataclass(frozen=True, slots=True)
class _Layer:
    """Hold the keys and values of one layer, `[B, H, T, D]`."""

    keys: Tensor
    values: Tensor


class _Layers:
    """Read the layers of a batch of texts by their index."""

    def __init__(self, batch: SlotBatch):
        self._batch = batch

    def __getitem__(self, index: int) -> _Layer:
        return _Layer(*self._batch.read(index))


class _TextCache:
    """Store or read keys and values of texts, as transformers' cross-attention does."""

    def __init__(self, batch: SlotBatch):
        self.layers = _Layers(batch)
        self.update = batch.update


class DecoderCache(EncoderDecoderCache):  # type: ignore[misc]  # transformers has no types here
    """Represent a decoder's own slots and those of its texts as one cache of transformers.

    text: with the positions of a new text, which are then written, or with none, to read.
    """

    def __init__(self, own: SlotBatch, text: SlotBatch):
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = _TextCache(text)
        self.is_updated: dict[int, bool] = {} if text.count else _Always()


class _Always(dict[int, bool]):
    """Tell for each layer that its text is stored."""

    def get(self, key: int, default: Any = None) -> bool:
        return True
