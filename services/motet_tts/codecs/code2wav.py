"""Decode Qwen3-Omni's codes as a stream (Qwen3OmniMoeCode2Wav): a transformer, then convolutions.

The transformer attends to a window of frames before; its keys and values are kept. The convolutions
reach a few frames back, and less than one ahead: they are computed for windows of its output. So a
stream has the samples of the whole. transformers cuts replies of more than 300 frames into pieces
that it decodes apart; this does not.

Shapes: B sequences, N frames, Q codes of a frame, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
)

from motet_shared.errors import ConfigError

from .attention_window import AttentionState, AttentionWindow
from .codec import Codec
from .windows import Window, WindowCodec

SAMPLE_RATE = 24_000  # Hz


@dataclass(slots=True)
class Code2WavState(AttentionState):
    """Hold the state of one sequence: of its transformer, and the window of the convolutions."""

    window: Window = field(default_factory=Window)


class Code2Wav(Codec):
    """Decode codes `[B, N, Q]` with transformers' `Qwen3OmniMoeCode2Wav`, in float32.

    codes: number of codes of a group. groups: codes of a frame.
    """

    def __init__(self, model: Any):
        config = model.config
        self._model = model
        self.codes, self.groups = int(config.codebook_size), int(config.num_quantizers)
        self.sample_rate, self.frame_samples = SAMPLE_RATE, int(model.total_upsample)
        before, behind = reach_of(model)
        self._vocoder = WindowCodec(
            self._samples,
            sample_rate=SAMPLE_RATE,
            frame_samples=self.frame_samples,
            reach=behind,
            before=before,
        )
        self.context = self._vocoder.context

    def begin(self) -> Code2WavState:
        return Code2WavState()

    @torch.inference_mode()
    def decode(self, states: list[Code2WavState], frames_BN: Tensor) -> list[Tensor]:
        model = self._model
        codes_BQN = frames_BN.transpose(1, 2) + model.code_offset
        hidden_BNC = model.code_embedding(codes_BQN).mean(1)
        window = AttentionWindow(
            states, hidden_BNC.shape[1], model.config.sliding_window, hidden_BNC.device
        )
        output = model.pre_transformer(
            inputs_embeds=hidden_BNC,
            attention_mask={"full_attention": window.mask, "sliding_attention": window.mask},
            position_ids=window.positions,
            past_key_values=window,
            use_cache=True,
        )
        samples = self._vocoder.decode([s.window for s in states], output.last_hidden_state)
        window.store()
        return samples

    @torch.inference_mode()
    def finish(self, state: Code2WavState) -> Tensor | None:
        return self._vocoder.finish(state.window)

    def _samples(self, hidden_BNC: Tensor) -> Tensor:
        hidden_BCN = hidden_BNC.transpose(1, 2)
        for stage in self._model.upsample:
            for layer in stage:
                hidden_BCN = layer(hidden_BCN)
        for layer in self._model.decoder:
            hidden_BCN = layer(hidden_BCN)
        samples: Tensor = hidden_BCN[:, 0].clamp(-1, 1)
        return samples


def reach_of(model: Any) -> tuple[int, int]:
    """Return the frames before and behind its own that a sample depends on, by the convolutions."""
    before = behind = 0
    for layer in reversed(list(_convolutions([*model.upsample, *model.decoder]))):
        if isinstance(layer, Qwen3OmniMoeCausalTransConvNet):
            stride = layer.conv.stride[0]
            before = math.ceil(before / stride)
            behind = math.ceil((behind + layer.left_pad) / stride)
        else:
            before += layer.padding
    return before, behind


def _convolutions(layers: Iterable[nn.Module]) -> Iterable[Any]:
    """Yield the convolutions of layers, in the order in which they are applied."""
    kinds = (Qwen3OmniMoeCausalConvNet, Qwen3OmniMoeCausalTransConvNet)
    for layer in layers:
        yield from (module for module in layer.modules() if isinstance(module, kinds))


def load_code2wav(folder: Path) -> Any:
    """Return code2wav of a whole checkpoint, on the CPU. Raises ConfigError."""
    found: Any = Qwen3OmniMoeForConditionalGeneration

    def init(self: Any, config: Any) -> None:
        found.__init__(self, config)
        del self.thinker, self.talker

    members = {
        "__init__": init,
        "_keys_to_ignore_on_load_unexpected": [r"^thinker\.", r"^talker\."],
        "__module__": found.__module__,
    }
    kind: Any = type(found.__name__, (found,), members)
    whole, report = kind.from_pretrained(
        folder,
        config=AutoConfig.from_pretrained(folder, local_files_only=True),
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if faults := sorted(report["missing_keys"]) + sorted(report["unexpected_keys"]):
        raise ConfigError(
            f"model={str(folder)!r}: the weights contradict code2wav_config: {', '.join(faults[:8])}"
        )
    return whole.code2wav.eval().requires_grad_(False)
