"""The codec of pocket-tts: a few code numbers per frame for the envelope and the pitch of speech, and back to samples.

An encoder (for training only) reads log-mel bands and pitch, residual vector quantization (Zeghidour et al. 2021) makes
codes of them, and a causal decoder tells a harmonics-and-noise synthesizer what to do.

Shapes: B sentences, N code frames, K codebooks, T = 4N acoustic frames, M bands, E width, D latent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import PocketConfig
from .synth import Controls, Synth, SynthState

PITCH = 120.0  # Hz; pitches are told in octaves above it


class Block(nn.Module):
    """ConvNeXt (Liu et al. 2022): a depthwise convolution of seven frames, then a wide layer; causal if asked for."""

    reach = 6

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.depthwise = nn.Conv1d(width, width, self.reach + 1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, hidden_BET: Tensor, before_BE6: Tensor | None = None) -> Tensor:
        """`before`: the last six inputs, if these frames go on from them."""
        if before_BE6 is not None:
            padded = torch.cat([before_BE6, hidden_BET], dim=2)
        else:
            padded = functional.pad(hidden_BET, (self.reach, 0) if self.causal else (self.reach // 2,) * 2)
        mixed_BTE = self.norm(self.depthwise(padded).mT)
        return hidden_BET + self.narrow(functional.gelu(self.wide(mixed_BTE))).mT


class Quantizer(nn.Module):
    """Residual codebooks [K, V, D]: each says what the ones before it left out."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.books = nn.Parameter(torch.randn(config.codebooks, config.codes, config.latent) * 0.3)

    def forward(self, latents_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Codes `[B, N, K]` and the latents that they stand for."""
        left, codes = latents_BND, []
        total = torch.zeros_like(latents_BND)
        for book in self.books:
            distances = book.square().sum(-1) - 2 * left @ book.mT
            codes.append(distances.argmin(-1))
            said = functional.embedding(codes[-1], book)
            total, left = total + said, left - said
        return torch.stack(codes, dim=-1), total

    def decode(self, codes_BNK: Tensor) -> Tensor:
        """The latents `[B, N, D]` of codes; the first few codebooks alone are a coarser version."""
        parts = [functional.embedding(codes_BNK[..., k], self.books[k]) for k in range(codes_BNK.shape[-1])]
        return torch.stack(parts).sum(0)


class Encoder(nn.Module):
    """Bands, pitch and voicing [B, T, M + 2] to latents [B, N, D]; sees a little ahead."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        width = config.codec_width
        self.enter = nn.Conv1d(config.bands + 2, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(config.codec_layers))
        self.leave = nn.Conv1d(width, config.latent, config.stride, stride=config.stride)

    def forward(self, features_BTM: Tensor) -> Tensor:
        hidden = self.enter(features_BTM.mT)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden).mT


@dataclass(slots=True)
class DecoderState:
    """Of one sentence: the inputs that the convolutions reach back to, and the synthesizer's memory."""

    synth: SynthState
    seed: int = 0
    inputs: list[Tensor] = field(default_factory=list)  # [E, 6] per block


class Heard(nn.Module):
    """What the decoder says per acoustic frame: log-odds of a voice, octaves of its pitch, bands of both kinds."""

    def __init__(self, width: int, bands: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 2 + 2 * bands)
        self.bands = bands

    def forward(self, hidden_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        voiced, octaves, harmonic, noise = self.out(hidden_BTE).split([1, 1, self.bands, self.bands], dim=-1)
        return voiced[..., 0], octaves[..., 0], (harmonic - 4).clamp(-14, 2), (noise - 6).clamp(-14, 2)


class Decoder(nn.Module):
    """Latents [B, N, D] to the synthesizer's controls, four acoustic frames for each, from the past alone."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        width, self.stride = config.codec_width, config.stride
        self.enter = nn.Linear(config.latent, width * config.stride)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(config.codec_layers))
        self.heard = Heard(width, config.bands)

    def hidden(self, latents_BND: Tensor, states: list[DecoderState] | None = None) -> Tensor:
        hidden = self.enter(latents_BND).unflatten(-1, (self.stride, -1)).flatten(1, 2).mT
        for index, block in enumerate(self.blocks):
            if states is None:
                hidden = block(hidden)
                continue
            before = torch.stack([state.inputs[index] for state in states])
            kept = torch.cat([before, hidden], dim=2)[..., -Block.reach :]
            hidden = block(hidden, before)
            for state, last in zip(states, kept, strict=True):
                state.inputs[index] = last
        return hidden.mT

    def forward(self, latents_BND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.heard(self.hidden(latents_BND))


class SpeechCodec(nn.Module):
    """Encoder, quantizer, decoder and synthesizer."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.quantizer, self.decoder = Encoder(config), Quantizer(config), Decoder(config)
        self.synth = Synth(config.sample_rate, config.hop, config.bands)

    def begin(self, seed: int = 0) -> DecoderState:
        """The state before the first frame of a sentence; `seed` is that of its breath."""
        zeros = torch.zeros(self.config.codec_width, Block.reach)
        return DecoderState(self.synth.begin(), seed, [zeros for _ in self.decoder.blocks])

    @torch.inference_mode()
    def decode(self, states: list[DecoderState], codes_BNK: Tensor) -> Tensor:
        """The samples `[B, N * frame_samples]` of the next N frames of each sentence."""
        hidden = self.decoder.hidden(self.quantizer.decode(codes_BNK), states)
        voiced, octaves, harmonic, noise = self.decoder.heard(hidden)
        pitch = torch.where(voiced > 0, PITCH * 2**octaves, 0.0)
        controls = Controls(pitch, harmonic, noise)
        return self.synth.render([state.synth for state in states], controls, [state.seed for state in states])
