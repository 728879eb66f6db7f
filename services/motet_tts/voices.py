"""Voices that come as files in a checkpoint: `voices/NAME.safetensors` (latents of its codec), `voices/NAME.wav`."""

from __future__ import annotations

import logging
import wave
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

log = logging.getLogger(__name__)


def latents(path: Path, dim: int) -> Tensor | None:
    """The voice prompt `[frames, dim]` in a safetensors file; None if it holds something else."""
    fitting = [t.reshape(-1, dim) for t in load_file(path).values() if t.ndim in (2, 3) and t.shape[-1] == dim]
    if len(fitting) != 1:
        log.warning("voice %s left out: it holds no single tensor of %d-dimensional latents", path.name, dim)
        return None
    return fitting[0].float()


def waveform(path: Path, sample_rate: int) -> Tensor | None:
    """The samples `[N]` of a mono 16-bit WAV file at `sample_rate`; None if it is another kind of file."""
    with wave.open(str(path), "rb") as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, sample_rate):
            log.warning("voice %s left out: it must be mono, 16 bits, %d Hz", path.name, sample_rate)
            return None
        data = bytearray(file.readframes(file.getnframes()))
    return torch.frombuffer(data, dtype=torch.int16).float() / 32768
