"""Define the sizes and names of a pocket-tts checkpoint: its `config.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import PocketError

MODEL_TYPE = "motet_pocket_tts"


@dataclass(frozen=True, kw_only=True)
class PocketConfig:
    """Hold the settings of a pocket-tts checkpoint.

    sample_rate: Hz.
    hop: samples per acoustic frame.
    stride: acoustic frames per code frame, so that codes come at `sample_rate / hop / stride` Hz.
    bands: of the mel scale.
    advances: the most phonemes that one code frame may pass, plus one.
    """

    voices: tuple[str, ...] = ("ada",)
    characters: str = " abcdefghijklmnopqrstuvwxyz',.?!:;-"
    phonemes: tuple[str, ...] = ("_",)
    rates: tuple[float, float] = (
        0.75,
        1.4,
    )  # relative to ordinary speed: the slowest and the fastest in training
    sample_rate: int = 24_000
    hop: int = 240
    stride: int = 4
    bands: int = 64
    codebooks: int = 6
    codes: int = 256
    latent: int = 48
    codec_width: int = 192
    codec_layers: int = 3
    reader_width: int = 192
    reader_layers: int = 3
    hidden: int = 192
    layers: int = 4
    heads: int = 3
    kv_heads: int = 1
    feed_forward: int = 512
    depth: int = 128
    advances: int = 5
    max_phonemes: int = 512
    max_positions: int = 2048
    model_type: str = MODEL_TYPE

    def __post_init__(self) -> None:
        if self.model_type != MODEL_TYPE:
            raise PocketError(
                f"model_type={self.model_type!r} is not pocket-tts: give a folder with {MODEL_TYPE!r}",
                param="model_type",
            )
        for name in ("voices", "phonemes"):
            entries = getattr(self, name)
            if not entries or len(set(entries)) < len(entries):
                raise PocketError(
                    f"{name}={entries!r}: list one or more, without duplicates, in config.json",
                    param=name,
                )

    @property
    def frame_samples(self) -> int:
        """Return the samples per code frame."""
        return self.hop * self.stride

    @property
    def frame_rate(self) -> float:
        """Return the code frames per second."""
        return self.sample_rate / self.frame_samples

    def save(self, folder: Path) -> None:
        """Write the settings to `config.json` of a folder."""
        text = json.dumps(
            {"architectures": ["PocketSpeech"], **asdict(self)}, indent=2, ensure_ascii=False
        )
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PocketConfig:
        """Read a folder's settings. Raises PocketError for another model's."""
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        known = {field.name for field in fields(cls)}
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
            if name in known
        }
        return cls(**settings)
