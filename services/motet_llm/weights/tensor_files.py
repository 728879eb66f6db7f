"""Read a folder's safetensors one tensor at a time by name, and track which were read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from motet_shared.errors import ConfigError

_TYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}  # dtypes that callers ask for; all others count as float32


class TensorFiles:
    """Read the tensors of one checkpoint. `left`: the names that have not been read.

    Raises ConfigError for a file that cannot be read.
    """

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                opened = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{path} cannot be read: {error}; check its permissions, or copy it again"
                ) from error
        self.left = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor without reading it; None if there is none.

        All dtypes but int8, uint8, int32 and float8 (E4M3) are given as float32.
        """
        if name not in self._files:
            return None
        return _TYPES.get(self._files[name].get_slice(name).get_dtype(), torch.float32)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor without reading it; None if there is none."""
        if name not in self._files:
            return None
        return tuple(self._files[name].get_slice(name).get_shape())

    def take(self, name: str) -> Tensor | None:
        """Return the tensor; None if there is none."""
        if name not in self._files:
            return None
        self.left.discard(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def need(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """Return the tensor. Raises ConfigError if it is missing, or of another shape or dtype."""
        tensor = self.take(name)
        if tensor is None:
            raise ConfigError(
                f"{name} is missing; copy the checkpoint again, or give the original weights"
            )
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            wanted = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise ConfigError(
                f"{name} is {found}, not {wanted} {list(shape)}, which config.json asks for; repair either"
            )
        return tensor
