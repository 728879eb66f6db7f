"""Define the settings of the speakers process."""

from __future__ import annotations

from dataclasses import dataclass

from motet_shared.process.config import Duration, ProcessConfig, setting


@dataclass(frozen=True, kw_only=True)
class SpeakersConfig(ProcessConfig):
    """Embed the voices of speakers: one process serves one speaker encoder.

    `models/recipes/speakers/train.py` trains a model.
    """

    model: str = setting("folder of the speaker encoder to serve")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    max_files: int = setting("most files at a time; further ones are refused", default=32, min=1)
    max_batch: int = setting("most stretches in one batch", default=32, min=1)
    max_audio: Duration = setting("longest file", default=4 * 3600.0, min=1)
    max_span: Duration = setting(
        "longest stretch; of a longer one only the beginning is used", default=30.0, min=0.1
    )
