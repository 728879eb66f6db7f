"""Read voices: a checkpoint's `voices/NAME.safetensors` and `voices/NAME.wav`, and samples."""

from __future__ import annotations

import logging
import wave
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from motet_media.audio import Resampler
from motet_tts.engine.utterance import VoiceSample

log = logging.getLogger(__name__)


def latents(path: Path, dim: int) -> Tensor | None:
    """Return the voice prompt `[frames, dim]` of a safetensors file; None if it holds none."""
    fitting = [
        t.reshape(-1, dim)
        for t in load_file(path).values()
        if t.ndim in (1, 2, 3) and t.shape[-1] == dim
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


class EncodedSamples:
    """Encode each recording once, however many sentences have its voice."""

    def __init__(self, encode: Callable[[VoiceSample], Tensor]):
        self._encode = encode
        self._known: WeakKeyDictionary[VoiceSample, Tensor] = WeakKeyDictionary()

    def __call__(self, sample: VoiceSample) -> Tensor:
        """Return what the model's encoder makes of a recording."""
        if sample not in self._known:
            with torch.inference_mode():
                self._known[sample] = self._encode(sample)
        return self._known[sample]


def resampled(sample: VoiceSample, rate: int) -> Tensor:
    """Return the samples `[N]` of a recording at `rate` Hz."""
    if sample.rate == rate:
        return sample.samples
    resampler = Resampler(sample.rate, rate)
    pcm = np.rint(sample.samples.numpy() * 32767).clip(-32768, 32767).astype("<i2").tobytes()
    found = np.frombuffer(resampler.feed(pcm) + resampler.flush(), "<i2")
    return torch.from_numpy(found.astype(np.float32) / 32768)
