"""Define the settings of the diffusion engine and of its process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, ProcessConfig, setting

QUANTIZATIONS = ("int8", "fp8")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Hold settings of one `Engine`.

    model: folder that diffusers loads (model_index.json). name: what clients call it; empty: the
    folder's name. dtype: of weights and activations. device: "cpu", "cuda", …; threads: CPU threads
    of torch, 0: torch's own choice.

    steps, guidance: for requests that give none; 0 and -1: the model's own (see `rules`).
    text_length: tokens of a prompt where the family has that parameter; 0: the model's own.

    max_running: most pictures at a time, including those in text encoding or decoding. max_rows:
    most rows of one forward pass; a picture with guidance takes two. max_waiting: most requests in
    the queue beyond these. max_pixels, max_steps: of one picture; larger requests are refused.
    max_frames: of one video.

    packed: keep a second copy of the weights of convolutions, laid out for the first size drawn
    (CPU, float32). loras: adapters that pictures may name, "name=path" each: a safetensors file, or
    a folder with one. step_cache: largest relative change of the first block's output at which the
    other blocks are skipped and their last effect is reused; 0: never. Transformers only. controlnets,
    ip_adapters: what pictures may name, "name=path" each. quantization: of the denoiser's matrices, one
    of QUANTIZATIONS, or "". denoiser: a GGUF file with its weights, in place of the folder's.
    """

    model: str
    name: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 0
    steps: int = 0
    guidance: float = -1.0
    text_length: int = 0
    max_running: int = 8
    max_rows: int = 16
    max_waiting: int = 64
    max_pixels: int = 2048 * 2048
    max_steps: int = 200
    max_frames: int = 257
    packed: bool = True
    loras: tuple[str, ...] = ()
    step_cache: float = 0.0
    controlnets: tuple[str, ...] = ()
    ip_adapters: tuple[str, ...] = ()
    quantization: str = ""
    denoiser: str = ""

    def __post_init__(self) -> None:
        if not (Path(self.model) / "model_index.json").is_file():
            raise ConfigError(
                f"model={self.model!r}: no model_index.json found; give a folder that diffusers loads"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.quantization not in ("", *QUANTIZATIONS):
            known = ", ".join(QUANTIZATIONS)
            raise ConfigError(f"quantization={self.quantization!r}: choose one of {known}")
        if self.quantization and self.denoiser:
            raise ConfigError(
                f"quantization={self.quantization!r}: the denoiser's file has codes of its own;"
                " set one of them only"
            )
        if self.max_rows < 2:
            raise ConfigError(
                f"max_rows={self.max_rows}: a picture with guidance takes two rows; give at least 2"
            )

    @property
    def model_name(self) -> str:
        """Return the name that clients use for the model."""
        return self.name or Path(self.model).resolve().name


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(ProcessConfig):
    """Generate pictures or videos from text: one process serves one diffusion model.

    `EngineConfig` documents the engine's own settings.
    """

    model: str = setting("folder of the model to serve, as diffusers saves it")
    name: str = setting("model name in requests (default: the name of the folder)", default="")
    dtype: str = setting(
        "data type of weights and activations: float32, bfloat16 or float16", default="float32"
    )
    device: str = setting(
        "where the model computes: cpu, cuda (the first GPU), cuda:1, …", default="cpu"
    )
    threads: int = setting("CPU threads for computation; 0: torch's default", default=0, min=0)
    steps: int = setting(
        "default number of denoising steps; 0: the model's default", default=0, min=0
    )
    guidance: float = setting(
        "default guidance scale; -1: the model's default", default=-1.0, min=-1
    )
    text_length: int = setting(
        "maximum tokens of a prompt, for SD3, Flux and PixArt; 0: the model's default",
        default=0,
        min=0,
    )
    max_running: int = setting(
        "maximum number of pictures drawn at the same time", default=8, min=1
    )
    max_rows: int = setting(
        "maximum rows of one forward pass; a picture with guidance takes two", default=16, min=2
    )
    max_waiting: int = setting(
        "maximum number of queued requests; further ones are refused", default=64, min=0
    )
    max_pixels: int = setting(
        "maximum size of a picture: width times height", default=2048 * 2048, min=64
    )
    max_steps: int = setting("maximum number of denoising steps of a picture", default=200, min=1)
    max_frames: int = setting("maximum number of frames of a video", default=257, min=1)
    packed: bool = setting(
        "keep a second copy of convolution weights in a faster layout (CPU)", default=True
    )
    loras: tuple[str, ...] = setting(
        "LoRA adapters that requests may name, as name=path each", default=()
    )
    controlnets: tuple[str, ...] = setting(
        "ControlNets that requests may name, as name=path each", default=()
    )
    ip_adapters: tuple[str, ...] = setting(
        "IP-Adapters that requests may name, as name=path each", default=()
    )
    quantization: str = setting(
        "keep the denoiser's matrices in 8 bits: int8 or fp8 (default: as they are)", default=""
    )
    denoiser: str = setting(
        "GGUF file with the denoiser's weights, in place of the folder's", default=""
    )
    step_cache: float = setting(
        "relative change of the first block below which the others are skipped; 0: never",
        default=0.0,
        min=0,
    )
    step_timeout: float = setting(
        "seconds after which a step counts as hung and the process exits", default=300.0, min=1
    )
    longest_text: int = setting("maximum characters of a prompt", default=20_000, min=1)
    picture_memory: Bytes = setting(
        "memory for pictures that callers have not fetched yet", default=64 * 2**20, min=2**20
    )

    def engine(self) -> EngineConfig:
        """Return the engine's own settings."""
        shared = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(self)}
        return EngineConfig(**{name: getattr(self, name) for name in shared})
