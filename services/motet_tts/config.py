"""Define the settings of the speech engine and of its process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, ProcessConfig, setting

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Hold settings of one `Engine`.

    model: folder of a checkpoint (config.json and safetensors).
    name: model name for clients; empty: the folder's name.
    language_model: name by which decode engines serve the language model of a checkpoint whose
        tokens are codes (Orpheus's layout); empty: the folder's name.
    device: where the model computes: "cpu", "cuda" (the first GPU), "cuda:1".
    dtype: of weights and activations; "auto" is float32 on a CPU, the checkpoint's on a GPU.
        "float16" is for GPUs.
    threads: CPU threads that compute; 0: one for a small model of short steps, else torch's own
        choice.
    greedy: always pick the likeliest code, without noise, whatever the checkpoint's generation
        settings are.
    first_chunk, chunk: seconds of speech that a codec decodes at a time, at the beginning of a
        sentence and later on. A vocoder that must look ahead takes more.
    max_running: most sentences in one step.
    max_waiting: most sentences in the queue; further ones are refused as overloaded.
    """

    model: str
    name: str = ""
    language_model: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0
    greedy: bool = False
    first_chunk: float = 0.06
    chunk: float = 0.32
    max_running: int = 16
    max_waiting: int = 64

    def __post_init__(self) -> None:
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(
                f"model={self.model!r}: no config.json there; give the folder of a checkpoint"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")

    @property
    def model_name(self) -> str:
        """Return the name that clients use for the model."""
        return self.name or Path(self.model).resolve().name

    @property
    def served_as(self) -> str:
        """Return the name of the language model at decode."""
        return self.language_model or Path(self.model).resolve().name


@dataclass(frozen=True, kw_only=True)
class TtsConfig(ProcessConfig):
    """Synthesize speech: one process serves one speech model.

    `EngineConfig` documents the engine's own settings.
    """

    model: str = setting("folder of the checkpoint to serve")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    language_model: str = setting(
        "decode's name of the language model whose tokens are spoken (default: the folder's name)",
        default="",
    )
    device: str = setting(
        "where the model computes: cpu, cuda (the first GPU), cuda:1, …", default="cpu"
    )
    dtype: str = setting(
        "type of weights and activations: auto, float32, bfloat16 or float16", default="auto"
    )
    threads: int = setting(
        "CPU threads that compute; 0: one for a small model, else torch's choice", default=0, min=0
    )
    greedy: bool = setting("always pick the likeliest code, without noise", default=False)
    first_chunk: float = setting(
        "seconds of speech in the first chunk of a sentence", default=0.06, min=0.001
    )
    chunk: float = setting(
        "seconds of speech that the codec decodes at a time, at least what it computes again for"
        " them",
        default=0.32,
        min=0.01,
    )
    max_running: int = setting("most sentences that are spoken at a time", default=16, min=1)
    max_waiting: int = setting(
        "most sentences in the queue; further ones are refused", default=64, min=0
    )
    step_timeout: float = setting(
        "seconds after which a step counts as hung and the process exits", default=120.0, min=1
    )
    patience: float = setting(
        "seconds without a decode instance after which a sentence that needs one is given up",
        default=5.0,
        min=0,
    )
    states_memory: Bytes = setting(
        "memory of an omni model for states that its talkers have not read yet",
        default=64 << 20,
        min=1 << 20,
    )
    longest_text: int = setting("most characters of one request", default=100_000, min=1)

    def engine(self) -> EngineConfig:
        """Return the engine's own settings."""
        shared = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(self)}
        return EngineConfig(**{name: getattr(self, name) for name in shared})
