"""Hold a model's adapters: their folders, the slots with their factors, and their use in a step.

Each matrix that some adapter changes has room for the factors of as many adapters as may be
resident (`motet_kernels.linear.lora`), beside the packed weights; the parts of a joined product
have factors of their own, and replayed steps read them like any other tensor. Steps without an
adapter compute what they compute without a bank. Which adapter is in which slot, and when it is
evicted, is decided by `adapter_cache.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_kernels.linear.linear import Linear
from motet_kernels.linear.lora import LoraFactors
from motet_kernels.linear.segments import FREE, Segments
from motet_llm.disaggregation.kv_transfer import adapted
from motet_llm.models.joined_linear import JoinedPart
from motet_shared.errors import BadRequest, ConfigError
from motet_shared.messages import ModelCard

from .folder import CONFIG, AdapterFolder

log = logging.getLogger(__name__)

# Experts compute some rows of a step, in an order of their own; joined products are found by the
# names of their parts.
_NO_MATRICES = {"experts", "joined"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Locate a matrix of the checkpoint: features `start` to `stop` of a product."""

    linear: Linear
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        return self.stop - self.start, self.linear.in_features


def find_matrices(model: PreTrainedModel) -> dict[str, Matrix]:
    """Return the matrices that compute all rows of a step, by their names in the checkpoint.

    The model must be packed, with modules that still have these names. Embeddings and the head are
    left out: the head computes a few rows only.
    """
    ends = [
        part
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
        if part is not None
    ]
    outside = {id(inner) for part in ends for inner in part.modules()}
    found: dict[str, Matrix] = {}
    for name, module in model.named_modules():
        if id(module) in outside or not _NO_MATRICES.isdisjoint(name.split(".")):
            continue
        if isinstance(module, JoinedPart):
            found[name] = Matrix(module.joined.linear, module.start, module.stop)
        elif isinstance(module, Linear):
            found[name] = Matrix(module, 0, module.out_features)
    return found


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """Represent a resident adapter, valid while it is held.

    root: first key of its prefix-cache chains.
    """

    name: str
    slot: int
    root: int


def named_folders(given: Sequence[str], folder: str, taken: str) -> dict[str, Path]:
    """Return adapters by name, from pairs "name=path" and the subfolders of `folder`.

    Subfolders are adapters of their own names. Raises ConfigError for anything that is no such
    pair, and for a name given twice or `taken` by the model.
    """
    pairs = [("adapters", one, *one.partition("=")[::2]) for one in given]
    if folder:
        if not Path(folder).is_dir():
            raise ConfigError(
                f"adapter_folder={folder!r}: no such folder; give one whose subfolders are adapters"
            )
        inner = sorted(path for path in Path(folder).iterdir() if (path / CONFIG).is_file())
        pairs += [("adapter_folder", str(path), path.name, str(path)) for path in inner]
    found: dict[str, Path] = {}
    for field, one, name, path in pairs:
        if not name or not path:
            raise ConfigError(f"{field}={one!r}: give each adapter as name=folder")
        if name == taken or name in found:
            raise ConfigError(
                f"{field}={one!r}: {name!r} is the name of another; give it one of its own"
            )
        found[name] = Path(path)
    return found


class AdapterBank:
    """Hold the adapters in `folders`, by name, for a model of these matrices.

    Up to `slots` of them may be resident, each of at most `max_rank`. An adapter that cannot be
    served is logged, and requests for it are refused. dtype: of the factors.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        matrices: Mapping[str, Matrix],
        *,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.refused: dict[str, str] = {}  # reasons by name
        self._device = device
        self._segments: Segments | None = None
        shapes = {name: matrix.shape for name, matrix in matrices.items()}
        self._folders: dict[str, AdapterFolder] = {}
        for name, path in folders.items():
            self._read_folder(name, path, shapes, max_rank)
        self.slots = min(slots, max(len(self._folders), 1))
        self._factors = self._make_factors(shapes, dtype)
        self._attach(matrices)

    def _read_folder(
        self, name: str, path: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int
    ) -> None:
        try:
            self._folders[name] = AdapterFolder.read(name, path, shapes, max_rank)
        except BadRequest as error:
            self.refused[name] = error.message
            log.warning("an adapter cannot be served", extra={"reason": error.message})
        else:
            log.info(
                "adapter found", extra={"adapter": name, "trained_for": self._folders[name].base}
            )

    def _make_factors(
        self, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
    ) -> dict[str, LoraFactors]:
        ranks: dict[str, int] = {}
        for folder in self._folders.values():
            for matrix, pair in folder.pairs.items():
                ranks[matrix] = max(ranks.get(matrix, 0), pair.rank)
        return {
            name: LoraFactors(
                self.slots, rank, shapes[name][1], shapes[name][0], dtype, self._device
            )
            for name, rank in ranks.items()
        }

    def _attach(self, matrices: Mapping[str, Matrix]) -> None:
        parts: dict[Linear, list[tuple[int, int, LoraFactors]]] = {}
        for name, factors in self._factors.items():
            matrix = matrices[name]
            parts.setdefault(matrix.linear, []).append((matrix.start, matrix.stop, factors))
        for linear, changed in parts.items():
            linear.register_forward_hook(partial(self._add, changed))

    def _add(
        self,
        parts: list[tuple[int, int, LoraFactors]],
        _linear: nn.Module,
        inputs: tuple[Any, ...],
        out: Tensor,
    ) -> None:
        if self._segments is not None:
            for start, stop, factors in parts:
                factors.add(inputs[0], out[..., start:stop], self._segments)

    # -------------------------------------------------------------------------------------- listing
    @property
    def names(self) -> list[str]:
        """Return the names of all adapters that were given, refused ones included."""
        return [*self._folders, *self.refused]

    @property
    def nbytes(self) -> int:
        return sum(factors.nbytes for factors in self._factors.values())

    def folder(self, name: str) -> AdapterFolder:
        """Return an adapter's folder. Raises BadRequest if it was refused or is unknown."""
        if name in self.refused:
            raise BadRequest(self.refused[name], param="model")
        if name not in self._folders:
            raise BadRequest(
                f"model: {name!r} is no adapter here; there are: {', '.join(self.names)}",
                param="model",
            )
        return self._folders[name]

    def card(self, name: str, base: ModelCard) -> ModelCard:
        """Return the card of an adapter, from its model's; a refused adapter has only a name."""
        folder = self._folders.get(name)
        if folder is None:
            return replace(base, name=name, parent=base.name, kv_format="", resident=False)
        kv_format, root = adapted(base.kv_format, folder.digest), root_of(folder.digest)
        return replace(
            base,
            name=name,
            parent=base.name,
            created=folder.created,
            kv_format=kv_format,
            hash_root=root,
            resident=False,
        )

    def adapter(self, name: str, slot: int) -> ResidentAdapter:
        return ResidentAdapter(name, slot, root_of(self.folder(name).digest))

    # ------------------------------------------------------------------------------------------------------------ slots
    def load(self, name: str, slot: int) -> ResidentAdapter:
        """Load an adapter into an unused slot, from any thread.

        Raises BadRequest if its files are bad.
        """
        folder = self.folder(name)
        loaded = folder.load()
        for matrix, factors in self._factors.items():
            if matrix in loaded:
                factors.put(slot, *loaded.pop(matrix), folder.pairs[matrix].scale)
            else:
                factors.clear(slot)
        return self.adapter(name, slot)

    # ------------------------------------------------------------------------------------------------------------ steps
    @contextmanager
    def using(self, segments: Segments | None) -> Iterator[None]:
        """Apply the adapters of `segments` to the model's rows within the block."""
        self._segments = segments
        try:
            yield
        finally:
            self._segments = None

    def segments(self, slots_N: np.ndarray) -> Segments:
        return Segments.of(slots_N, self._device)


def root_of(digest: str) -> int:
    """Return the first key of an adapter's prefix-cache chains: 64 bits, never 0."""
    return int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=8).digest(), "little") | 1


def slot_of(adapter: ResidentAdapter | None) -> int:
    return FREE if adapter is None else adapter.slot
