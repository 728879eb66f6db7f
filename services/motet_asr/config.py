"""Define the settings of speech recognition: those of the engine and those of the process.

The engine's settings are validated once, before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, Duration, ProcessConfig, setting

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "torch", "float32", "bfloat16", "float16", "int8")
_DECODED_BYTES_PER_SECOND = 64_000  # float32 at 16 kHz
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # Whisper's fallback temperatures, tried in turn


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Hold settings of one engine.

    model: folder of a checkpoint (config.json and safetensors).
    name: model name for clients; empty: the folder's name.
    device: where the model computes: "cpu", "cuda" (the first GPU), "cuda:1".
    dtype: of weights and activations; "auto" is float32 on a CPU, the checkpoint's on a GPU.
        "float16" is for GPUs.
    weights: format in which the matrices that every decoder step reads are packed (Whisper only):
        "auto" is `dtype`, "int8" rounds them per output channel and their inputs per row; "torch"
        packs nothing, for comparisons. "float16" is for GPUs.
    threads: CPU threads that compute; 0 leaves torch's own choice.
    max_rows: most windows decoded at a time, a slot each.
    max_waiting: most windows in the queue; further ones are refused as overloaded.
    encode_batch: most windows encoded at a time, between two decoder steps.
    window: seconds of audio given to the model at a time; 0: the model's native window, which is
        also Whisper's upper limit.
    padding: seconds of silence after a window's audio that Whisper's encoder reads; -1:
        `motet_padding` in the checkpoint's preprocessor_config.json, else the whole window, as
        Whisper was trained.
    fallback: decode a window whose text looks wrong again at a higher temperature (Whisper's rule).
    compression_threshold: bytes of the token ids divided by bytes of their zlib form, above which a
        text counts as repetitive.
    logprob_threshold: mean log-probability of the tokens, below which the text counts as a guess.
    no_speech_threshold: probability of silence, above which a window with a low mean
        log-probability is skipped.
    """

    model: str
    name: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    weights: str = "auto"
    threads: int = 0
    max_rows: int = 16
    max_waiting: int = 256
    encode_batch: int = 4
    window: float = 0.0
    padding: float = -1.0
    fallback: bool = True
    compression_threshold: float = 1.35
    logprob_threshold: float = -1.0
    no_speech_threshold: float = 0.6

    def __post_init__(self) -> None:
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(
                f"model={self.model!r}: no config.json there; give the folder of a checkpoint"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.weights not in WEIGHTS:
            raise ConfigError(f"weights={self.weights!r}: choose one of {', '.join(WEIGHTS)}")
        for field, low in (
            ("max_rows", 1),
            ("max_waiting", 1),
            ("encode_batch", 1),
            ("threads", 0),
        ):
            if (value := getattr(self, field)) < low:
                raise ConfigError(f"{field}={value!r}: give a whole number of at least {low}")
        if self.window < 0:
            raise ConfigError(f"window={self.window!r}: give seconds, or 0 for the model's own")
        if self.padding < 0 and self.padding != -1:
            raise ConfigError(
                f"padding={self.padding!r}: give seconds, or -1 for what the model was trained with"
            )

    @property
    def model_name(self) -> str:
        """Return the name that clients use for the model."""
        return self.name or Path(self.model).resolve().name


@dataclass(frozen=True, kw_only=True)
class AsrConfig(ProcessConfig):
    """Transcribe speech: one process serves one recognizer.

    `EngineConfig` documents the engine's own settings.
    """

    model: str = setting("folder of the checkpoint to serve, of a kind in docs/recognizers.md")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    device: str = setting(
        "where the model computes: cpu, cuda (the first GPU), cuda:1, …", default="cpu"
    )
    dtype: str = setting(
        "type of weights and activations: auto, float32, bfloat16 or float16", default="auto"
    )
    weights: str = setting(
        "format of Whisper's matrices: auto, torch, float32, bfloat16, float16 or int8",
        default="auto",
    )
    threads: int = setting("CPU threads that compute; 0: torch's choice", default=0, min=0)
    max_rows: int = setting("most windows decoded at a time", default=16, min=1)
    max_waiting: int = setting(
        "most windows in the queue; further ones are refused", default=256, min=1
    )
    encode_batch: int = setting("most windows encoded between two decoder steps", default=4, min=1)
    window: Duration = setting(
        "audio given to the model at a time; 0: the model's native window", default=0.0, min=0
    )
    padding: float = setting(
        "seconds of silence that Whisper's encoder reads; -1: as trained", default=-1.0, min=-1
    )
    fallback: bool = setting(
        "decode text that looks wrong again at a higher temperature", default=True
    )
    timestamps: bool = setting(
        "have the model predict when segments begin and end, if it can", default=True
    )
    max_files: int = setting(
        "most files and live streams at a time; further ones are refused", default=64, min=1
    )
    parallel: int = setting(
        "windows of one file that are transcribed in parallel", default=4, min=1
    )
    max_audio: Duration = setting("longest file or live stream", default=4 * 3600.0, min=1)
    audio_memory: Bytes = setting(
        "memory for decoded files; an hour of audio takes 220 MB", default=2 << 30, min=1 << 20
    )
    live: bool = setting(
        "accept live streams, which are transcribed again and again while they last", default=True
    )
    partial_every: Duration = setting(
        "new audio after which a live stream is transcribed again", default=0.4, min=0.05
    )
    step_timeout: float = setting(
        "seconds after which a step counts as hung and the process exits", default=120.0, min=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_audio * _DECODED_BYTES_PER_SECOND > self.audio_memory:
            message = (
                f"max_audio: {self.max_audio:g} s do not fit into audio_memory={self.audio_memory}"
            )
            raise ConfigError(f"{message}; raise that too", param="max_audio")

    def engine(self) -> EngineConfig:
        """Return the engine's own settings."""
        shared = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(self)}
        return EngineConfig(**{name: getattr(self, name) for name in shared})
