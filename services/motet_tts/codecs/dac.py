"""Decode DAC as a stream, and encode recordings (Kumar et al. 2023, as transformers holds it).

Shapes: B sequences, N frames, K codebooks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DacModel

from motet_models.checkpoints import check_checkpoint

from .windows import WindowCodec, reach_of


def dac(folder: str, device: torch.device) -> tuple[WindowCodec, Callable[[Tensor], Tensor]]:
    """Return the decoder of a DAC's folder, and its encoder: samples `[S]` to codes `[N, K]`."""
    check_checkpoint(Path(folder))
    model: Any = DacModel.from_pretrained(folder).eval().to(device)

    def decode(codes_BNK: Tensor) -> Tensor:
        samples: Tensor = model.decode(audio_codes=codes_BNK.mT).audio_values
        return samples

    hop = int(model.config.hop_length)

    def encode(samples_S: Tensor) -> Tensor:
        padded = functional.pad(samples_S, (0, -len(samples_S) % hop)).to(device)
        codes: Tensor = model.encode(padded[None, None]).audio_codes[0].mT.cpu()
        return codes

    codec = WindowCodec(
        decode,
        sample_rate=int(model.config.sampling_rate),
        frame_samples=hop,
        reach=reach_of(model.decoder.modules()),
    )
    return codec, encode
