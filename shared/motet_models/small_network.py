"""Load and save small numpy networks, for services that need no torch.

A network is a folder with its sizes (`config.json`) and weights (`model.safetensors`, float16).
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

from motet_shared.errors import ConfigError

from .checkpoints import check_checkpoint

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Hold the sizes of a network; each field is in config.json."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the weights."""
        raise NotImplementedError


Shape = TypeVar("Shape", bound=Sizes)


class SmallNetwork(Generic[Shape]):
    """Hold a trained network.

    A subclass defines the kind and the computation, which any thread may call.
    """

    model_type: ClassVar[str]  # in config.json
    what: ClassVar[str]  # what it is, for errors
    setting: ClassVar[str]  # name of the setting with its folder, for errors
    sizes: ClassVar[type[Any]]  # its subclass of `Sizes`

    def __init__(self, shape: Shape, weights: dict[str, Floats], name: str):
        self.shape, self.name = shape, name
        self.weights = {key: array.astype(np.float32) for key, array in weights.items()}

    @classmethod
    def load(cls, folder: str) -> Self:
        """Load a network; raise ConfigError for an unreadable or inconsistent folder."""
        path, where = Path(folder).expanduser().resolve(), f"{cls.setting}: {folder!r}"
        check_checkpoint(path)
        try:
            config = json.loads((path / "config.json").read_text())
            weights = load_file(path / "model.safetensors")
        except Exception as error:  # a damaged file may raise anything
            raise ConfigError(
                f"{where} has no config.json and model.safetensors to read: {error}"
            ) from error
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
        """Write the network to a folder, with weights in float16. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": self.model_type, **asdict(self.shape)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        halves = {name: array.astype(np.float16) for name, array in self.weights.items()}
        save_file(halves, folder / "model.safetensors")
