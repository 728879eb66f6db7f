"""Pack a model's matrices, or take them from the cache of packed models, and fill that."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Thread

import torch
from torch import nn
from transformers import PreTrainedModel

from motet_kernels import gpu
from motet_kernels.runtime.device import dtype_name
from motet_llm.config import EngineConfig
from motet_llm.models import support
from motet_shared.process.memory_turn import MemoryTurn

from .packed_cache import PackedCache, key_of
from .packed_file import PackedFileError, PackedModel, PackedReading
from .packer import Packer

log = logging.getLogger(__name__)

LITTLE = 32 << 20  # bytes that a process may take before its turn


class Packing:
    """Provide the packer of one model on its way from the checkpoint to the engine.

    weights: format of matrices. loaded: dtype in which the checkpoint is read. On a GPU, which
    packs by itself and fast, the cache is not used. Matrices that were packed before are read from
    the constructor on, in the background, until `arrive`.

    turn: comes before the model takes memory. source: for people, where the packed matrices come
    from.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: str,
        loaded: torch.dtype,
        device: torch.device,
        turn: MemoryTurn,
    ):
        self._turn = turn
        precise = config.code_inputs == "int16"
        self.packer = Packer(weights, device, precise=precise)
        self._cache: PackedCache | None = None
        self._key: str | None = None
        self._reading: PackedReading | None = None
        self.source = "at each start"
        if config.packed_cache and not gpu.is_gpu(device):
            self._cache = PackedCache(config.packed_cache)
            self._key = _key(config, weights, loaded)
            if self._key is not None:
                self._reading = self._cache.begin(self._key, turn)
            self.source = "at this start" if self._reading is None else f"in {self._cache.folder}"
        self._examined = False
        self.writing: Thread | None = None

    @property
    def is_reading(self) -> bool:
        """Return True if matrices that were packed before are read."""
        return self._reading is not None

    @property
    def verified(self) -> bool:
        """Return True if the checkpoint passed all checks before, in its present state."""
        return self._reading is not None and self._reading.examined

    def settle(self, model: PreTrainedModel) -> bool:
        """Have the packer take the matrices that were packed before, if their numbers are there or not.

        model: takes them next. Waits for the turn if much else of it is copied then. Returns False
        if they are damaged; the model must then be loaded again, as it was not checked.
        """
        if self._reading is None:
            return True
        if _copied_bytes(model) > LITTLE:
            self._turn.wait()
        try:
            self.packer.stored = self._reading.layout()
        except (OSError, PackedFileError) as error:
            self._discard(error)
            return False
        return True

    def arrive(self) -> bool:
        """Wait for the numbers of what `settle` has given; return as it does."""
        if self._reading is None:
            return True
        try:
            self._reading.wait()
        except (OSError, PackedFileError) as error:
            self._discard(error)
            return False
        return True

    def _discard(self, error: Exception) -> None:
        assert self._cache is not None
        assert self._key is not None
        self._cache.discard(self._key, error)
        self.packer.stored = self._reading = None
        self.packer.made.clear()
        self.source = "at this start"

    def note(self, model: PreTrainedModel) -> None:
        """Record whether the loaded model needed no changes when it was examined."""
        self._examined = support.is_unchanged(model)

    def finish(self) -> None:
        """Begin to write what was packed to the cache; the matrices change no more."""
        if self._cache is not None and self._key is not None and self._reading is None:
            packed = PackedModel(dict(self.packer.made), self._examined, self.packer.fused)
            self.writing = self._cache.keep_later(self._key, packed)
        self.packer.made.clear()
        self.packer.stored = self._reading = None


def _copied_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of parameters that are no matrices of linear layers."""
    matrices = {id(one.weight) for one in model.modules() if isinstance(one, nn.Linear)}
    return sum(one.nbytes for one in model.parameters() if id(one) not in matrices)


def _key(config: EngineConfig, weights: str, loaded: torch.dtype) -> str | None:
    try:
        return key_of(
            Path(config.model),
            weights=weights,
            loaded=dtype_name(loaded),
            code_inputs=config.code_inputs,
            stage=config.stage,
            **({"packs_experts": True} if config.deterministic else {}),
        )
    except OSError as error:
        log.warning("packed weights are not kept", extra={"reason": str(error)})
        return None
