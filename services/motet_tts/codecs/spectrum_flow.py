"""Move noise to spectra by an ODE, for several replies at once (Qwen2_5OmniToken2WavDiTModel).

The transformer is evaluated several times for each step of the ODE. What does not depend on the state is computed once:
the parts of the times and of the voices when the model is loaded, that of the codes for a window.
transformers computes all of it in each evaluation, which gives the same numbers.

Shapes: B replies, N codes of a window, F frames of its spectrum, M mel bins, H the transformer's size,
V voices, C a voice's conditioning, E evaluations, G = 2 * B: with guidance, each state is evaluated
with its voice and codes, and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS, GUIDANCE, SWAY = 10, 0.5, -1.0  # the model's own defaults
_STAGES = 4  # evaluations in a step of the solver: the 3/8 rule of Runge and Kutta


@dataclass(frozen=True, slots=True)
class _Window:
    """Hold what all evaluations for a window share.

    conditions_GFH: the part of the voices and codes in the transformer's input. rotary: cosines and
    sines of the positions. masks: `[1, 1, F, F]`, by the blocks that a layer attends to before and behind.
    """

    conditions_GFH: Tensor
    rotary: tuple[Tensor, Tensor]
    masks: dict[tuple[int, int], Tensor]


class SpectrumFlow:
    """Solve the ODE of `model` for the voices of a checkpoint.

    conditionings: `[1, C]` each. references: spectra of the voices, `[1, T, M]` each.
    """

    def __init__(self, model: Any, conditionings: Sequence[Tensor], references: Sequence[Tensor]):
        self._model = model
        self._layers = list(model.transformer_blocks)
        self._size = int(model.config.hidden_size)
        mel, proj = int(model.config.mel_dim), model.input_embed.proj
        voice, code = int(model.config.enc_dim), int(model.config.emb_dim)
        with torch.inference_mode():
            parts = proj.weight.split([mel, voice, code, proj.in_features - mel - voice - code], 1)
            self._of_state, of_voice, self._of_code, of_conditioning = parts
            self._voices_V2H = torch.stack(
                [
                    F.linear(self._embedded(reference), of_voice, proj.bias)
                    + F.linear(_or_none(conditioning), of_conditioning)
                    for conditioning, reference in zip(conditionings, references, strict=True)
                ]
            )
            self._spans, times_E = _evaluations()
            embedded_EH = F.silu(model.time_embed(times_E))
            # Of each evaluation `[6, H]`: shift, scale and gate of the attention, then of the perceptron.
            self._modulations = [
                self._modulation(layer.attn_norm.linear(embedded_EH), scales=(1, 4))
                for layer in self._layers
            ]
            self._last_E2H = self._modulation(model.norm_out.linear(embedded_EH), scales=(0,))

    def _embedded(self, reference_1TM: Tensor) -> Tensor:
        """Return the embedding of a voice, and that without one: `[2, …]`."""
        found: Tensor = self._model.input_embed.spk_encoder(_or_none(reference_1TM))
        return found

    def _modulation(self, values_E: Tensor, scales: Sequence[int]) -> Tensor:
        """Split the vectors of each evaluation; those at `scales` are to be added to one."""
        parts_EXH = values_E.reshape(len(values_E), -1, self._size)
        for scale in scales:
            parts_EXH[:, scale] += 1
        return parts_EXH

    def __call__(self, codes_BN: Tensor, voices_B: Tensor, noise_BFM: Tensor) -> Tensor:
        """Return the spectra `[B, F, M]` to which the flow moves the noise."""
        window, state_BFM = self._window(codes_BN, voices_B, noise_BFM), noise_BFM
        for step, span in enumerate(self._spans):
            first = step * _STAGES
            k1 = self._velocity(first, state_BFM, window)
            k2 = self._velocity(first + 1, state_BFM + span * k1 / 3, window)
            k3 = self._velocity(first + 2, state_BFM + span * (k2 - k1 / 3), window)
            k4 = self._velocity(first + 3, state_BFM + span * (k1 - k2 + k3), window)
            state_BFM = state_BFM + (k1 + 3 * (k2 + k3) + k4) * (span / 8)
        return state_BFM

    def _window(self, codes_BN: Tensor, voices_B: Tensor, noise_BFM: Tensor) -> _Window:
        model, frames = self._model, noise_BFM.shape[1]
        codes = [model.text_embed(codes_BN, drop_code=is_free) for is_free in (False, True)]
        voices_GH = self._voices_V2H[voices_B].transpose(0, 1).flatten(0, 1)
        conditions_GFH = F.linear(torch.cat(codes), self._of_code) + voices_GH.unsqueeze(1)
        positions_F = torch.arange(frames, device=noise_BFM.device)
        blocks_F = positions_F // model.block_size
        ahead_FF = blocks_F[None, :] - blocks_F[:, None]
        reaches = {(one.look_backward_block, one.look_ahead_block) for one in self._layers}
        masks = {
            (before, behind): ((ahead_FF >= -before) & (ahead_FF <= behind))[None, None]
            for before, behind in reaches
        }
        return _Window(conditions_GFH, model.rotary_embed(noise_BFM, positions_F[None]), masks)

    def _velocity(self, evaluation: int, state_BFM: Tensor, window: _Window) -> Tensor:
        state_BFH = F.linear(state_BFM, self._of_state)
        hidden_GFH = window.conditions_GFH + torch.cat([state_BFH, state_BFH])
        for layer, modulation_E6H in zip(self._layers, self._modulations, strict=True):
            shift, scale, gate, inner_shift, inner_scale, inner_gate = modulation_E6H[evaluation]
            attended_GFH = layer.attn(
                self._normed(hidden_GFH, scale, shift, layer.attn_norm.norm.eps),
                position_embeddings=window.rotary,
                attention_mask=window.masks[layer.look_backward_block, layer.look_ahead_block],
            )
            hidden_GFH = torch.addcmul(hidden_GFH, gate, attended_GFH)
            inner_GFH = self._normed(hidden_GFH, inner_scale, inner_shift, layer.ff_norm.eps)
            hidden_GFH = torch.addcmul(hidden_GFH, inner_gate, layer.ff(inner_GFH))
        scale, shift = self._last_E2H[evaluation]
        last_GFH = self._normed(hidden_GFH, scale, shift, self._model.norm_out.norm.eps)
        both_GFM: Tensor = self._model.proj_out(last_GFH)
        guided_BFM, free_BFM = both_GFM.chunk(2)
        return guided_BFM + (guided_BFM - free_BFM) * GUIDANCE

    def _normed(self, hidden_GFH: Tensor, scale_H: Tensor, shift_H: Tensor, eps: float) -> Tensor:
        return F.layer_norm(hidden_GFH, (self._size,), scale_H, shift_H, eps)


def _or_none(condition_1: Tensor) -> Tensor:
    """Return a condition, and zeros, which stand for none: `[2, …]`."""
    return torch.cat([condition_1, torch.zeros_like(condition_1)])


def _evaluations() -> tuple[list[float], Tensor]:
    """Return the lengths of the steps, and the time of each evaluation `[E]`."""
    times = torch.linspace(0, 1, STEPS)
    times = times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
    spans = times.diff()
    within = torch.arange(_STAGES) / (_STAGES - 1)
    return spans.tolist(), (times[:-1, None] + spans[:, None] * within).flatten()
