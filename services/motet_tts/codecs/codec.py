"""Define a codec's streaming decoder (frames in, samples out, in chunks of any size); find codecs.

Chunks join without clicks. A decoder's memory of a sequence is its `State`; several sequences are
decoded as one batch.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet_kernels.runtime.device import Download
from motet_shared.errors import ConfigError

State = Any  # opaque: private to each codec


class Codec(ABC):
    """Decode frames of a codec language model.

    sample_rate: Hz. frame_samples: samples per frame, so frames per second are `sample_rate /
    frame_samples`. context: frames around a chunk that are computed again with it.
    """

    sample_rate: int
    frame_samples: int
    context: int = 0

    @abstractmethod
    def begin(self) -> State:
        """Return the state before the first frame of a sequence."""

    @abstractmethod
    def decode(self, states: list[State], frames_BN: Tensor) -> list[Tensor]:
        """Return the samples of the next N frames of each sequence, N ≥ 1.

        One float32 tensor `[N * frame_samples]` per sequence, on the codec's device. A decoder that
        must look ahead returns fewer samples here and the others in `finish`. If it raises, the
        states are as before: the same frames can be decoded again, in parts.
        """

    def finish(self, state: State) -> Tensor | None:
        """Return the samples that are still due after the last frame, if any."""
        return None


def on_host(chunks: Sequence[Tensor | Exception]) -> list[Tensor | Exception]:
    """Copy samples to the CPU, all of them in one download; errors stay in their places."""
    found = [chunk for chunk in chunks if isinstance(chunk, Tensor)]
    if not any(chunk.is_cuda for chunk in found):
        return [*chunks]
    here = iter(Download(torch.cat(found)).wait().split([len(chunk) for chunk in found]))
    return [next(here) if isinstance(chunk, Tensor) else chunk for chunk in chunks]


def processor_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a checkpoint's processor; none without the file."""
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def codec_folder(folder: Path) -> str:
    """Return where a checkpoint's codec is: in its folder, or where its processor's settings say.

    Raises ConfigError if there is none.
    """
    if (folder / "audio_tokenizer" / "config.json").is_file():
        return str(folder / "audio_tokenizer")
    settings = processor_settings(folder).get("audio_tokenizer") or {}
    if named := settings.get("audio_tokenizer_name_or_path"):
        return str(folder / named if (folder / named).is_dir() else named)
    raise ConfigError(
        f"model={str(folder)!r}: no audio_tokenizer folder in it, and none named by processor_config.json"
    )
