"""What the three parts of pocket-tts learn from: a loss each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from motet_tts.pocket.codec import PITCH, SpeechCodec, later
from motet_tts.pocket.frame_generator import FrameGenerator
from motet_tts.pocket.phonemizer import PLACES, Phonemizer
from motet_tts.pocket.synth import AHEAD, Controls
from tts_batches import Passage, Walk
from tts_features import bands

Losses = dict[str, Tensor]
WINDOWS = (2048, 512)  # samples, of the spectra that are compared
MISHEARD = (
    0.3  # of the frames that the speaker reads, at most: codes that nobody said, as its own may be
)


def reading(reader: Phonemizer, passages: Sequence[Passage]) -> Losses:
    """CTC of the phonemes, word by word: where words begin is known, so that only their letters are to be aligned."""
    letters = [torch.tensor(reader.encode(one.text)) for one in passages]
    lengths = torch.tensor([len(row) for row in letters])
    padded = torch.nn.utils.rnn.pad_sequence(letters, batch_first=True)
    logits = reader(padded, torch.tensor([one.voice for one in passages]), lengths)
    rows = [
        torch.arange(PLACES * begin, PLACES * end) + index * logits.shape[1]
        for index, one in enumerate(passages)
        for begin, end in zip(one.begins, (*one.begins[1:], len(one.text)), strict=True)
    ]
    places = torch.nn.utils.rnn.pad_sequence(rows)
    words = [word for one in passages for word in one.words]
    loss = functional.ctc_loss(
        logits.flatten(0, 1)[places].log_softmax(-1),
        torch.tensor([phoneme for word in words for phoneme in word]),
        torch.tensor([len(row) for row in rows]),
        torch.tensor([len(word) for word in words]),
        blank=reader.blank,
        zero_infinity=True,
    )
    return {"loss": loss}


def coding(codec: SpeechCodec, features: Tensor, samples: Tensor, *, seed: int) -> Losses:
    """Spectra of what comes out of the codes against what went in, pitch and voicing."""
    with torch.no_grad():
        said = codec.quantizer(codec.encoder(features))[1]
    heard = codec.decoder(said)
    octaves, voiced = later(features[..., -2:], AHEAD).unbind(-1)
    # The pitch that is meant drives the synthesizer, so that bands learn while the pitch still does.
    pitch = torch.where(voiced > 0, PITCH * 2**octaves, 0.0)
    states = [codec.synth.begin() for _ in range(len(samples))]
    seeds = [seed * 1000 + row for row in range(len(samples))]
    made = codec.synth.render(states, Controls(pitch, heard.harmonic, heard.noise), seeds)
    losses = {
        "bands": functional.l1_loss(mel(codec, made), mel(codec, samples)),
        "spectra": torch.stack([spectral(made, samples, size) for size in WINDOWS]).mean(),
        "voiced": functional.binary_cross_entropy_with_logits(heard.voiced, voiced),
        "pitch": ((heard.octaves - octaves).abs() * voiced).sum() / voiced.sum().clamp(min=1) * 4,
    }
    return {"loss": torch.stack(list(losses.values())).sum(), **losses}


def mel(codec: SpeechCodec, samples: Tensor) -> Tensor:
    return bands(samples, codec.config.sample_rate, codec.config.hop, codec.config.bands)


def spectral(made_BL: Tensor, wanted_BL: Tensor, size: int) -> Tensor:
    """The mean difference of log spectra and the relative one of spectra, for one window size."""
    window = torch.hann_window(size)

    def spectrum(samples: Tensor) -> Tensor:
        found = torch.stft(samples, size, size // 4, size, window, return_complex=True)
        return (found.real.square() + found.imag.square() + 1e-9).sqrt() / size**0.5

    made, wanted = spectrum(made_BL), spectrum(wanted_BL)
    log = ((made + 1e-3).log() - (wanted + 1e-3).log()).abs().mean()
    return log + (made - wanted).norm() / (wanted.norm() + 1e-6)


def speaking(speaker: FrameGenerator, walks: Sequence[Walk], generator: torch.Generator) -> Losses:
    """Codes and steps of the pointer, of all frames of all sentences."""
    hidden = _frames(speaker, walks, generator)
    wanted, steps = torch.cat([one.codes for one in walks]), torch.cat([one.steps for one in walks])
    books = [
        functional.cross_entropy(logits, wanted[:, k])
        for k, logits in enumerate(speaker.depth(hidden, wanted))
    ]
    advance = functional.cross_entropy(speaker.advance(hidden), steps)
    codes = torch.stack(books).mean()
    return {"loss": 2 * codes + advance, "first": books[0], "codes": codes, "advance": advance}


def _frames(speaker: FrameGenerator, walks: Sequence[Walk], generator: torch.Generator) -> Tensor:
    """What the backbone makes of all that is read before each frame, `[frames of all sentences, E]`."""
    phonemes, inputs = [one.phonemes for one in walks], [one.inputs for one in walks]
    longest = 1 + max(len(one) for one in walks)
    begins = torch.arange(len(walks)) * longest
    said = [begin + 1 + torch.arange(len(row)) for begin, row in zip(begins, phonemes, strict=True)]
    heard = [
        row[-1] + 1 + torch.arange(len(frames)) for row, frames in zip(said, inputs, strict=True)
    ]
    manner = speaker.embed_style(
        torch.tensor([one.voice for one in walks]), torch.tensor([one.rate for one in walks])
    )
    sounds = speaker.embed_phonemes(
        torch.cat(phonemes), torch.cat([torch.arange(len(row)) for row in phonemes])
    )
    noisy = torch.cat(
        [
            misheard(rows, speaker.config.codebooks, speaker.config.codes, generator)
            for rows in inputs
        ]
    )
    empty = torch.zeros(len(walks) * longest, manner.shape[1])
    flat = empty.index_copy(
        0, torch.cat([begins, *said, *heard]), torch.cat([manner, sounds, speaker.embed(noisy)])
    )
    hidden = speaker.backbone(
        inputs_embeds=flat.unflatten(0, (-1, longest)), use_cache=False
    ).last_hidden_state
    return hidden.flatten(0, 1)[torch.cat(heard)]


def misheard(inputs: Tensor, books: int, most: int, generator: torch.Generator) -> Tensor:
    """The inputs `[N, F]` with the codes of a random share of the frames made up, but for the first."""
    share = MISHEARD * torch.rand((), generator=generator)
    which = (torch.rand(len(inputs), 1, generator=generator) < share) & (inputs[:, :1] >= 0)
    made_up = torch.randint(most, (len(inputs), books), generator=generator)
    return torch.cat([torch.where(which, made_up, inputs[:, :books]), inputs[:, books:]], dim=1)
