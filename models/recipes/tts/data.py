"""Make pocket-tts examples: sentences, timed phonemes, samples and acoustic features.

An example is a function of (seed, index); training refuses held-out seeds and sentences.
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
from recipes.speech.espeak import Speech, SpeechMark, Voice, speak
from recipes.speech.noise import resample
from recipes.speech.sentences import CATEGORIES, sample_sentence, training_utterance
from recipes.training.errors import RecipeError
from recipes.training.held_out_seeds import HELD_OUT_SEEDS, check_training_seed
from recipes.tts.features import bands, pitch
from recipes.tts.recipe import WORDS_PER_MINUTE, Recipe

LOUDNESS = 0.08  # root mean square
PAUSE = "_"


class TimedPhoneme(NamedTuple):
    """Hold a phoneme, its start, and the first character of its word."""

    name: str
    second: float
    character: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Hold a sentence as one of the voices speaks it."""

    text: str
    voice: int
    rate: float
    speech: Speech
    phonemes: tuple[TimedPhoneme, ...]


def merge_pauses(
    words: tuple[SpeechMark, ...], phonemes: tuple[SpeechMark, ...]
) -> tuple[TimedPhoneme, ...]:
    """Return the phonemes with all kinds of pauses merged into one."""
    kept: list[TimedPhoneme] = []
    starts = [word.second for word in words]
    for mark in phonemes:
        name = PAUSE if not mark.phoneme or mark.phoneme.startswith(PAUSE) else mark.phoneme
        if name != PAUSE or not kept or kept[-1].name != PAUSE:
            word = bisect_right(starts, mark.second) - 1
            kept.append(TimedPhoneme(name, mark.second, words[word].character if word >= 0 else 0))
    return tuple(kept)


def record(recipe: Recipe, text: str, voice: int, rate: float) -> Recording:
    """Speak a text with a voice of the recipe, at `rate` times the ordinary speed."""
    settings = list(recipe.voices.values())[voice]
    espeak_voice = Voice(
        name=settings.name,
        rate=round(WORDS_PER_MINUTE * rate),
        pitch=settings.pitch,
        range=settings.range,
    )
    speech = speak(text, espeak_voice)
    return Recording(
        text=text,
        voice=voice,
        rate=rate,
        speech=speech,
        phonemes=merge_pauses(speech.words, speech.phonemes),
    )


def training_recording(recipe: Recipe, index: int) -> Recording:
    """Return the training sentence number `index`. Raises RecipeError for a held-out seed."""
    check_training_seed(recipe.seed)
    rng = Random(f"tts/{recipe.seed}/{index}")
    low, high = np.log2(recipe.rates)
    rate = float(2 ** rng.uniform(low, high)) if rng.random() < 0.6 else 1.0
    text = training_utterance(rng, general_share=recipe.general_share).text
    return record(recipe, text, rng.randrange(len(recipe.voices)), rate)


def held_out_text(category: str, index: int) -> str:
    """Return a held-out sentence; voices are too few to hold any out.

    Raises RecipeError for an unknown category.
    """
    if category not in CATEGORIES:
        raise RecipeError(
            f"category={category!r} is unknown: use one of {', '.join(CATEGORIES)}",
            param="category",
        )
    return sample_sentence(
        Random(f"tts/{HELD_OUT_SEEDS[index]}/{category}"), category, held_out=True
    )


@dataclass(frozen=True, kw_only=True)
class Example:
    """Hold the data that all three stages train on; only the codec needs `samples`."""

    text: str
    voice: int
    rate: float
    phonemes: tuple[TimedPhoneme, ...]
    features: Tensor  # [frames, bands + 2]: bands, pitch in octaves, voiced (0 or 1)
    samples: Tensor | None  # [frames * hop]

    def __len__(self) -> int:
        """Return the number of acoustic frames."""
        return len(self.features)

    def without_samples(self) -> Example:
        """Return a copy without samples."""
        return replace(self, samples=None)


def example(config: PocketConfig, recording: Recording) -> Example:
    """Compute the features of a recording, at the codec's level and sample rate."""
    wave = resample(recording.speech.samples, recording.speech.rate, config.sample_rate)
    wave = wave * (LOUDNESS / (np.sqrt(np.mean(wave**2)) + 1e-9))
    wave = np.pad(wave, (0, -len(wave) % config.frame_samples)).astype(np.float32)
    return Example(
        text=recording.text,
        voice=recording.voice,
        rate=recording.rate,
        phonemes=recording.phonemes,
        samples=torch.from_numpy(wave),
        features=codec_features(config, wave),
    )


def codec_features(config: PocketConfig, wave: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
    """Return the codec encoder's input `[frames, bands + 2]`."""
    samples = torch.from_numpy(wave)
    hertz = torch.from_numpy(pitch(wave, config.sample_rate, config.hop))
    voiced = hertz > 0
    octaves = torch.where(voiced, (hertz.clamp(min=1) / PITCH).log2(), 0.0)
    loud = bands(samples, config.sample_rate, config.hop, config.bands) / 4 + 1
    return torch.cat([loud, octaves[:, None], voiced[:, None].float()], dim=1)


def pointers(config: PocketConfig, starts: list[float], frames: int) -> tuple[int, ...]:
    """Return the phoneme at the middle of every code frame, then the end.

    It never moves further per frame than the model can.
    """
    middles = (np.arange(frames) + 0.5) / config.frame_rate
    wanted = np.maximum(np.searchsorted(starts, middles, side="right") - 1, 0).tolist()
    positions = [0]
    for want in [*wanted[1:], len(starts)]:
        positions.append(min(want, positions[-1] + config.advances - 1))
    return tuple(positions)
