"""Define the settings of embedding: those of the engine and those of the process.

The engine's settings are validated once, before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, ProcessConfig, setting

from .pooling import MODES

DTYPES = ("auto", "float32", "bfloat16", "float16")
NORMALIZE = ("auto", "always", "never")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Hold settings of one engine.

    model: folder of a sentence encoder, as sentence-transformers or transformers saves it.
    name: model name for clients; empty: the folder's name.
    device: where the model computes: "cpu", "cuda" (the first GPU), "cuda:1".
    dtype: of weights and activations; "auto" is float32 on a CPU, the checkpoint's on a GPU.
        "float16" is for GPUs.
    threads: CPU threads that compute; 0 leaves torch's own choice.
    pooling: how token vectors become a text's vector; "auto": as the folder says, else the mean for
        an encoder and the last token for a decoder.
    normalize: whether vectors have unit length; "auto": as the folder says, else they have.
    max_length: most tokens of one text; 0: as many as the checkpoint allows.
    max_batch_tokens: most tokens of one forward pass, unless one text alone has more; padding
        counts.
    max_waiting: most texts in the queue; requests beyond it are refused as overloaded.
    """

    model: str
    name: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0
    pooling: str = "auto"
    normalize: str = "auto"
    max_length: int = 0
    max_batch_tokens: int = 1024
    max_waiting: int = 16384

    def __post_init__(self) -> None:
        folder = Path(self.model)
        if not any((folder / name).is_file() for name in ("config.json", "modules.json")):
            raise ConfigError(
                f"model={self.model!r}: no config.json or modules.json there; give a checkpoint's folder"
            )
        for field, known in (
            ("dtype", DTYPES),
            ("pooling", ("auto", *MODES)),
            ("normalize", NORMALIZE),
        ):
            if (value := getattr(self, field)) not in known:
                raise ConfigError(f"{field}={value!r}: choose one of {', '.join(known)}")
        for field, low in (
            ("threads", 0),
            ("max_length", 0),
            ("max_batch_tokens", 1),
            ("max_waiting", 1),
        ):
            if (value := getattr(self, field)) < low:
                raise ConfigError(f"{field}={value!r}: give a whole number of at least {low}")

    @property
    def model_name(self) -> str:
        """Return the name that clients use for the model."""
        return self.name or Path(self.model).resolve().name


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(ProcessConfig):
    """Embed texts as vectors, or rank documents: one process serves one model.

    `EngineConfig` documents the engine's own settings.
    """

    role: Literal["embedding", "ranking"] = setting(
        "role of the process: vectors of texts, or scores of documents", default="embedding"
    )
    model: str = setting("folder of the sentence encoder or ranker to serve")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    device: str = setting(
        "where the model computes: cpu, cuda (the first GPU), cuda:1, …", default="cpu"
    )
    dtype: str = setting(
        "type of weights and activations: auto, float32, bfloat16 or float16", default="auto"
    )
    threads: int = setting("CPU threads that compute; 0: torch's choice", default=0, min=0)
    pooling: str = setting(f"auto (what the folder says) or {', '.join(MODES)}", default="auto")
    normalize: str = setting(
        "vectors of unit length: auto (what the folder says), always or never", default="auto"
    )
    max_length: int = setting(
        "most tokens of a text; 0: as many as the checkpoint allows", default=0, min=0
    )
    max_batch_tokens: int = setting("most tokens of one forward pass", default=1024, min=1)
    max_waiting: int = setting(
        "most texts in the queue; requests beyond it are refused", default=16384, min=512
    )
    max_requests: int = setting(
        "most requests at a time; further ones are refused", default=256, min=1
    )
    max_picture: int = setting("largest picture, pixels", default=50_000_000, min=1)
    max_file: Bytes = setting("largest picture file", default=32 << 20, min=1024)
    step_timeout: float = setting(
        "seconds after which a step counts as hung and the process exits", default=120.0, min=1
    )

    def engine(self) -> EngineConfig:
        """Return the engine's own settings."""
        shared = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(self)}
        return EngineConfig(**{name: getattr(self, name) for name in shared})
