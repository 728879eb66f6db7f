"""Copy cache blocks within a cache, gather them into bytes for transfer, and scatter them back.

A cache consists of several storages; block p is row p of every storage, and its bytes are those
rows concatenated.

Shapes: P blocks, B of them, X bytes of a block in all storages together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.arguments import check_device
from motet_kernels.runtime.errors import KernelError

if TYPE_CHECKING:
    from motet_kernels.gpu.attention.blocks import Storages


class Blocks:
    """Copy, read and write blocks of storages `[P, …]` with dense rows on one device.

    Storages may differ in type and row size. Each call is one launch on a GPU, whatever the number
    of storages and blocks. Raises `KernelError` on storages or blocks that do not fit, before
    anything is written.
    """

    def __init__(self, storages: Sequence[Tensor]):
        self.storages = [
            _rows(f"storages[{i}]", tensor, storages[0]) for i, tensor in enumerate(storages)
        ]
        self.count = len(storages[0]) if storages else 0
        self.nbytes = sum(tensor.shape[1] for tensor in self.storages)
        self._kernels: Storages | None = None
        if storages and gpu.takes(storages[0]):
            from motet_kernels.gpu.attention import blocks as kernels

            self._kernels = kernels.Storages(self.storages)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block `sources[i]` to block `targets[i]`.

        Raises `KernelError` unless the targets are distinct and none of them is a source.
        """
        self._check("sources", sources)
        self._check("targets", targets)
        if len(sources) != len(targets):
            raise KernelError(
                f"targets: {len(targets)} blocks must be as many as the {len(sources)} sources"
            )
        if len(set(targets)) < len(targets) or not set(targets).isdisjoint(sources):
            raise KernelError(
                f"targets: {list(targets)} must be distinct and none of the sources {list(sources)}"
            )
        if self._kernels is not None:
            self._kernels.copy(sources, targets)
            return
        for storage in self.storages:
            for source, target in zip(sources, targets, strict=True):
                storage[target].copy_(storage[source])

    def read(self, blocks: Sequence[int]) -> Tensor:
        """Return the bytes of `blocks`, uint8 `[B, X]`, on the cache's device."""
        self._check("blocks", blocks)
        if self._kernels is not None:
            return self._kernels.read(blocks)
        device = self.storages[0].device if self.storages else None
        out_BX = torch.empty(len(blocks), self.nbytes, dtype=torch.uint8, device=device)
        for block, out_X in zip(blocks, out_BX, strict=True):
            torch.cat([storage[block] for storage in self.storages], out=out_X)
        return out_BX

    def write(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Write rows `[X]` as returned by `read` into as many distinct `blocks`.

        `contents` are on the cache's device or the CPU.
        """
        self._check("blocks", blocks)
        if len(contents) != len(blocks) or len(set(blocks)) < len(blocks):
            raise KernelError(
                f"blocks: {list(blocks)} must be distinct and as many as the {len(contents)} contents"
            )
        for i, content_X in enumerate(contents):
            if content_X.dtype != torch.uint8 or content_X.shape != (self.nbytes,):
                what = f"{content_X.dtype} {list(content_X.shape)}"
                raise KernelError(f"contents[{i}]: {what} must be torch.uint8 [{self.nbytes}]")
        if self._kernels is not None:
            self._kernels.write(blocks, contents)
            return
        sizes = [storage.shape[1] for storage in self.storages]
        for block, content_X in zip(blocks, contents, strict=True):
            for storage, part in zip(self.storages, content_X.split(sizes), strict=True):
                storage[block].copy_(part)

    def _check(self, name: str, blocks: Sequence[int]) -> None:
        bad = next((i for i, block in enumerate(blocks) if not 0 <= block < self.count), None)
        if bad is not None:
            raise KernelError(
                f"{name}[{bad}]: block {blocks[bad]} must be from 0 to {self.count - 1}"
            )


def _rows(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """Return a view of a storage as rows of bytes."""
    if not tensor.dim() or len(tensor) != len(like) or not tensor.is_contiguous():
        raise KernelError(
            f"{name}: shape {list(tensor.shape)}, strides {list(tensor.stride())}, must be dense blocks, "
            "as many as the first storage has"
        )
    check_device(name, tensor, "storages[0]", like)
    return tensor.view(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)
