"""Compute the losses of pocket-tts: phonemizer, codec and frame generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torchaudio.functional import spectrogram

from motet_tts.pocket.codec import PITCH, SpeechCodec, later
from motet_tts.pocket.frame_generator import FrameGenerator
from motet_tts.pocket.phonemizer import PLACES, Phonemizer
from motet_tts.pocket.synth import AHEAD, Controls
from recipes.tts.batches import GeneratorExample, PhonemizerExample
from recipes.tts.features import bands

Losses = dict[str, Tensor]
WINDOWS = (2048, 512)  # samples, of the compared spectra
MAX_CORRUPTED = 0.3  # of input frames, at most, get random codes, as generation makes errors too


def phonemizer_loss(reader: Phonemizer, examples: Sequence[PhonemizerExample]) -> Losses:
    """Return the CTC loss of phonemes, aligned word by word since word starts are known."""
    letters = [torch.tensor(reader.encode(one.text)) for one in examples]
    lengths = torch.tensor([len(row) for row in letters])
    padded = torch.nn.utils.rnn.pad_sequence(letters, batch_first=True)
    logits = reader(padded, torch.tensor([one.voice for one in examples]), lengths)
    rows = [
        torch.arange(PLACES * begin, PLACES * end) + index * logits.shape[1]
        for index, one in enumerate(examples)
        for begin, end in zip(one.begins, (*one.begins[1:], len(one.text)), strict=True)
    ]
    places = torch.nn.utils.rnn.pad_sequence(rows)
    words = [word for one in examples for word in one.words]
    loss = functional.ctc_loss(
        logits.flatten(0, 1)[places].log_softmax(-1),
        torch.tensor([phoneme for word in words for phoneme in word]),
        torch.tensor([len(row) for row in rows]),
        torch.tensor([len(word) for word in words]),
        blank=reader.blank,
        zero_infinity=True,
    )
    return {"loss": loss}


def codec_loss(codec: SpeechCodec, features: Tensor, samples: Tensor, *, seed: int) -> Losses:
    """Return the losses of spectra, pitch and voicing after encoding and decoding."""
    with torch.no_grad():
        latents = codec.quantizer(codec.encoder(features))[1]
    decoded = codec.decoder(latents)
    octaves, voiced = later(features[..., -2:], AHEAD).unbind(-1)
    # The target pitch drives the synthesizer, so that bands train before the pitch has converged.
    pitch = torch.where(voiced > 0, PITCH * 2**octaves, 0.0)
    states = [codec.synth.begin() for _ in range(len(samples))]
    seeds = [seed * 1000 + row for row in range(len(samples))]
    synthesized = codec.synth.render(
        states, Controls(pitch, decoded.harmonic, decoded.noise), seeds
    )
    losses = {
        "bands": functional.l1_loss(mel(codec, synthesized), mel(codec, samples)),
        "spectra": torch.stack([spectral(synthesized, samples, size) for size in WINDOWS]).mean(),
        "voiced": functional.binary_cross_entropy_with_logits(decoded.voiced, voiced),
        "pitch": ((decoded.octaves - octaves).abs() * voiced).sum() / voiced.sum().clamp(min=1) * 4,
    }
    return {"loss": torch.stack(list(losses.values())).sum(), **losses}


def mel(codec: SpeechCodec, samples: Tensor) -> Tensor:
    """Return the log-mel bands of samples."""
    return bands(samples, codec.config.sample_rate, codec.config.hop, codec.config.bands)


def spectral(made_BL: Tensor, target_BL: Tensor, size: int) -> Tensor:
    """Return the error of log spectra and the relative error of spectra, at one window size."""
    window = torch.hann_window(size)

    def spectrum(samples: Tensor) -> Tensor:
        power = spectrogram(samples, 0, window, size, size // 4, size, 2.0, False)
        found: Tensor = (power + 1e-9).sqrt() / size**0.5
        return found

    made, target = spectrum(made_BL), spectrum(target_BL)
    log = ((made + 1e-3).log() - (target + 1e-3).log()).abs().mean()
    return log + (made - target).norm() / (target.norm() + 1e-6)


def generator_loss(
    speaker: FrameGenerator, examples: Sequence[GeneratorExample], generator: torch.Generator
) -> Losses:
    """Return the losses of codes and pointer steps, over all frames of all sentences."""
    hidden = _frames(speaker, examples, generator)
    codes, steps = (
        torch.cat([one.codes for one in examples]),
        torch.cat([one.steps for one in examples]),
    )
    books = [
        functional.cross_entropy(logits, codes[:, k])
        for k, logits in enumerate(speaker.depth(hidden, codes))
    ]
    advance = functional.cross_entropy(speaker.advance(hidden), steps)
    mean = torch.stack(books).mean()
    return {"loss": 2 * mean + advance, "first": books[0], "codes": mean, "advance": advance}


def _frames(
    speaker: FrameGenerator, examples: Sequence[GeneratorExample], generator: torch.Generator
) -> Tensor:
    """Return the backbone's output before each frame, `[frames of all sentences, E]`."""
    phonemes, inputs = [one.phonemes for one in examples], [one.inputs for one in examples]
    longest = 1 + max(len(one) for one in examples)
    begins = torch.arange(len(examples)) * longest
    phoneme_places = [
        begin + 1 + torch.arange(len(row)) for begin, row in zip(begins, phonemes, strict=True)
    ]
    frame_places = [
        row[-1] + 1 + torch.arange(len(frames))
        for row, frames in zip(phoneme_places, inputs, strict=True)
    ]
    style = speaker.embed_style(
        torch.tensor([one.voice for one in examples]), torch.tensor([one.rate for one in examples])
    )
    embedded_phonemes = speaker.embed_phonemes(
        torch.cat(phonemes), torch.cat([torch.arange(len(row)) for row in phonemes])
    )
    noisy = torch.cat(
        [
            corrupt_codes(rows, speaker.config.codebooks, speaker.config.codes, generator)
            for rows in inputs
        ]
    )
    empty = torch.zeros(len(examples) * longest, style.shape[1])
    flat = empty.index_copy(
        0,
        torch.cat([begins, *phoneme_places, *frame_places]),
        torch.cat([style, embedded_phonemes, speaker.embed(noisy)]),
    )
    hidden = speaker.backbone(
        inputs_embeds=flat.unflatten(0, (-1, longest)), use_cache=False
    ).last_hidden_state
    return hidden.flatten(0, 1)[torch.cat(frame_places)]


def corrupt_codes(inputs: Tensor, books: int, codes: int, generator: torch.Generator) -> Tensor:
    """Replace the codes of a random share of the frames in inputs `[N, F]`, except the first."""
    share = MAX_CORRUPTED * torch.rand((), generator=generator)
    which = (torch.rand(len(inputs), 1, generator=generator) < share) & (inputs[:, :1] >= 0)
    random_codes = torch.randint(codes, (len(inputs), books), generator=generator)
    return torch.cat(
        [torch.where(which, random_codes, inputs[:, :books]), inputs[:, books:]], dim=1
    )
