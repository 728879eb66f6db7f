"""Keep the first blocks of sequences that are longer than the pool in the offload tiers.

Unlike the copies that `Offload` keeps, nothing here is dropped before its sequence ends, for
nothing else could restore it: the room is reserved, and copies of other prompts are dropped for it.
Blocks are kept by layer, because a step reads one layer of the whole sequence at a time. What is
read from disk is verified.

Shapes: X bytes of a layer's block, C blocks.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from motet_kernels import gpu
from motet_shared.errors import ConfigError, InternalError

from .kv_cache import KvCache
from .offload import DISK, Offload

Rows = Mapping[int, Tensor]  # bytes of blocks by layer, `[C, X]` of uint8 on the CPU


class _InMemory:
    """Hold blocks of every layer in host memory."""

    def __init__(self, rows: Rows):
        self._rows = rows

    def read(self, layer: int) -> Tensor:
        return self._rows[layer]

    def close(self) -> None:
        self._rows = {}


class _OnDisk:
    """Hold blocks of every layer in a file, one layer after the other, each with a checksum.

    Raises OSError if the file cannot be written.
    """

    def __init__(self, rows: Rows, path: Path):
        self._path = path
        self._shapes = {layer: tuple(row.shape) for layer, row in rows.items()}
        starts = accumulate((row.nbytes for row in rows.values()), initial=0)
        self._starts = dict(zip(rows, starts, strict=False))
        self._checksums = {layer: _checksum(row) for layer, row in rows.items()}
        try:
            with path.open("xb") as file:
                for row in rows.values():
                    file.write(row.numpy().data)
        except OSError:
            self.close()
            raise

    def read(self, layer: int) -> Tensor:
        """Return a layer's blocks. Raises OSError if the bytes are missing or damaged."""
        shape = self._shapes[layer]
        count = shape[0] * shape[1]
        content = torch.from_numpy(
            np.fromfile(self._path, np.uint8, count, offset=self._starts[layer])
        )
        if len(content) != count or _checksum(content) != self._checksums[layer]:
            raise OSError("the bytes that were read are not those that were written")
        return content.view(shape)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _checksum(content: Tensor) -> int:
    return zlib.crc32(content.numpy().data)


class Spilled:
    """Hold the spilled first `num_blocks` blocks of a sequence, of each layer with full attention.

    failure: why they cannot be read or written, if so; the sequence is lost then.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self.failure: str | None = None
        self._pieces: list[tuple[int, int, _InMemory | _OnDisk]] = []  # blocks, tier

    def add(self, num_blocks: int, tier: int, content: _InMemory | _OnDisk) -> None:
        """Append the next blocks of the sequence."""
        self._pieces.append((num_blocks, tier, content))
        self.num_blocks += num_blocks

    def blocks_in(self, tier: int) -> int:
        return sum(count for count, where, _ in self._pieces if where == tier)

    def read(self, layer: int, into_PX: Tensor) -> None:
        """Copy a layer's blocks to the first rows of `into_PX`. Sets `failure` on errors.

        `into_PX` may be on any device.
        """
        start = 0
        for count, _, content in self._pieces:
            try:
                into_PX[start : start + count].copy_(content.read(layer), non_blocking=True)
            except OSError as error:
                self.failure = (
                    f"its first keys and values cannot be read back from disk_cache ({error})"
                )
                return
            start += count

    def close(self) -> None:
        for _, _, content in self._pieces:
            content.close()
        self._pieces = []


class Spill:
    """Move blocks out of the cache and release their room. Called between steps only."""

    def __init__(self, kv: KvCache, offload: Offload):
        self._kv = kv
        self._offload = offload
        self._groups = [g for g, group in enumerate(kv.groups) if group.full_attention]
        if not self._groups:
            raise ConfigError(
                "long_context=true: no layer of the model sees everything, so it needs no more; leave it off"
            )
        self._block_bytes = kv.bytes_in(
            [layer for g in self._groups for layer in kv.groups[g].layers]
        )
        self._files = 0
        self._num_spilled = 0

    @property
    def capacity(self) -> int:
        """Return the blocks of a sequence that fit into empty tiers."""
        return sum(limit // self._block_bytes for limit in self._offload.limits)

    @property
    def num_free(self) -> int:
        """Return the blocks for which there is room."""
        return sum(self._room(tier) for tier in range(len(self._offload.limits)))

    def _room(self, tier: int) -> int:
        return self._offload.unreserved(tier) // self._block_bytes

    def take(self, spilled: Spilled, tables: Sequence[Sequence[int]], count: int) -> None:
        """Copy a sequence's next `count` blocks, at most `num_free`. `tables`: of all groups.

        On failure the sequence is lost: `Spilled.failure` says why.
        """
        for tier in range(len(self._offload.limits)):
            size = min(count, self._room(tier))
            if not size:
                continue
            start = spilled.num_blocks
            rows = {
                layer: self._read(layer, tables[g][start : start + size])
                for g in self._groups
                for layer in self._kv.groups[g].layers
            }
            try:
                content = self._keep(tier, rows)
            except OSError as error:
                spilled.failure = (
                    f"its first keys and values cannot be written to disk_cache ({error})"
                )
                return
            self._offload.reserve(tier, size * self._block_bytes)
            spilled.add(size, tier, content)
            self._num_spilled += size
            count -= size

    def _read(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """Return a layer's blocks `[C, X]` as bytes, in pinned memory if the cache is on a GPU."""
        rows_CX = self._kv.rows(layer)[list(blocks)]
        if not gpu.is_gpu(rows_CX.device):
            return rows_CX
        return torch.empty(rows_CX.shape, dtype=torch.uint8, pin_memory=True).copy_(rows_CX)

    def _keep(self, tier: int, rows: Rows) -> _InMemory | _OnDisk:
        if tier != DISK:
            return _InMemory(rows)
        self._files += 1
        return _OnDisk(rows, self._offload.folder / f"{self._files}.spilled")

    def drop(self, spilled: Spilled) -> None:
        """Release the blocks of a sequence that has ended or is computed again."""
        for tier in range(len(self._offload.limits)):
            self._offload.unreserve(tier, spilled.blocks_in(tier) * self._block_bytes)
        spilled.close()

    def stats(self) -> dict[str, float]:
        """Return the number of blocks spilled since start, and the bytes spilled now.

        A block counts once for all layers with full attention.
        """
        reserved = sum(self._offload.reserved(tier) for tier in range(len(self._offload.limits)))
        return {"spilled_blocks": self._num_spilled, "spilled_bytes": reserved}

    def check_integrity(self, held: Iterable[Spilled]) -> None:
        """Raise InternalError unless exactly the blocks of `held` are reserved."""
        held = list(held)
        for tier in range(len(self._offload.limits)):
            counted = sum(spilled.blocks_in(tier) for spilled in held) * self._block_bytes
            if counted != self._offload.reserved(tier):
                raise InternalError(
                    f"tier {tier}: {self._offload.reserved(tier)} bytes reserved for spilled blocks, {counted} held"
                )
