"""Decode Qwen2.5-Omni's codes as a stream: a flow of spectra, and BigVGAN (Qwen2_5OmniToken2Wav).

A transformer moves noise to a spectrum (`spectrum_flow.py`); its layers attend within blocks of
frames, a few of them to the block before or behind. Each step widens what a frame depends on by
some blocks, all of it ever more weakly: a window has `before` blocks in front of the frames that it
is computed for, and `behind` blocks after them. So a stream is the whole up to a small error, which
`tests/unit/motet_tts/test_tts_token2wav.py` bounds, and the whole itself where it fits a window.

Shapes: B sequences, N codes, R frames of a spectrum per code, M mel bins, K = 2 + R * M numbers that
stand for a code here: the code, the voice, and the noise of its frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, Qwen2_5OmniToken2WavModel

from motet_shared.errors import ConfigError

from .spectrum_flow import SpectrumFlow
from .windows import WindowCodec

SAMPLE_RATE = 24_000  # Hz
_BEFORE, _BEHIND = 4, 2  # blocks


@dataclass(frozen=True, slots=True, eq=False)
class Speaker:
    """Hold a voice: conditioning `[1, C]`, a spectrum of it `[1, T, M]`, and its token of text."""

    conditioning: Tensor
    reference: Tensor
    bos_token: int

    @classmethod
    def of(cls, name: str, entry: Any) -> Speaker:
        """Read an entry of `spk_dict.pt`. Raises ConfigError for another shape."""
        try:
            conditioning, reference = entry["cond"].float(), entry["ref_mel"].float()
            token = int(entry["bos_token"])
        except (TypeError, LookupError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"spk_dict.pt: {name!r} lacks cond, ref_mel or bos_token: {error}"
            ) from None
        if (
            conditioning.ndim != 2
            or reference.ndim != 3
            or not (conditioning.isfinite().all() and reference.isfinite().all())
        ):
            raise ConfigError(
                f"spk_dict.pt: {name!r} has cond {list(conditioning.shape)} and ref_mel"
                f" {list(reference.shape)}; give finite [1, size] and [1, frames, mel]"
            )
        return cls(conditioning, reference, token)


class Token2Wav(WindowCodec):
    """Decode codes `[B, N, K]` with the voices of a checkpoint, in float32.

    before, behind: blocks around the frames that a window is computed for.
    """

    def __init__(
        self,
        model: Qwen2_5OmniToken2WavModel,
        speakers: Sequence[Speaker],
        *,
        before: int = _BEFORE,
        behind: int = _BEHIND,
    ):
        self._vocoder = model.code2wav_bigvgan_model
        self._flow = SpectrumFlow(
            model.code2wav_dit_model,
            [speaker.conditioning for speaker in speakers],
            [speaker.reference for speaker in speakers],
        )
        dit, vocoder = model.config.dit_config, model.config.bigvgan_config
        self.codes: int = dit.num_embeds
        self._repeats, self._mel = dit.repeats, dit.mel_dim
        upsampled = 1
        for rate in vocoder.upsample_rates:
            upsampled *= rate
        if dit.block_size % dit.repeats:
            raise ConfigError(
                f"token2wav_config: blocks of {dit.block_size} frames are no whole codes of {dit.repeats}"
            )
        block = dit.block_size // dit.repeats
        super().__init__(
            self._waveform,
            sample_rate=SAMPLE_RATE,
            frame_samples=dit.repeats * upsampled,
            reach=behind * block,
            before=before * block,
            align=block,
        )

    def frame(self, code: int, voice: int, noise_RM: Tensor) -> Tensor:
        """Return what stands for a code: `[K]`."""
        return torch.cat([torch.tensor([code, voice], dtype=torch.float32), noise_RM.flatten()])

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Return the shape of a code's noise, frames and mel bins."""
        return self._repeats, self._mel

    @torch.inference_mode()
    def _waveform(self, frames_BNK: Tensor) -> Tensor:
        batch, count = frames_BNK.shape[:2]
        codes_BN, voices_B = frames_BNK[..., 0].long(), frames_BNK[:, 0, 1].long()
        noise_BFM = frames_BNK[..., 2:].reshape(batch, count * self._repeats, self._mel)
        mel_BMF = self._flow(codes_BN, voices_B, noise_BFM).transpose(1, 2)
        # One by one: its convolutions round differently with others beside, and gain little by them.
        return torch.stack([self._vocoder(one_1MF).flatten() for one_1MF in mel_BMF.split(1)])


def load_token2wav(folder: Path) -> tuple[Qwen2_5OmniToken2WavModel, Mapping[str, Speaker]]:
    """Return code2wav of a whole checkpoint, and its voices by name.

    `spk_dict.pt` is read as tensors and numbers alone, nothing in it can run. Raises ConfigError.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True).token2wav_config
    members = {
        "_keys_to_ignore_on_load_unexpected": [r"^thinker\.", r"^talker\."],
        "__module__": Qwen2_5OmniToken2WavModel.__module__,
    }
    kind: Any = type("Qwen2_5OmniToken2WavModel", (Qwen2_5OmniToken2WavModel,), members)
    model, report = kind.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        key_mapping={r"^token2wav\.": ""},
    )
    if faults := sorted(report["missing_keys"]) + sorted(report["unexpected_keys"]):
        raise ConfigError(
            f"model={str(folder)!r}: the weights contradict token2wav_config: {', '.join(faults[:8])}"
        )
    try:
        entries = torch.load(folder / "spk_dict.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file that is no such dictionary makes torch raise
        raise ConfigError(
            f"model={str(folder)!r}: spk_dict.pt, which has the voices, cannot be read as tensors:"
            f" {str(error).partition(chr(10))[0]}"
        ) from error
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"model={str(folder)!r}: spk_dict.pt names no voices")
    speakers = {str(name): Speaker.of(str(name), entry) for name, entry in entries.items()}
    return model.eval().requires_grad_(False), speakers
