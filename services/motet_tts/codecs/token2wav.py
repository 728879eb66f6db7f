"""Decode Qwen2.5-Omni's codes as a stream: a flow of spectra, and BigVGAN (Qwen2_5OmniToken2Wav).

A transformer moves noise to a spectrum in `STEPS` steps of an ODE; its layers attend within blocks
of frames, a few of them to the block before or behind. Each step widens what a frame depends on by
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
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

from motet_shared.errors import ConfigError

from .windows import WindowCodec

STEPS, GUIDANCE, SWAY = 10, 0.5, -1.0  # the model's own defaults
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
        self._dit, self._vocoder = model.code2wav_dit_model, model.code2wav_bigvgan_model
        self._speakers = speakers
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
        voices_B = frames_BNK[:, 0, 1].long().tolist()
        found = [self._of_voice(frames_BNK[row : row + 1], v) for row, v in enumerate(voices_B)]
        return torch.cat(found)

    def _of_voice(self, frames_1NK: Tensor, voice: int) -> Tensor:
        count = frames_1NK.shape[1]
        codes_1N = frames_1NK[..., 0].long()
        noise_1FM = frames_1NK[..., 2:].reshape(1, count * self._repeats, self._mel)
        mel_1FM = self.spectrum(codes_1N, noise_1FM, self._speakers[voice])
        samples: Tensor = self._vocoder(mel_1FM.transpose(1, 2))
        return samples.reshape(1, -1)

    def spectrum(self, codes_1N: Tensor, noise_1FM: Tensor, speaker: Speaker) -> Tensor:
        """Return the spectrum `[1, F, M]` to which the flow moves the noise."""
        conditioning_1FC = speaker.conditioning.unsqueeze(1).expand(-1, noise_1FM.shape[1], -1)

        def velocity(time: Tensor, state_1FM: Tensor) -> Tensor:
            both: Tensor = self._dit(
                hidden_states=state_1FM,
                quantized_code=codes_1N,
                speaker_embedding=conditioning_1FC,
                condition_vector=speaker.reference,
                time_step=time,
                apply_cfg=True,
            )
            guided, free = both.chunk(2)
            return guided + (guided - free) * GUIDANCE

        times = torch.linspace(0, 1, STEPS)
        times = times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        solver = RungeKutta4ODESolver(function=velocity, initial_value=noise_1FM)
        spectrum_1FM: Tensor = solver.integrate(times)[-1]
        return spectrum_1FM


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
