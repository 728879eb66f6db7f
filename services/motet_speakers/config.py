"""Define the settings of the speakers process."""

from __future__ import annotations

from dataclasses import dataclass

from motet_shared.process.config import Duration, ProcessConfig, setting


@dataclass(frozen=True, kw_only=True)
class SpeakersConfig(ProcessConfig):
    """Embed speakers' voices. `models/recipes/pocket_speakers.py` trains a model."""

    model: str = setting("folder of the speaker encoder to serve")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    max_files: int = setting(
        "most files at a time; more are refused as overloaded", default=32, min=1
    )
    max_batch: int = setting(
        "most stretches that are compared between two answers", default=32, min=1
    )
    max_audio: Duration = setting("longest file", default=4 * 3600.0, min=1)
    max_span: Duration = setting(
        "longest stretch; of a longer one the beginning counts", default=30.0, min=0.1
    )
