"""Read a folder's safetensors one tensor at a time by name, and track which were read.

Quantized experts that are stored as one tensor of all (`experts.gate_up_proj` with its scales) are
read as one of each: `experts.gate_up_proj.3.weight`, `.weight_scale` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
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
_STACK = re.compile(r"(?P<stack>.+\.experts\.(?:gate_up|gate|up|down)_proj)(?:[._](?P<end>.+))?")
_CODES = {"I8", "I32", "F8_E4M3"}
_ENDS_OF_CODES = {"weight", "weight_packed", "qweight"}
_ENDS_WITHOUT_WEIGHT = {"scale", "scale_inv", "packed", "zero_point"}
_WHOLE = {"bias", "weight_shape"}  # not stored by expert in the same way


@dataclass(frozen=True, slots=True)
class _Place:
    """Say where a tensor is: an open file, its name there, and which part of it by expert."""

    file: Any
    name: str
    expert: int | None = None

    @property
    def kind(self) -> str:
        found: str = self.file.get_slice(self.name).get_dtype()
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.file.get_slice(self.name).get_shape())
        return shape if self.expert is None else shape[1:]

    def read(self) -> Tensor:
        if self.expert is None:
            whole: Tensor = self.file.get_tensor(self.name)
            return whole
        part: Tensor = self.file.get_slice(self.name)[self.expert : self.expert + 1]
        return part[0]


def _unchanged(name: str) -> str:
    return name


class TensorFiles:
    """Read the tensors of one checkpoint. `left`: the names that have not been read.

    renamed: the model's name of a stored tensor. Raises ConfigError for a file that cannot be read.
    """

    def __init__(self, folder: Path, renamed: Callable[[str], str] = _unchanged):
        self._files: dict[str, _Place] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                opened = safe_open(path, framework="pt")
                self._files |= {renamed(name): _Place(opened, name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{path} cannot be read: {error}; check its permissions, or copy it again"
                ) from error
        self._split_stacks()
        self.left = set(self._files)

    def _split_stacks(self) -> None:
        """Replace quantized tensors of all experts by one of each."""
        parts: dict[str, dict[str, str]] = {}
        for name in self._files:
            if (match := _STACK.fullmatch(name)) is not None:
                end = match["end"] or "weight"
                end = f"weight_{end}" if end in _ENDS_WITHOUT_WEIGHT else end
                parts.setdefault(match["stack"], {})[end] = name
        for stack, names in parts.items():
            codes = [names[end] for end in _ENDS_OF_CODES & names.keys()]
            if not any(self._is_stack_of_codes(name) for name in codes):
                continue
            experts = self._files[codes[0]].shape[0]
            for end, name in names.items():
                if end == "weight_shape":
                    del self._files[name]
                if end in _WHOLE:
                    continue
                whole = self._files.pop(name)
                self._files |= {
                    f"{stack}.{number}.{end}": _Place(whole.file, whole.name, number)
                    for number in range(experts)
                }

    def _is_stack_of_codes(self, name: str) -> bool:
        place = self._files[name]
        return place.kind in _CODES and len(place.shape) == 3

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorFiles:
        """Return itself: copies of a module read the same files."""
        return self

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in its file; `name` if there is none."""
        return self._files[name].name if name in self._files else name

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor without reading it; None if there is none.

        All dtypes but int8, uint8, int32 and float8 (E4M3) are given as float32.
        """
        if name not in self._files:
            return None
        return _TYPES.get(self._files[name].kind, torch.float32)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor without reading it; None if there is none."""
        if name not in self._files:
            return None
        return self._files[name].shape

    def take(self, name: str) -> Tensor | None:
        """Return the tensor; None if there is none."""
        if name not in self._files:
            return None
        self.left.discard(name)
        return self._files[name].read()

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
