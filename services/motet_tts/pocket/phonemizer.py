"""Convert letters to phonemes with a small encoder that gives each letter room for two phonemes.

Trained with CTC (Graves et al. 2006): equal neighbours are one phoneme, and a blank is none. Each
phoneme thus belongs to a letter, and by that to a word.

Shapes: B sentences, C characters, S = 2C places, E width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .config import PocketConfig

PLACES = 2  # per character


class PhonemeSequence(NamedTuple):
    """Hold the phonemes of a text by number, and for each the index of the character it comes from."""

    phonemes: list[int]
    characters: list[int]


class Phonemizer(nn.Module):
    """Compute logits of the phonemes, the last of them the blank, for each place."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        width = config.reader_width
        self.numbers = {
            character: number for number, character in enumerate(config.characters, start=1)
        }
        self.blank = len(config.phonemes)
        self.letters = nn.Embedding(len(config.characters) + 1, width)  # 0: any other character
        self.voices = nn.Embedding(len(config.voices), width)
        self.local = nn.Conv1d(width, width, 5, padding=2)
        layer = nn.TransformerEncoderLayer(
            width,
            max(1, width // 64),
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, config.reader_layers, enable_nested_tensor=False)
        self.places = nn.Linear(width, PLACES * width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, len(config.phonemes) + 1)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the characters, in lower case."""
        return [self.numbers.get(character, 0) for character in text.lower()]

    def forward(self, letters_BC: Tensor, voices_B: Tensor, lengths_B: Tensor) -> Tensor:
        """Return logits `[B, S, phonemes + 1]` of right-padded sentences."""
        hidden = self.letters(letters_BC) + self.voices(voices_B)[:, None]
        is_padding = torch.arange(letters_BC.shape[1]) >= lengths_B[:, None]
        hidden = hidden.masked_fill(is_padding[..., None], 0.0)
        hidden = (
            hidden
            + nn.functional.gelu(self.local(hidden.mT).mT)
            + sinusoids(hidden.shape[1], hidden.shape[2])
        )
        hidden = self.layers(hidden, src_key_padding_mask=is_padding)
        output: Tensor = self.out(
            self.norm(self.places(hidden).unflatten(-1, (PLACES, -1)).flatten(1, 2))
        )
        return output

    @torch.inference_mode()
    def read(self, text: str, voice: int) -> PhonemeSequence:
        """Return the phonemes of one sentence."""
        letters = self.encode(text)
        if not letters:
            return PhonemeSequence([], [])
        logits = self(torch.tensor([letters]), torch.tensor([voice]), torch.tensor([len(letters)]))
        best = logits[0].argmax(-1).tolist()
        decoded = [
            (phoneme, place // PLACES)
            for place, phoneme in enumerate(best)
            if phoneme != self.blank and (place == 0 or best[place - 1] != phoneme)
        ]
        return PhonemeSequence(
            [phoneme for phoneme, _ in decoded], [character for _, character in decoded]
        )


def sinusoids(count: int, width: int) -> Tensor:
    """Return sinusoidal position embeddings `[count, width]`."""
    rates = torch.exp(-torch.arange(0, width, 2) / width * torch.log(torch.tensor(10_000.0)))
    angles = torch.arange(count)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
