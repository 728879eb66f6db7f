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
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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

    root: first key of its prefix-cache chains. digest: of its files.
    """

    name: str
    slot: int
    root: int
    digest: str = ""


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
        inner = list_adapters(Path(folder))
        pairs += [("adapter_folder", str(path), name, str(path)) for name, path in inner.items()]
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


def list_adapters(folder: Path) -> dict[str, Path]:
    """Return the adapters in a folder by name; characters in names may be percent-encoded."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return {}
    found = {unquote(entry): folder / entry for entry in entries if not entry.startswith(".")}
    return {name: path for name, path in found.items() if (path / CONFIG).is_file()}


class AdapterBank:
    """Hold the adapters in `folders`, by name, for a model of these matrices.

    Up to `slots` of them may be resident, each of at most `max_rank`. An adapter that cannot be
    served is logged, and requests for it are refused. There is room for the adapters that are
    there; `add` makes more where it is needed. dtype: of the factors.
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
        self.slots = 0
        self._most_slots, self._max_rank = slots, max_rank
        self._dtype, self._device = dtype, device
        self._segments: Segments | None = None
        self._matrices = matrices
        self._shapes = self._shapes_in_files()
        self._folders: dict[str, AdapterFolder] = {}
        self._factors: dict[str, LoraFactors] = {}
        self._parts: dict[Linear, dict[str, LoraFactors]] = {}
        self._filling = threading.Lock()  # held while factors are written or replaced
        for name, path in folders.items():
            self._note(name, self.read(name, path))
        self._grow()

    def read(self, name: str, path: Path) -> AdapterFolder | BadRequest:
        """Return what is known of an adapter, or why it cannot be served; from any thread."""
        try:
            return AdapterFolder.read(name, path, self._shapes, self._max_rank)
        except BadRequest as error:
            return error

    def _shapes_in_files(self) -> dict[str, tuple[int, int]]:
        """Return the (outputs, inputs) for which adapters of this model were trained, by matrix."""
        return {name: matrix.shape for name, matrix in self._matrices.items()}

    def _file_name(self, matrix: str) -> str:
        """Return the name of a matrix in files; several may be parts of one there."""
        return matrix

    def _own(self, matrix: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of a matrix that is here, from those of a file."""
        return down, up

    def add(self, name: str, found: AdapterFolder | BadRequest) -> bool:
        """Add an adapter that was read, between two steps; True if factors have moved in memory.

        An adapter of that name is replaced; requests that hold it keep it in its slot.
        """
        self.remove(name)
        self._note(name, found)
        try:
            return self._grow()
        except (RuntimeError, MemoryError) as error:  # torch's of a GPU is a RuntimeError
            self._folders.pop(name, None)
            reason = f"model: no memory for adapter {name!r} ({error}); restart the worker with it"
            self._note(name, BadRequest(reason, param="model"))
            return True  # some factors may have moved

    def remove(self, name: str) -> None:
        """Forget an adapter, between two steps; what it leaves in its slot is overwritten."""
        self._folders.pop(name, None)
        self.refused.pop(name, None)

    def _note(self, name: str, found: AdapterFolder | BadRequest) -> None:
        if isinstance(found, BadRequest):
            self.refused[name] = found.message
            log.warning("an adapter cannot be served", extra={"reason": found.message})
        else:
            self._folders[name] = found
            log.info("adapter found", extra={"adapter": name, "trained_for": found.base})

    def _grow(self) -> bool:
        """Make room for all adapters, or as many as may be resident; True if factors have moved."""
        self.slots = max(self.slots, min(self._most_slots, max(len(self._folders), 1)))
        ranks: dict[str, int] = {}
        for folder in self._folders.values():
            for matrix in self._matrices:
                if (pair := folder.pairs.get(self._file_name(matrix))) is not None:
                    ranks[matrix] = max(ranks.get(matrix, 0), pair.rank)
        for (
            name,
            factors,
        ) in self._factors.items():  # `load` clears those that removed adapters left
            ranks.setdefault(name, factors.max_rank)
        moved = [name for name, rank in ranks.items() if not self._has_room(name, rank)]
        with self._filling:
            for name in moved:
                self._put_factors(name, self._roomy(name, ranks[name]))
        return bool(moved)

    def _has_room(self, matrix: str, rank: int) -> bool:
        factors = self._factors.get(matrix)
        return (
            factors is not None and factors.max_rank >= rank and len(factors.ranks_S) >= self.slots
        )

    def _roomy(self, matrix: str, rank: int) -> LoraFactors:
        factors = self._factors.get(matrix)
        if factors is not None:
            return factors.grown(self.slots, rank)
        outputs, inputs = self._matrices[matrix].shape
        return LoraFactors(self.slots, rank, inputs, outputs, self._dtype, self._device)

    def _put_factors(self, name: str, factors: LoraFactors) -> None:
        """Have the product of a matrix add these factors."""
        self._factors[name] = factors
        linear = self._matrices[name].linear
        if linear not in self._parts:
            self._parts[linear] = {}
            linear.register_forward_hook(partial(self._add, self._parts[linear]))
        self._parts[linear][name] = factors

    def _add(
        self,
        parts: Mapping[str, LoraFactors],
        _linear: nn.Module,
        inputs: tuple[Any, ...],
        out: Tensor,
    ) -> None:
        if self._segments is not None:
            for name, factors in parts.items():
                matrix = self._matrices[name]
                factors.add(inputs[0], out[..., matrix.start : matrix.stop], self._segments)

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
            problem = self.refused.get(name, "")
            return replace(
                base, name=name, parent=base.name, kv_format="", resident=False, problem=problem
            )
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

    # ------------------------------------------------------------------------------------------------------------ slots
    def load(self, name: str, slot: int) -> ResidentAdapter:
        """Load an adapter into an unused slot, from any thread.

        Raises BadRequest if its files are bad.
        """
        folder = self.folder(name)
        loaded = folder.load()
        with self._filling:
            for matrix, factors in self._factors.items():
                if (file_name := self._file_name(matrix)) in loaded:
                    own = self._own(matrix, *loaded[file_name])
                    factors.put(slot, *own, folder.pairs[file_name].scale)
                else:
                    factors.clear(slot)
        return ResidentAdapter(name, slot, root_of(folder.digest), folder.digest)

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
