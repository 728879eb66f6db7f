"""Make the speaker encoder's data: synthetic speakers, their sentences, and dialogues.

A speaker is an espeak-ng voice (accent, variant, pitch, range) with a formant scale: its samples
are played faster or slower, which moves the formants too. Speed, pitch and range vary from sentence
to sentence. Held-out speakers have variants that training never draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import numpy as np

from motet_speakers.features import Floats, features
from recipes.speech.espeak import Speech, Voice, speak
from recipes.speech.noise import NORMAL, RATE, Conditions, Wave, apply_conditions, resample
from recipes.speech.sentences import CATEGORIES, sample_sentence
from recipes.speech.voices import ACCENTS, HELD_OUT_VARIANTS, draw_voice
from recipes.training.held_out_seeds import check_training_seed

DETECTED = replace(
    NORMAL, before=(0.0, 0.1), after=(0.0, 0.1)
)  # the silence that speech detection leaves around a sentence
FORMANT_SCALES = (0.86, 1.16)


@dataclass(frozen=True, kw_only=True)
class Person:
    """Hold a synthetic speaker.

    formant_scale: above 1, formants are higher.
    """

    voice: Voice
    formant_scale: float = 1.0


def person(rng: Random) -> Person:
    """Draw a training speaker."""
    voice = draw_voice(rng)
    return Person(
        voice=replace(voice, pitch=rng.randrange(8, 86)), formant_scale=rng.uniform(*FORMANT_SCALES)
    )


def held_out_people(rng: Random, count: int) -> list[Person]:
    """Draw held-out speakers, with different variants as far as there are enough."""
    variants = list(HELD_OUT_VARIANTS)
    rng.shuffle(variants)
    voices = [draw_voice(rng, held_out=True) for _ in range(count)]
    named = [f"{rng.choice(ACCENTS)}+{variants[number % len(variants)]}" for number in range(count)]
    return [
        Person(voice=replace(voice, name=name)) for voice, name in zip(voices, named, strict=True)
    ]


def sentence(speaker: Person, text: str, rng: Random) -> Speech:
    """Speak a text with this speaker's voice, slightly varied."""
    voice = replace(
        speaker.voice,
        rate=round(min(280, max(100, speaker.voice.rate * rng.uniform(0.9, 1.1)))),
        pitch=min(99, max(0, speaker.voice.pitch + rng.randint(-2, 2))),
        range=min(99, max(0, speaker.voice.range + rng.randint(-5, 5))),
    )
    speech = speak(text, voice)
    if speaker.formant_scale == 1.0:
        return speech
    played = resample(
        speech.samples, round(speech.rate * speaker.formant_scale / 100) * 100, speech.rate
    )
    return replace(speech, samples=played)


def utterances(
    speaker: Person, count: int, seed: tuple[int, ...], *, held_out: bool = False
) -> list[Wave]:
    """Return sentences at 16 kHz, each in its own recording conditions."""
    rng, noise = Random(str(seed)), np.random.default_rng(seed)
    found = []
    for _ in range(count):
        text = sample_sentence(
            rng, "general" if rng.random() < 0.6 else rng.choice(CATEGORIES), held_out=held_out
        )
        found.append(apply_conditions(sentence(speaker, text, rng), noise, DETECTED)[0])
    return found


def training_features(seed: int, people: int, sentences: int) -> list[list[Floats]]:
    """Return float16 features by speaker and sentence. Raises RecipeError for a held-out seed."""
    check_training_seed(seed)
    found = []
    for number in range(people):
        speaker = person(Random(f"{seed}/{number}"))
        waves = utterances(speaker, sentences, (seed, number))
        found.append([features(wave).astype(np.float16) for wave in waves])
    return found  # type: ignore[return-value]


class Turn(NamedTuple):
    """Hold a speaker's number and the start and end of its turn, in seconds."""

    speaker: int
    start: float
    end: float


class Dialogue(NamedTuple):
    """Hold the samples of a dialogue and its turns."""

    wave: Wave
    turns: list[Turn]


def dialogue(
    people: list[Person], rng: Random, turns: int, conditions: Conditions = DETECTED
) -> Dialogue:
    """Speak turns in one room with natural pauses; every person speaks at least once."""
    order = list(range(len(people)))
    while len(order) < turns:
        order.append(
            rng.choice(
                [other for other in range(len(people)) if other != order[-1] or len(people) == 1]
            )
        )
    parts: list[Wave] = []
    found: list[Turn] = []
    now = 0.0
    for speaker in order:
        pause = np.zeros(int(rng.uniform(0.15, 0.9) * RATE), np.float32)
        speech = sentence(
            people[speaker], sample_sentence(rng, rng.choice(CATEGORIES), held_out=True), rng
        )
        samples = _trimmed(resample(speech.samples, speech.rate))
        samples = samples / (np.sqrt(np.mean(samples**2)) + 1e-9) * 10 ** (rng.uniform(-3, 3) / 20)
        start = now + len(pause) / RATE
        now = start + len(samples) / RATE
        found.append(Turn(speaker, start, now))
        parts += [pause, samples.astype(np.float32)]
    whole = Speech(samples=np.concatenate(parts), rate=RATE, words=(), phonemes=())
    wave, before = apply_conditions(whole, np.random.default_rng(rng.getrandbits(63)), conditions)
    return Dialogue(
        wave, [Turn(turn.speaker, turn.start + before, turn.end + before) for turn in found]
    )


def _trimmed(samples: Wave) -> Wave:
    """Trim the silence at both ends."""
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max())
    return samples[loud[0] : loud[-1] + 1]
