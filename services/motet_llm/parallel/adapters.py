"""Hold the part of a model's adapters that a rank's part of the model needs.

The factors of a matrix are cut as the matrix is: `up` by its rows, `down` by its columns. What a
rank adds to its part of a product is then summed or joined with the product itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_llm.adapters.bank import AdapterBank, Matrix, ResidentAdapter
from motet_llm.adapters.folder import AdapterFolder
from motet_shared.errors import BadRequest

from . import commands as c
from .caches import Others
from .cuts.cut_modules import PART
from .cuts.shares import Share

# The end of the name of a matrix that is one shard of the checkpoint's (`cuts/fixed_tree.py`).
_SHARD = re.compile(r"\.parts\.\d+$")
Rows = list[Share]  # parts of a matrix that lie one after the other on a rank
Ranges = Mapping[str, tuple[Rows | None, Rows | None]]


def whole_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of a loaded model's matrices, before it is cut and packed."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }


class RankAdapterBank(AdapterBank):
    """Hold a rank's part of the adapters.

    whole: shapes of the uncut model's matrices. ranges: the rows and columns of those that are cut.
    absent: tells which matrices are on other ranks. others: the ranks that hold what this one
    holds; None unless it leads.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        matrices: Mapping[str, Matrix],
        *,
        whole: Mapping[str, tuple[int, int]],
        ranges: Ranges,
        absent: Callable[[str], bool],
        others: Others | None,
        **options: Any,
    ):
        self._whole, self._ranges, self._absent = whole, ranges, absent
        self._others = others
        super().__init__(folders, {_own_name(name): m for name, m in matrices.items()}, **options)

    def _shapes_in_files(self) -> dict[str, tuple[int, int]]:
        held = {self._file_name(matrix) for matrix in self._matrices}
        return {
            name: shape for name, shape in self._whole.items() if name in held or self._absent(name)
        }

    def _file_name(self, matrix: str) -> str:
        return _SHARD.sub("", matrix)

    def _own(self, matrix: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = self._ranges.get(matrix, (None, None))
        if columns is not None:
            down = torch.cat([down[:, part.begin : part.end] for part in columns], dim=1)
        if rows is not None:
            up = torch.cat([up[part.begin : part.end] for part in rows])
        return down, up

    def add(self, name: str, found: AdapterFolder | BadRequest) -> bool:
        moved = super().add(name, found)
        if self._others is not None and isinstance(found, AdapterFolder):
            self._others.send(c.AddAdapter(name, str(found.path)))
        return moved

    def remove(self, name: str) -> None:
        super().remove(name)
        if self._others is not None:
            self._others.send(c.RemoveAdapter(name))

    def load(self, name: str, slot: int) -> ResidentAdapter:
        """Load an adapter into an unused slot of all ranks, from any thread."""
        loaded = super().load(name, slot)
        done = [] if self._others is None else self._others.ask(c.LoadAdapter(name, slot))
        for one in done:
            if one.error:
                raise BadRequest(one.error, param="model")
        return loaded


def _own_name(name: str) -> str:
    """Return the checkpoint's name of a matrix that may be within a module of a cut model."""
    return name.removesuffix(f".{PART}")
