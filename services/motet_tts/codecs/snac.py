"""Decode SNAC as a stream (Siuzdak et al. 2024, as the package snac holds it).

SNAC's codebooks run at different rates. A frame here is one code of the slowest and all codes of
the others at the same time. The decoder adds noise; here it depends on (key, number of the frame)
alone, so that overlapping windows and other instances add the same.

Shapes: B sequences, N frames, S codes of a frame, D dimensions of a latent, L latents.
"""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from motet_kernels.spans import upload
from motet_models.checkpoints import check_checkpoint
from motet_shared.errors import ConfigError
from motet_tts.models.noise import Noise

from .windows import WindowCodec, reach_of

_LONGEST_FRAME = 64  # codes
_MOST_PARTS = 8  # codebooks, and blocks of a decoder


def frame_order(strides: list[int]) -> list[tuple[int, int]]:
    """Return (codebook, place) of each code of a frame in time: a slower one precedes its faster ones.

    With strides 4, 2, 1 that is Orpheus's order: 0, 1, 2, 2, 1, 2, 2.
    """

    def below(book: int, place: int) -> list[tuple[int, int]]:
        if book == len(strides) - 1:
            return [(book, place)]
        faster = strides[book] // strides[book + 1]
        return [
            (book, place),
            *(one for k in range(faster) for one in below(book + 1, place * faster + k)),
        ]

    return below(0, 0)


def is_snac(folder: Path) -> bool:
    """Return True if a folder's config.json is one of SNAC."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    return isinstance(settings, dict) and "vq_strides" in settings


class SnacDecoder(WindowCodec):
    """Decode with a SNAC's folder: config.json, and model.safetensors or pytorch_model.bin.

    Frames are int64 `[S + 2]`: codes in `frame_order`, then the key of the noise and the number of
    the frame. Raises ConfigError if the package snac is missing or the folder cannot be decoded as
    a stream.
    """

    def __init__(self, folder: Path, device: torch.device):
        settings, model = _loaded(folder)
        strides = [int(stride) for stride in settings["vq_strides"]]
        self.order = frame_order(strides)
        self.codes = int(model.codebook_size)
        self._device, self._strides = device, strides
        self._quantizer, self._decoder = model.quantizer.to(device), model.decoder.to(device)
        self._places = [
            [slot for slot, (of, _) in enumerate(self.order) if of == book]
            for book in range(len(strides))
        ]
        self._noises = _KeyedNoise.replace_all(self._decoder, strides[0], model.decoder_rates)
        hop = math.prod(model.decoder_rates)
        super().__init__(
            self._samples,
            sample_rate=int(model.sampling_rate),
            frame_samples=strides[0] * hop,
            reach=-(-reach_of(self._decoder.modules()) // strides[0]),
        )

    def frame(self, codes: list[int], key: int, number: int) -> Tensor:
        """Return the frame of the given codes, on the device."""
        return upload(torch.tensor([*codes, key, number]), self._device)

    def _samples(self, frames_BN: Tensor) -> Tensor:
        """Return the samples `[B, N * frame_samples]` of whole sequences of frames."""
        self._set_noise(frames_BN)
        codes = [frames_BN[..., places].flatten(1) for places in self._places]
        audio_B1T: Tensor = self._decoder(self._quantizer.from_codes(codes))
        return audio_B1T[:, 0]

    def _set_noise(self, frames_BN: Tensor) -> None:
        if not self._noises:
            return
        sizes = [noise.frame_steps for noise in self._noises]
        drawn_BNT = torch.stack(
            [
                torch.stack([Noise(key, 0, number).normal(sum(sizes)) for key, number in row])
                for row in frames_BN[..., -2:].tolist()
            ]
        )
        parts = upload(drawn_BNT, self._device).split(sizes, dim=-1)
        for noise, part_BNT in zip(self._noises, parts, strict=True):
            noise.noise_B1T = part_BNT.flatten(1)[:, None]


class _KeyedNoise(nn.Module):
    """Replace a `NoiseBlock` of snac: add given noise instead of the generator's.

    frame_steps: the steps of a frame at this layer.
    """

    def __init__(self, linear: nn.Module, frame_steps: int):
        super().__init__()
        self.linear, self.frame_steps = linear, frame_steps
        self.noise_B1T = torch.zeros(1, 1, 1)

    def forward(self, hidden_BCT: Tensor) -> Tensor:
        linear_BCT: Tensor = self.linear(hidden_BCT)
        return hidden_BCT + self.noise_B1T * linear_BCT

    @classmethod
    def replace_all(cls, decoder: nn.Module, latents: int, rates: list[int]) -> list[_KeyedNoise]:
        """Replace the noise of each block of a decoder, whose frames have so many latents."""
        from snac.layers import DecoderBlock, NoiseBlock  # an extra

        replaced, steps = [], latents
        blocks = [block for block in decoder.modules() if isinstance(block, DecoderBlock)]
        for block, rate in zip(blocks, rates, strict=True):
            steps *= rate
            for place, layer in enumerate(block.block):
                if isinstance(layer, NoiseBlock):
                    block.block[place] = noise = cls(layer.linear, steps)
                    replaced.append(noise)
        return replaced


def _loaded(folder: Path) -> tuple[dict[str, Any], Any]:
    """Return the settings and the model of a folder, without its encoder."""
    if find_spec("snac") is None:
        raise ConfigError(
            f"model={str(folder)!r}: its codec needs the package snac; install motet[snac]"
        )
    from snac import SNAC  # an extra

    check_checkpoint(folder)
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    _check(folder, settings)
    tensors = _tensors(folder)
    try:
        with torch.device("meta"):
            model = SNAC(**settings)
        model.encoder = nn.Identity()
        missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model={str(folder)!r}: its weights are not those of its config.json: {error}"
        ) from None
    if missing:
        raise ConfigError(
            f"model={str(folder)!r}: its weights lack {missing[0]!r}; give a whole SNAC"
        )
    for module in [*model.quantizer.modules(), *model.decoder.modules()]:
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
    return settings, model.float().eval()


def _check(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ConfigError for a SNAC whose frames cannot be decoded one after the other."""
    strides = settings["vq_strides"]
    if settings.get("attn_window_size", 32) is not None:
        raise ConfigError(
            f"model={str(folder)!r}: attn_window_size={settings.get('attn_window_size', 32)!r} is attention in fixed "
            f"windows, which no stream can begin within; give a SNAC without, such as that of 24 kHz"
        )
    divided = (
        isinstance(strides, list)
        and 0 < len(strides) <= _MOST_PARTS
        and all(isinstance(stride, int) and 0 < stride <= _LONGEST_FRAME for stride in strides)
        and all(before % stride == 0 for before, stride in pairwise(strides))
        and strides[-1] == 1
    )
    if not divided or len(frame_order(strides)) > _LONGEST_FRAME:
        raise ConfigError(
            f"model={str(folder)!r}: vq_strides={strides!r}; each must divide the one before, the last is 1, "
            f"and a frame has at most {_LONGEST_FRAME} codes"
        )
    for name in ("encoder_rates", "decoder_rates"):
        rates = settings.get(name)
        if not isinstance(rates, list) or len(rates) > _MOST_PARTS:
            raise ConfigError(
                f"model={str(folder)!r}: {name}={rates!r}; give a list of at most {_MOST_PARTS} numbers"
            )


def _tensors(folder: Path) -> dict[str, Tensor]:
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.is_file():
        return load_file(safe)
    if pickled.is_file():  # as SNAC's authors publish it; reads tensors, runs no code
        tensors: dict[str, Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
        return tensors
    raise ConfigError(
        f"model={str(folder)!r}: neither model.safetensors nor pytorch_model.bin; give a whole SNAC"
    )
