"""The tensors of a folder's safetensors by name, read one at a time; who was read is remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from motet_shared.errors import ConfigError

_TYPES = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}  # what is asked for by its type


class TensorFiles:
    """Of one checkpoint. `left` names those that nobody has taken yet."""

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                opened = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read: {error}; check its permissions, or copy it again") from error
        self.left = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def dtype(self, name: str) -> torch.dtype | None:
        """Of a tensor that is not read yet; None if there is none."""
        if name not in self._files:
            return None
        return _TYPES.get(self._files[name].get_slice(name).get_dtype(), torch.float32)

    def take(self, name: str) -> Tensor | None:
        """The tensor; None if there is none."""
        if name not in self._files:
            return None
        self.left.discard(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def need(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """The tensor. Raises ConfigError if it is missing, or of another shape or type."""
        tensor = self.take(name)
        if tensor is None:
            raise ConfigError(f"{name} is missing; copy the checkpoint again, or give the original weights")
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            wanted = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise ConfigError(
                f"{name} is {found}, not {wanted} {list(shape)}, which config.json asks for; repair either"
            )
        return tensor
