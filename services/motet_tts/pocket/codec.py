"""The codec of pocket-tts: a few code numbers per frame for envelope and pitch of speech, and back to samples.

Log-mel bands and pitch (for training only) become principal components, residual vector quantization (Zeghidour et al.
2021) makes codes of them, and a causal decoder tells a pulses-and-noise synthesizer what to do.

Shapes: B sentences, N code frames, K codebooks, T = stride N acoustic frames, M bands, E width, D latent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from motet_kernels import gpu
from motet_kernels.codec_conv import PackedConv, convolve

from ..places import Places, Stream
from .config import PocketConfig
from .synth import AHEAD, Controls, Synth, SynthState

PITCH = 120.0  # Hz; pitches are told in octaves above it
PITCH_WEIGHT, VOICE_WEIGHT = 8.0, 3.0  # beside a band, for what a code should tell exactly


class Block(nn.Module):
    """ConvNeXt (Liu et al. 2022), causal: a convolution of three frames in each channel, then a wide layer."""

    reach = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, self.reach + 1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, hidden_BET: Tensor, before_BER: Tensor | None = None) -> Tensor:
        """`before`: the last inputs, as many as it reaches back, if these frames go on from them."""
        if before_BER is None:
            padded = functional.pad(hidden_BET, (self.reach, 0))
        else:
            padded = torch.cat([before_BER, hidden_BET], dim=2)
        return hidden_BET + self.mixed(self.depthwise(padded).mT).mT

    def mixed(self, hidden_BTE: Tensor) -> Tensor:
        """What follows the convolution, within a frame."""
        return self.narrow(functional.gelu(self.wide(self.norm(hidden_BTE))))


def nearest(latents: Tensor, book_VD: Tensor) -> Tensor:
    """The number of the entry that is nearest to each latent `[…, D]`."""
    return (book_VD.square().sum(-1) - 2 * latents @ book_VD.mT).argmin(-1)


class Quantizer(nn.Module):
    """Residual codebooks [K, V, D]: each says what the ones before it left out. No gradient moves them."""

    books: Tensor

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.register_buffer("books", torch.randn(config.codebooks, config.codes, config.latent) * 0.3)

    def forward(self, latents_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Codes `[B, N, K]` and the latents that they stand for."""
        left, codes = latents_BND, []
        total = torch.zeros_like(latents_BND)
        for book in self.books:
            codes.append(nearest(left, book))
            said = functional.embedding(codes[-1], book)
            total, left = total + said, left - said
        return torch.stack(codes, dim=-1), total

    def decode(self, codes_BNK: Tensor) -> Tensor:
        """The latents `[B, N, D]` of codes; the first few codebooks alone are a coarser version."""
        parts = [functional.embedding(codes_BNK[..., k], self.books[k]) for k in range(codes_BNK.shape[-1])]
        return torch.stack(parts).sum(0)


class Encoder(nn.Module):
    """Bands, pitch and voicing [B, T, M + 2] to latents [B, N, D]: principal components, found and not trained.

    Each acoustic frame is told as far ahead as the synthesizer needs it.
    """

    mean: Tensor
    axes: Tensor

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.stride, size = config.stride, config.stride * (config.bands + 2)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("axes", torch.eye(size, config.latent))

    def stack(self, features_BTM: Tensor) -> Tensor:
        """The acoustic frames of each code frame beside each other, `[B, N, stride (M + 2)]`."""
        bands, pitch = later(features_BTM[..., :-2], AHEAD - 1), later(features_BTM[..., -2:], AHEAD)
        told = torch.cat([bands, pitch * torch.tensor([PITCH_WEIGHT, VOICE_WEIGHT])], dim=-1)
        return told.unflatten(1, (-1, self.stride)).flatten(2)

    def forward(self, features_BTM: Tensor) -> Tensor:
        return (self.stack(features_BTM) - self.mean) @ self.axes


def later(values_BT: Tensor, frames: int) -> Tensor:
    """Of each frame what is there so many frames later; the last one stays."""
    return torch.cat([values_BT[:, frames:], *[values_BT[:, -1:]] * frames], dim=1)


@dataclass(slots=True)
class DecoderState:
    """Of one sentence: the inputs that the convolutions reach back to, and the synthesizer's memory."""

    synth: SynthState
    seed: int = 0
    inputs: list[Tensor] = field(default_factory=list)  # [E, reach] per block
    stream: Stream | None = None  # instead of them, where kernels compute


class Heard(NamedTuple):
    """What the decoder says per acoustic frame: log-odds of a voice, octaves of its pitch, bands of both kinds.

    Pitch and voice are those of `synth.AHEAD` frames later.
    """

    voiced: Tensor  # [B, T]
    octaves: Tensor  # [B, T]
    harmonic: Tensor  # [B, T, M]
    noise: Tensor  # [B, T, M]


class Decoder(nn.Module):
    """Latents [B, N, D] to the synthesizer's controls, several acoustic frames for each, from the past alone."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        width, self.stride, self.bands = config.codec_width, config.stride, config.bands
        self.enter = nn.Linear(config.latent, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(config.codec_layers))
        self.leave = nn.Linear(width, config.stride * (2 + 2 * config.bands))

    def forward(self, latents_BND: Tensor, states: list[DecoderState] | None = None) -> Heard:
        """With states, these frames go on from those that were decoded before."""
        hidden = self.enter(latents_BND).mT
        for index, block in enumerate(self.blocks):
            if states is None:
                hidden = block(hidden)
                continue
            before = torch.stack([state.inputs[index] for state in states])
            kept = torch.cat([before, hidden], dim=2)[..., -Block.reach :]
            hidden = block(hidden, before)
            for state, last in zip(states, kept, strict=True):
                state.inputs[index] = last
        return self.heard(hidden.mT)

    def heard(self, hidden_BNE: Tensor) -> Heard:
        """What the last hidden states say."""
        said = self.leave(hidden_BNE).unflatten(-1, (self.stride, -1)).flatten(1, 2)
        voiced, octaves, harmonic, noise = said.split([1, 1, self.bands, self.bands], dim=-1)
        return Heard(voiced[..., 0], octaves[..., 0], (harmonic - 5).clamp(-14, 2), (noise - 6).clamp(-14, 2))


class FusedDecoder:
    """A `Decoder` on a GPU: the convolution of each block is one launch, with what it reaches back to."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        self._convs = [PackedConv.of(block.depthwise) for block in self._blocks]
        self.places = Places(self._convs)

    def __call__(self, latents_BND: Tensor, streams: list[Stream]) -> Heard:
        """The next frames of each stream."""
        hidden_BNE, contexts = self._decoder.enter(latents_BND), self.places.go_on(streams)
        for block, conv, context in zip(self._blocks, self._convs, contexts, strict=True):
            hidden_BNE = hidden_BNE + block.mixed(convolve(hidden_BNE, conv, context=context))
        return self._decoder.heard(hidden_BNE)


class SpeechCodec(nn.Module):
    """Encoder, quantizer, decoder and synthesizer."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.quantizer, self.decoder = Encoder(config), Quantizer(config), Decoder(config)
        self.synth = Synth(config.sample_rate, config.hop, config.bands)
        self.fused: FusedDecoder | None = None

    def speak_on(self, device: torch.device) -> None:
        """Decode there from now on, with kernels if they take it."""
        self.to(device)
        self.synth.to(device)
        if gpu.takes(self.decoder.enter.weight):
            self.fused = FusedDecoder(self.decoder)

    def begin(self, seed: int = 0) -> DecoderState:
        """The state before the first frame of a sentence; `seed` is that of its breath."""
        if self.fused is not None:
            return DecoderState(self.synth.begin(), seed, stream=self.fused.places.begin())
        zeros = self.decoder.enter.weight.new_zeros(self.config.codec_width, Block.reach)
        return DecoderState(self.synth.begin(), seed, [zeros for _ in self.decoder.blocks])

    @torch.inference_mode()
    def decode(self, states: list[DecoderState], codes_BNK: Tensor) -> Tensor:
        """The samples `[B, N * frame_samples]` of the next N frames of each sentence."""
        latents_BND = self.quantizer.decode(codes_BNK)
        if self.fused is not None:
            heard = self.fused(latents_BND, [state.stream for state in states if state.stream is not None])
        else:
            heard = self.decoder(latents_BND, states)
        pitch = torch.where(heard.voiced > 0, PITCH * 2**heard.octaves, 0.0)
        controls = Controls(pitch, heard.harmonic, heard.noise)
        return self.synth.render([state.synth for state in states], controls, [state.seed for state in states])
