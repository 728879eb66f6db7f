"""Record which modules of a model have a fused version, so that they are compared only once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FusedModules:
    """Hold what `fused_layers` found, by the names of modules; JSON can hold it.

    norms: offsets. mlps: activations. layers: scale, reach, softcap and temperature.
    """

    norms: dict[str, float] = field(default_factory=dict)
    mlps: dict[str, str] = field(default_factory=dict)
    layers: dict[str, list[Any]] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Return how many norms, MLPs and layers are replaced."""
        return {name: len(getattr(self, name)) for name in ("norms", "mlps", "layers")}
