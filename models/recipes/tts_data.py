"""One example of pocket-tts: a sentence, its phonemes, when each is spoken, samples and what the codec hears of them.

A function of (seed, index); training refuses the held-out seeds and sentences.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from motet_tts.pocket.codec import PITCH
from motet_tts.pocket.config import PocketConfig
from speech_espeak import Mark, Speech, Voice, speak
from speech_noise import resample
from speech_sentences import CATEGORIES, HELD_OUT_SEEDS, say, utterance
from tts_features import bands, pitch
from tts_recipe import WORDS_PER_MINUTE, Recipe

LOUDNESS = 0.08  # root mean square
PAUSE = "_"


class Sound(NamedTuple):
    """A phoneme, when it begins, and the character at which its word does."""

    name: str
    second: float
    character: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """A sentence as one of the voices speaks it."""

    text: str
    voice: int
    rate: float
    speech: Speech
    sounds: tuple[Sound, ...]


def sounds(words: tuple[Mark, ...], phonemes: tuple[Mark, ...]) -> tuple[Sound, ...]:
    """The phonemes with all kinds of pauses as one, none twice in a row."""
    kept: list[Sound] = []
    starts = [word.second for word in words]
    for mark in phonemes:
        name = PAUSE if not mark.phoneme or mark.phoneme.startswith(PAUSE) else mark.phoneme
        if name != PAUSE or not kept or kept[-1].name != PAUSE:
            word = bisect_right(starts, mark.second) - 1
            kept.append(Sound(name, mark.second, words[word].character if word >= 0 else 0))
    return tuple(kept)


def line(recipe: Recipe, text: str, voice: int, rate: float) -> Line:
    settings = list(recipe.voices.values())[voice]
    spoken = Voice(
        name=settings.name,
        rate=round(WORDS_PER_MINUTE * rate),
        pitch=settings.pitch,
        range=settings.range,
    )
    speech = speak(text, spoken)
    return Line(
        text=text,
        voice=voice,
        rate=rate,
        speech=speech,
        sounds=sounds(speech.words, speech.phonemes),
    )


def training_line(recipe: Recipe, index: int) -> Line:
    """The training sentence number `index`; raises ValueError for a held-out seed."""
    if recipe.seed in HELD_OUT_SEEDS:
        raise ValueError(
            f"seed {recipe.seed} is held out for evaluation: train with one below {HELD_OUT_SEEDS.start}"
        )
    rng = Random(f"tts/{recipe.seed}/{index}")
    low, high = np.log2(recipe.rates)
    rate = float(2 ** rng.uniform(low, high)) if rng.random() < 0.6 else 1.0
    text = utterance(rng, general_share=recipe.general_share).text
    return line(recipe, text, rng.randrange(len(recipe.voices)), rate)


def held_out_text(category: str, index: int) -> str:
    """A held-out sentence; the voices of pocket-tts are few, so only sentences are held out."""
    if category not in CATEGORIES:
        raise ValueError(f"category {category!r} is unknown: use {', '.join(CATEGORIES)}")
    return say(Random(f"tts/{HELD_OUT_SEEDS[index]}/{category}"), category, held_out=True)


@dataclass(frozen=True, kw_only=True)
class Example:
    """For all three trainings. `samples` are there for the codec alone."""

    text: str
    voice: int
    rate: float
    sounds: tuple[Sound, ...]
    features: (
        Tensor  # [frames, bands + 2]: bands, octaves of the pitch, voiced or not; whole code frames
    )
    samples: Tensor | None  # [frames * hop]

    def __len__(self) -> int:
        return len(self.features)

    def silent(self) -> Example:
        """The same without samples."""
        return replace(self, samples=None)


def example(config: PocketConfig, made: Line) -> Example:
    """What the codec hears of a line, level and rate adjusted."""
    wave = resample(made.speech.samples, made.speech.rate, config.sample_rate)
    wave = wave * (LOUDNESS / (np.sqrt(np.mean(wave**2)) + 1e-9))
    wave = np.pad(wave, (0, -len(wave) % config.frame_samples)).astype(np.float32)
    return Example(
        text=made.text,
        voice=made.voice,
        rate=made.rate,
        sounds=made.sounds,
        samples=torch.from_numpy(wave),
        features=listen(config, wave),
    )


def listen(config: PocketConfig, wave: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
    """What the codec's encoder reads, `[frames, bands + 2]`."""
    samples = torch.from_numpy(wave)
    hertz = torch.from_numpy(pitch(wave, config.sample_rate, config.hop))
    voiced = hertz > 0
    octaves = torch.where(voiced, (hertz.clamp(min=1) / PITCH).log2(), 0.0)
    loud = bands(samples, config.sample_rate, config.hop, config.bands) / 4 + 1
    return torch.cat([loud, octaves[:, None], voiced[:, None].float()], dim=1)


def pointers(config: PocketConfig, starts: list[float], frames: int) -> tuple[int, ...]:
    """The phoneme in the middle of every code frame, never further ahead than the model may move; then the end."""
    middles = (np.arange(frames) + 0.5) / config.frame_rate
    wanted = np.maximum(np.searchsorted(starts, middles, side="right") - 1, 0).tolist()
    told = [0]
    for want in [*wanted[1:], len(starts)]:
        told.append(min(want, told[-1] + config.advances - 1))
    return tuple(told)
