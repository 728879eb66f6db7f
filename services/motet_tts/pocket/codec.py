"""Encode envelope and pitch of speech as a few codes per frame, and decode them to samples.

Log-mel bands and pitch (for training only) are reduced to principal components, residual vector
quantization (Zeghidour et al. 2021) maps these to codes, and a causal decoder controls a
pulses-and-noise synthesizer.

Shapes: B sentences, N code frames, K codebooks, T = stride N acoustic frames, M bands, E width, and
D latent dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from motet_kernels import gpu
from motet_kernels.audio.codec_conv import convolve
from motet_kernels.audio.packed_conv import PackedConv
from motet_tts.codecs.stream_context import ContextBuffers, StreamContext

from .config import PocketConfig
from .synth import AHEAD, Controls, Synth, SynthState

PITCH = 120.0  # Hz; pitches are in octaves above it
# relative to a band: codes should represent pitch and voicing precisely
PITCH_WEIGHT, VOICE_WEIGHT = 8.0, 3.0


class Block(nn.Module):
    """Apply a causal ConvNeXt block (Liu et al. 2022).

    A convolution of three frames in each channel, then an MLP within each frame.
    """

    reach = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, self.reach + 1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, hidden_BET: Tensor, before_BER: Tensor | None = None) -> Tensor:
        """Apply the block; `before` holds the last `reach` inputs if these frames continue them."""
        if before_BER is None:
            padded = functional.pad(hidden_BET, (self.reach, 0))
        else:
            padded = torch.cat([before_BER, hidden_BET], dim=2)
        return hidden_BET + self.mixed(self.depthwise(padded).mT).mT

    def mixed(self, hidden_BTE: Tensor) -> Tensor:
        """Apply the norm and the feed-forward layers to each frame: `[B, T, E]` to the same shape."""
        output: Tensor = self.narrow(functional.gelu(self.wide(self.norm(hidden_BTE))))
        return output


def nearest(latents: Tensor, book_VD: Tensor) -> Tensor:
    """Return the index of the nearest entry for each latent `[…, D]`."""
    return (book_VD.square().sum(-1) - 2 * latents @ book_VD.mT).argmin(-1)


class Quantizer(nn.Module):
    """Quantize with residual codebooks [K, V, D]: each encodes the remainder of the previous ones.

    The codebooks get no gradient.
    """

    books: Tensor

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.register_buffer(
            "books", torch.randn(config.codebooks, config.codes, config.latent) * 0.3
        )

    def forward(self, latents_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes `[B, N, K]` and the latents that they represent."""
        remainder, codes = latents_BND, []
        total = torch.zeros_like(latents_BND)
        for codebook in self.books:
            codes.append(nearest(remainder, codebook))
            entry_vectors = functional.embedding(codes[-1], codebook)
            total, remainder = total + entry_vectors, remainder - entry_vectors
        return torch.stack(codes, dim=-1), total

    def decode(self, codes_BNK: Tensor) -> Tensor:
        """Return the latents `[B, N, D]` of codes; fewer codebooks give a coarser version."""
        parts = [
            functional.embedding(codes_BNK[..., k], self.books[k])
            for k in range(codes_BNK.shape[-1])
        ]
        return torch.stack(parts).sum(0)


class Encoder(nn.Module):
    """Encode bands, pitch and voicing [B, T, M + 2] as latents [B, N, D] by principal components.

    The components are computed, not trained. Features are taken from later acoustic frames, as far
    ahead as the synthesizer needs them.
    """

    mean: Tensor
    axes: Tensor

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.stride, size = config.stride, config.stride * (config.bands + 2)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("axes", torch.eye(size, config.latent))

    def stack(self, features_BTM: Tensor) -> Tensor:
        """Concatenate the acoustic frames of each code frame: `[B, N, stride (M + 2)]`."""
        bands, pitch = (
            later(features_BTM[..., :-2], AHEAD - 1),
            later(features_BTM[..., -2:], AHEAD),
        )
        controls = torch.cat([bands, pitch * torch.tensor([PITCH_WEIGHT, VOICE_WEIGHT])], dim=-1)
        output: Tensor = controls.unflatten(1, (-1, self.stride)).flatten(2)
        return output

    def forward(self, features_BTM: Tensor) -> Tensor:
        return (self.stack(features_BTM) - self.mean) @ self.axes


def later(values_BT: Tensor, frames: int) -> Tensor:
    """Return the values `frames` frames later; the last one is repeated."""
    return torch.cat([values_BT[:, frames:], *[values_BT[:, -1:]] * frames], dim=1)


@dataclass(slots=True)
class DecoderState:
    """Hold the state of one sentence: last inputs of the convolutions, and the synthesizer's.

    inputs: `[E, reach]` per block.
    stream: replaces `inputs` where kernels compute.
    """

    synth: SynthState
    seed: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    stream: StreamContext | None = None

    def copy(self) -> DecoderState:
        """Return a state that can advance while this one stays."""
        return replace(self, synth=replace(self.synth), inputs=[*self.inputs])


class AcousticFeatures(NamedTuple):
    """Hold decoder output per acoustic frame: voicing log-odds, octaves, bands of both kinds.

    Pitch and voicing are those of `synth.AHEAD` frames later.
    """

    voiced: Tensor  # [B, T]
    octaves: Tensor  # [B, T]
    harmonic: Tensor  # [B, T, M]
    noise: Tensor  # [B, T, M]


class Decoder(nn.Module):
    """Decode latents [B, N, D] causally to the synthesizer's controls, `stride` frames for each."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        width, self.stride, self.bands = config.codec_width, config.stride, config.bands
        self.enter = nn.Linear(config.latent, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(config.codec_layers))
        self.leave = nn.Linear(width, config.stride * (2 + 2 * config.bands))

    def forward(
        self, latents_BND: Tensor, states: list[DecoderState] | None = None
    ) -> AcousticFeatures:
        """Decode latents; with states, these frames continue those that were decoded before."""
        hidden = self.enter(latents_BND).mT
        for index, block in enumerate(self.blocks):
            if states is None:
                hidden = block(hidden)
                continue
            before = torch.stack([state.inputs[index] for state in states])
            context = torch.cat([before, hidden], dim=2)[..., -Block.reach :]
            hidden = block(hidden, before)
            for state, last in zip(states, context, strict=True):
                state.inputs[index] = last
        return self.acoustic_features(hidden.mT)

    def acoustic_features(self, hidden_BNE: Tensor) -> AcousticFeatures:
        """Return the controls of the last hidden states."""
        controls = self.leave(hidden_BNE).unflatten(-1, (self.stride, -1)).flatten(1, 2)
        voiced, octaves, harmonic, noise = controls.split([1, 1, self.bands, self.bands], dim=-1)
        return AcousticFeatures(
            voiced[..., 0], octaves[..., 0], (harmonic - 5).clamp(-14, 2), (noise - 6).clamp(-14, 2)
        )


class FusedDecoder:
    """Run a `Decoder` on a GPU: each block's convolution is one launch, including its context."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        self._convs = [PackedConv.of(block.depthwise) for block in self._blocks]
        self.contexts = ContextBuffers(self._convs)

    def __call__(self, latents_BND: Tensor, streams: list[StreamContext]) -> AcousticFeatures:
        """Decode the next frames of each stream, which stays as it is until it is committed."""
        hidden_BNE = self._decoder.enter(latents_BND)
        contexts = self.contexts.next_contexts(streams)
        for block, conv, context in zip(self._blocks, self._convs, contexts, strict=True):
            hidden_BNE = hidden_BNE + block.mixed(convolve(hidden_BNE, conv, context=context))
        return self._decoder.acoustic_features(hidden_BNE)


class SpeechCodec(nn.Module):
    """Combine encoder, quantizer, decoder and synthesizer of pocket-tts."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.quantizer, self.decoder = (
            Encoder(config),
            Quantizer(config),
            Decoder(config),
        )
        self.synth = Synth(config.sample_rate, config.hop, config.bands)
        self.fused: FusedDecoder | None = None

    def speak_on(self, device: torch.device) -> None:
        """Move decoding to `device`, with kernels if they support it."""
        self.to(device)
        self.synth.to(device)
        if gpu.takes(self.decoder.enter.weight):
            self.fused = FusedDecoder(self.decoder)

    def begin(self, seed: int = 0) -> DecoderState:
        """Return the state before the first frame of a sentence; `seed` is that of its noise."""
        if self.fused is not None:
            return DecoderState(self.synth.begin(), seed, stream=self.fused.contexts.begin())
        zeros = self.decoder.enter.weight.new_zeros(self.config.codec_width, Block.reach)
        return DecoderState(self.synth.begin(), seed, [zeros for _ in self.decoder.blocks])

    @torch.inference_mode()
    def decode(self, states: list[DecoderState], codes_BNK: Tensor) -> Tensor:
        """Return the samples `[B, N * frame_samples]` of the next N frames of each sentence.

        If it raises, the states are as before.
        """
        latents_BND, advanced = self.quantizer.decode(codes_BNK), [one.copy() for one in states]
        streams = [state.stream for state in states if state.stream is not None]
        if self.fused is not None:
            acoustic_features = self.fused(latents_BND, streams)
        else:
            acoustic_features = self.decoder(latents_BND, advanced)
        pitch = torch.where(acoustic_features.voiced > 0, PITCH * 2**acoustic_features.octaves, 0.0)
        controls = Controls(pitch, acoustic_features.harmonic, acoustic_features.noise)
        samples_BN = self.synth.render(
            [state.synth for state in advanced], controls, [state.seed for state in states]
        )
        for state, after in zip(states, advanced, strict=True):
            state.synth, state.inputs = after.synth, after.inputs
        if self.fused is not None:
            self.fused.contexts.commit(streams)
        return samples_BN
