"""Define the settings of the encoder process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, ProcessConfig, setting

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("exact", "int8")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ProcessConfig):
    """Encode pictures and sound with the towers of a checkpoint whose language model decode serves."""

    model: str = setting("folder of the checkpoint: of a family that docs/models.md lists")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    device: str = setting(
        "where the tower computes: cpu, cuda (the first GPU), cuda:1, …", default="cpu"
    )
    dtype: str = setting(
        "type of weights and activations: auto, float32, bfloat16 or float16", default="auto"
    )
    weights: str = setting(
        "format of the matrices: exact, or int8 (rounded, faster; see the README)", default="exact"
    )
    threads: int = setting("CPU threads that compute; 0: torch's choice", default=0, min=0)
    max_patches: int = setting(
        "patches encoded at a time, unless one picture alone has more", default=4096, min=1
    )
    max_active: int = setting(
        "most pictures at a time; further ones are refused", default=64, min=1
    )
    max_prepared: int = setting(
        "most decoded pictures that wait to be encoded: they are large", default=16, min=1
    )
    max_picture: int = setting("largest picture, pixels", default=50_000_000, min=1)
    max_frames: int = setting(
        "frames of a video that are encoded, two per second at most", default=16, min=2
    )
    max_video: int = setting("longest video, frames", default=10_000, min=2)
    max_sound: float = setting("longest recording, seconds", default=600.0, min=1)
    max_file: Bytes = setting("largest file", default=32 << 20, min=1024)
    cache_memory: Bytes = setting(
        "memory for image embeddings, the least recently used evicted first", default=128 << 20
    )
    step_timeout: float = setting(
        "seconds after which a step counts as hung and the process exits", default=120.0, min=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(
                f"model={self.model!r}: no config.json there; give the folder of a checkpoint"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.weights not in WEIGHTS:
            raise ConfigError(f"weights={self.weights!r}: choose one of {', '.join(WEIGHTS)}")
        if self.cache_memory < 1 << 20:
            raise ConfigError(
                f"cache_memory={self.cache_memory}: is too small for a picture; give at least 1MB"
            )

    @property
    def model_name(self) -> str:
        """Return the name that clients use for the model."""
        return self.name or Path(self.model).resolve().name
