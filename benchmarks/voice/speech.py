"""Generate questions about the micro-world, and synthesize them with espeak-ng."""

from __future__ import annotations

import sys
from functools import lru_cache
from random import Random

import numpy as np

from benchmarks.support.paths import MODELS

sys.path.append(str(MODELS))

from motet_media.audio import Resampler  # behind the path, as what comes next
from recipes.speech.espeak import Voice, speak

RATE = 24_000  # Hz
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")
SHAPES = ("circle", "square", "star", "triangle")
_QUIET = 0.02  # of full scale; speech of espeak-ng is louder
_PAUSE = 0.12  # seconds, at most: a longer one between two sentences would end the turn


def questions(count: int, seed: int = 0) -> list[str]:
    """Return `count` questions, always the same for a seed."""
    draw = Random(seed)
    return [_question(draw) for _ in range(count)]


def _question(draw: Random) -> str:
    (one, other), (first, second) = draw.sample(SHAPES, 2), draw.sample(COLOURS, 2)
    scene = f"There are {draw.choice(NUMBERS[:3])} {first} {one}s and a {second} {other}."
    return draw.choice(
        [
            f"What is {draw.choice(NUMBERS)} plus {draw.choice(NUMBERS)}?",
            f"{scene} What do you see?",
            f"{scene} How many {one}s are there?",
            f"{scene} What colour is the {other}?",
        ]
    )


@lru_cache(256)
def spoken(text: str) -> bytes:
    """Return a text as 16-bit PCM at RATE, without silence around it and with short pauses."""
    speech = speak(text, Voice())
    loud = np.flatnonzero(np.abs(speech.samples) > _QUIET)
    longest = round(_PAUSE * speech.rate)
    pauses = np.flatnonzero(np.diff(loud) > longest)
    starts, ends = [loud[0], *loud[pauses + 1]], [*(loud[pauses] + longest), loud[-1] + 1]
    parts = [speech.samples[start:end] for start, end in zip(starts, ends, strict=True)]
    pcm = (np.concatenate(parts) * 32767).astype("<i2").tobytes()
    resampler = Resampler(speech.rate, RATE)
    return bytes(resampler.feed(pcm) + resampler.flush())
