"""Define the settings of the voice activity process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.process.config import Duration, ProcessConfig, setting


@dataclass(frozen=True, kw_only=True)
class VadConfig(ProcessConfig):
    """Detect when speech starts and stops; the model comes with the package `silero-vad`."""

    model: str = setting(
        "silero-vad's ONNX file (default: the one that the package brings)", default=""
    )
    turns: str = setting(
        "folder of the model that predicts ends of turns from words (default: none)", default=""
    )
    threads: int = setting("CPU threads that compute", default=1, min=1, max=64)
    max_active: int = setting(
        "sessions at a time; more are refused as overloaded", default=256, min=1
    )
    max_batch: int = setting("most sessions in one forward pass", default=64, min=1)
    max_files: int = setting("audio files in progress at a time; others wait", default=4, min=1)
    max_audio: Duration = setting("longest file", default=4 * 3600.0, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model and not Path(self.model).is_file():
            raise ConfigError(
                f"model: {self.model!r} is no file; leave it out for the one of silero-vad"
            )
