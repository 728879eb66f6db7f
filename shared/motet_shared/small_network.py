"""Small networks in numpy: a folder with their sizes (`config.json`) and their weights (`model.safetensors`, float16).

Services that compute so little need no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from .errors import ConfigError

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a network is made of: each field stands in config.json."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights."""
        raise NotImplementedError


Shape = TypeVar("Shape", bound=Sizes)


class SmallNetwork(Generic[Shape]):
    """A trained network. A subclass names its kind, and computes; any thread may call it."""

    model_type: ClassVar[str]  # in config.json
    what: ClassVar[str]  # it is, in errors
    setting: ClassVar[str]  # that names its folder, in errors
    sizes: ClassVar[type[Any]]  # its `Sizes`

    def __init__(self, shape: Shape, weights: dict[str, Floats], name: str):
        self.shape, self.name = shape, name
        self.weights = {key: array.astype(np.float32) for key, array in weights.items()}

    @classmethod
    def load(cls, folder: str) -> Self:
        """ConfigError says what is wrong with the folder."""
        path, where = Path(folder).expanduser().resolve(), f"{cls.setting}: {folder!r}"
        try:
            config = json.loads((path / "config.json").read_text())
            weights = load_file(path / "model.safetensors")
        except Exception as error:  # whatever a damaged file makes of itself
            raise ConfigError(f"{where} has no config.json and model.safetensors to read: {error}") from error
        if not isinstance(config, dict) or config.pop("model_type", None) != cls.model_type:
            raise ConfigError(f"{where} is no {cls.what} (model_type {cls.model_type!r})")
        shape: Shape = cls._shape(config, where)
        if (found := {name: array.shape for name, array in weights.items()}) != shape.tensors():
            raise ConfigError(f"{where}: weights are {found}, config.json says {shape.tensors()}")
        return cls(shape, weights, path.name)

    @classmethod
    def _shape(cls, config: dict[str, Any], where: str) -> Any:
        if unknown := config.keys() - {field.name for field in fields(cls.sizes)}:
            raise ConfigError(f"{where}: config.json: unknown {', '.join(sorted(unknown))}")
        try:
            return msgspec.convert(config, cls.sizes)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: config.json: {error}") from error

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": self.model_type, **asdict(self.shape)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        halves = {name: array.astype(np.float16) for name, array in self.weights.items()}
        save_file(halves, folder / "model.safetensors")
