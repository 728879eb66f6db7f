"""What the three parts of pocket-tts learn from: a loss each, over lists of examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from motet_tts.pocket.codec import PITCH, SpeechCodec
from motet_tts.pocket.model import PocketSpeech
from motet_tts.pocket.reader import PLACES
from motet_tts.pocket.speaker import Pointer
from motet_tts.pocket.synth import Controls
from tts_data import Example

Losses = dict[str, Tensor]
WINDOWS = (2048, 1024, 512, 256)  # samples, of the spectra that are compared
WRONG = 0.04  # of the frames that the speaker reads: with codes that nobody said, as its own may be


def reading(model: PocketSpeech, lines: Sequence[tuple[str, int, tuple[int, ...]]]) -> Losses:
    """CTC of the phonemes (text, voice, phonemes)."""
    reader = model.reader
    letters = [torch.tensor(reader.encode(text)) for text, _, _ in lines]
    lengths = torch.tensor([len(row) for row in letters])
    padded = torch.nn.utils.rnn.pad_sequence(letters, batch_first=True)
    logits = reader(padded, torch.tensor([voice for _, voice, _ in lines]), lengths)
    said = torch.tensor([phoneme for _, _, phonemes in lines for phoneme in phonemes])
    counts = torch.tensor([len(phonemes) for _, _, phonemes in lines])
    chances = logits.float().log_softmax(-1).transpose(0, 1)
    loss = functional.ctc_loss(chances, said, lengths * PLACES, counts, blank=reader.blank, zero_infinity=True)
    return {"loss": loss}


def coding(codec: SpeechCodec, features: Tensor, samples: Tensor, *, quantized: bool, seed: int) -> Losses:
    """Spectra of what comes out against what went in, pitch, voicing, and how well the codebooks fit."""
    latents = codec.encoder(features)
    if quantized:
        _, said = codec.quantizer(latents.detach())
        fit = functional.mse_loss(said, latents.detach()) + 0.25 * functional.mse_loss(latents, said.detach())
        heard_latents = latents + (said - latents).detach()
    else:
        fit, heard_latents = torch.zeros(()), latents
    voiced, octaves, harmonic, noise = codec.decoder(heard_latents)
    spoken, there = features[..., -2], features[..., -1]
    # The pitch that is meant drives the synthesizer, so that bands learn while the pitch still does.
    pitch = torch.where(there > 0, PITCH * 2**spoken, 0.0)
    states = [codec.synth.begin() for _ in range(len(samples))]
    seeds = [seed * 1000 + row for row in range(len(samples))]
    made = codec.synth.render(states, Controls(pitch, harmonic, noise), seeds)
    losses = {
        "spectra": torch.stack([spectral(made, samples, size) for size in WINDOWS]).mean(),
        "voiced": functional.binary_cross_entropy_with_logits(voiced, there),
        "pitch": ((octaves - spoken).abs() * there).sum() / there.sum().clamp(min=1) * 4,
        "codebooks": fit,
    }
    return {"loss": torch.stack(list(losses.values())).sum(), **losses}


def spectral(made_BL: Tensor, wanted_BL: Tensor, size: int) -> Tensor:
    """The mean difference of log spectra and the relative one of spectra, for one window size."""
    window = torch.hann_window(size)

    def spectrum(samples: Tensor) -> Tensor:
        return torch.stft(samples, size, size // 4, size, window, return_complex=True).abs() / size**0.5

    made, wanted = spectrum(made_BL), spectrum(wanted_BL)
    log = ((made + 1e-3).log() - (wanted + 1e-3).log()).abs().mean()
    return log + (made - wanted).norm() / (wanted.norm() + 1e-6)


def revive(codec: SpeechCodec, features: Tensor, generator: torch.Generator) -> int:
    """Give codebook entries that nothing is near to a latent's remainder as their new place; returns how many."""
    moved = 0
    with torch.no_grad():
        left = codec.encoder(features).flatten(0, 1)
        for book in codec.quantizer.books:
            codes = (book.square().sum(-1) - 2 * left @ book.mT).argmin(-1)
            used = torch.bincount(codes, minlength=len(book)) > 0
            idle = (~used).nonzero()[:, 0]
            chosen = torch.randint(len(left), (len(idle),), generator=generator)
            spread = 0.02 * left.std() * torch.randn(len(idle), left.shape[1], generator=generator)
            keep = torch.rand(len(idle), generator=generator) < 0.3  # not all at once: rare codes are not dead ones
            book[idle[keep]] = (left[chosen] + spread)[keep]
            moved += int(keep.sum())
            left = left - functional.embedding(codes, book)
    return moved


def speaking(model: PocketSpeech, examples: Sequence[Example], generator: torch.Generator) -> Losses:
    """Codes and steps of the pointer, of all frames of all examples."""
    speaker, books = model.speaker, model.config.codebooks
    rows: list[Tensor] = []
    codes: list[Tensor] = []
    steps: list[Tensor] = []
    for one in examples:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            said = model.codec.quantizer(model.codec.encoder(one.features[None]))[0][0]
        frames = walk(speaker.end, one, misheard(said, model.config.codes, generator))
        heard = torch.cat([speaker.first(list(one.phonemes))[None], frames[:-1]])
        rows.append(torch.cat([speaker.read(list(one.phonemes), one.voice, one.rate), speaker.embed(heard)]))
        codes.append(said)
        steps.append(torch.tensor(one.pointers).diff())
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    hidden = speaker.backbone(inputs_embeds=padded, use_cache=False).last_hidden_state
    spoken = torch.cat(
        [hidden[i, len(row) - len(said) : len(row)] for i, (row, said) in enumerate(zip(rows, codes, strict=True))]
    )
    wanted = torch.cat(codes)
    each = [
        functional.cross_entropy(logits.float(), wanted[:, k]) for k, logits in enumerate(speaker.depth(spoken, wanted))
    ]
    advance = functional.cross_entropy(speaker.advance(spoken).float(), torch.cat(steps))
    total = torch.stack(each)
    return {"loss": total.sum() / books * 2 + advance, "first": each[0], "codes": total.mean(), "advance": advance}


def misheard(codes: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """The codes `[N, K]` with those of a few frames made up."""
    which = torch.rand(len(codes), 1, generator=generator) < WRONG
    return torch.where(which, torch.randint(most, codes.shape, generator=generator), codes)


def walk(end: int, one: Example, codes: Tensor) -> Tensor:
    """The frames `[N, F]` as the speaker would have said them."""
    pointer = Pointer(list(one.phonemes))
    columns = []
    for before, after in zip(one.pointers, one.pointers[1:], strict=False):
        pointer.move(after - before)
        columns.append(pointer.columns(end))
    return torch.cat([codes, torch.tensor(columns)], dim=1)
