"""Read a checkpoint's voice files: `voices/NAME.safetensors` (codec latents), `voices/NAME.wav`."""

from __future__ import annotations

import logging
import wave
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

log = logging.getLogger(__name__)


def latents(path: Path, dim: int) -> Tensor | None:
    """Return the voice prompt `[frames, dim]` of a safetensors file; None if it holds none."""
    fitting = [
        t.reshape(-1, dim)
        for t in load_file(path).values()
        if t.ndim in (2, 3) and t.shape[-1] == dim
    ]
    if len(fitting) != 1:
        log.warning(
            "voice %s is ignored: give it a single tensor of %d-dimensional latents", path.name, dim
        )
        return None
    return fitting[0].float()


def waveform(path: Path, sample_rate: int) -> Tensor | None:
    """Return samples `[N]` of a mono 16-bit WAV file at `sample_rate`; None for other formats."""
    with wave.open(str(path), "rb") as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, sample_rate):
            log.warning(
                "voice %s is ignored: it must be mono, 16 bits, %d Hz", path.name, sample_rate
            )
            return None
        data = bytearray(file.readframes(file.getnframes()))
    return torch.frombuffer(data, dtype=torch.int16).float() / 32768
