"""One example of pocket-tts: a sentence, its phonemes, when each is spoken, samples and what the codec hears of them.

A function of (seed, index); training refuses the held-out seeds and sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random
from threading import Event, Semaphore
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Line:
    """A sentence as one of the voices speaks it; `phonemes` are (name, start in seconds)."""

    text: str
    voice: int
    rate: float
    speech: Speech
    phonemes: tuple[tuple[str, float], ...]


def simplify(marks: tuple[Mark, ...]) -> tuple[tuple[str, float], ...]:
    """The phonemes with all kinds of pauses as one, none twice in a row."""
    kept: list[tuple[str, float]] = []
    for mark in marks:
        name = "_" if not mark.phoneme or mark.phoneme.startswith("_") else mark.phoneme
        if name != "_" or not kept or kept[-1][0] != "_":
            kept.append((name, mark.second))
    return tuple(kept)


def line(recipe: Recipe, text: str, voice: int, rate: float) -> Line:
    settings = list(recipe.voices.values())[voice]
    spoken = Voice(name=settings.name, rate=round(WORDS_PER_MINUTE * rate), pitch=settings.pitch, range=settings.range)
    speech = speak(text, spoken)
    return Line(text=text, voice=voice, rate=rate, speech=speech, phonemes=simplify(speech.phonemes))


def training_line(recipe: Recipe, index: int) -> Line:
    """The training sentence number `index`; raises ValueError for a held-out seed."""
    if recipe.seed in HELD_OUT_SEEDS:
        raise ValueError(f"seed {recipe.seed} is held out for evaluation: train with one below {HELD_OUT_SEEDS.start}")
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


def inventory(recipe: Recipe) -> tuple[str, ...]:
    """The phonemes that occur, silence first."""
    names = {name for i in range(recipe.inventory_sentences) for name, _ in training_line(recipe, -1 - i).phonemes}
    return ("_", *sorted(names - {"_"}))


@dataclass(frozen=True, kw_only=True)
class Example:
    """For all three trainings. `pointers` has one entry per code frame and one beyond: the phoneme that is spoken."""

    text: str
    voice: int
    rate: float
    phonemes: tuple[int, ...]
    pointers: tuple[int, ...]
    samples: Tensor  # [N * frame_samples]
    features: Tensor  # [4 N, bands + 2]: bands, octaves of the pitch, voiced or not


def example(config: PocketConfig, made: Line) -> Example | None:
    """None if it has a phoneme that the inventory lacks."""
    numbers = {name: number for number, name in enumerate(config.phonemes)}
    if any(name not in numbers for name, _ in made.phonemes):
        return None
    wave = resample(made.speech.samples, made.speech.rate, config.sample_rate)
    wave = wave * (LOUDNESS / (np.sqrt(np.mean(wave**2)) + 1e-9))
    wave = np.pad(wave, (0, -len(wave) % config.frame_samples)).astype(np.float32)
    return Example(
        text=made.text,
        voice=made.voice,
        rate=made.rate,
        phonemes=tuple(numbers[name] for name, _ in made.phonemes),
        pointers=pointers(config, [start for _, start in made.phonemes], len(wave) // config.frame_samples),
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


def ahead(make: Callable[[int], Any], start: int, stop: int, *, makers: int) -> Generator[Any, None, None]:
    """`make(index)` for every index in order, by processes that are never far ahead; by this one if there are none."""
    if not makers:
        yield from map(make, range(start, stop))
        return
    room, ended = Semaphore(64 * makers), Event()

    def indices() -> Iterator[int]:
        for index in range(start, stop):
            room.acquire()
            if ended.is_set():
                return
            yield index

    with get_context("spawn").Pool(makers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for made in pool.imap(make, indices(), chunksize=4):
                room.release()
                yield made
        finally:  # the pool waits for its thread that waits for room
            ended.set()
            room.release()
