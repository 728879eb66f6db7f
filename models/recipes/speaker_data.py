"""What the speaker encoder learns from: many made-up people who say a few sentences each, and dialogues of them.

A person is a voice of espeak-ng (accent, variant, pitch, range) whose throat is longer or shorter than espeak's: its
sound is played faster or slower, which moves the formants too. From sentence to sentence a person's speed, pitch and
range change a little, as anybody's do. Held-out people have variants that training never draws, and their own throats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import numpy as np

from motet_speakers.features import Floats, features
from speech_espeak import Speech, Voice, speak
from speech_noise import NORMAL, RATE, Conditions, Wave, expose, resample
from speech_sentences import CATEGORIES, HELD_OUT_SEEDS, say
from speech_voices import ACCENTS, HELD_OUT_VARIANTS, draw_voice

HEARD = replace(
    NORMAL, before=(0.0, 0.1), after=(0.0, 0.1)
)  # what a detector of speech leaves around a sentence
THROAT = (0.86, 1.16)


@dataclass(frozen=True, kw_only=True)
class Person:
    voice: Voice
    throat: float = 1.0  # above 1: shorter, so the formants are higher


def person(rng: Random) -> Person:
    """Somebody to learn from."""
    voice = draw_voice(rng)
    return Person(voice=replace(voice, pitch=rng.randrange(8, 86)), throat=rng.uniform(*THROAT))


def held_out_people(rng: Random, count: int) -> list[Person]:
    """People that training never draws; those of one call have different variants, as far as there are any."""
    variants = list(HELD_OUT_VARIANTS)
    rng.shuffle(variants)
    voices = [draw_voice(rng, held_out=True) for _ in range(count)]
    named = [f"{rng.choice(ACCENTS)}+{variants[number % len(variants)]}" for number in range(count)]
    return [
        Person(voice=replace(voice, name=name)) for voice, name in zip(voices, named, strict=True)
    ]


def sentence(who: Person, text: str, rng: Random) -> Speech:
    """As this person says it this time."""
    voice = replace(
        who.voice,
        rate=round(min(280, max(100, who.voice.rate * rng.uniform(0.9, 1.1)))),
        pitch=min(99, max(0, who.voice.pitch + rng.randint(-2, 2))),
        range=min(99, max(0, who.voice.range + rng.randint(-5, 5))),
    )
    said = speak(text, voice)
    if who.throat == 1.0:
        return said
    played = resample(said.samples, round(said.rate * who.throat / 100) * 100, said.rate)
    return replace(said, samples=played)


def utterances(
    who: Person, count: int, seed: tuple[int, ...], *, held_out: bool = False
) -> list[Wave]:
    """Sentences at 16 kHz, each in conditions of its own."""
    rng, noise = Random(str(seed)), np.random.default_rng(seed)
    found = []
    for _ in range(count):
        text = say(
            rng, "general" if rng.random() < 0.6 else rng.choice(CATEGORIES), held_out=held_out
        )
        found.append(expose(sentence(who, text, rng), noise, HEARD)[0])
    return found


def training_features(seed: int, people: int, sentences: int) -> list[list[Floats]]:
    """Features in float16 by person and sentence. ValueError for a seed that is held out."""
    if seed in HELD_OUT_SEEDS:
        raise ValueError(
            f"seed {seed} is held out for evaluation: train with one below {HELD_OUT_SEEDS.start}"
        )
    found = []
    for number in range(people):
        who = person(Random(f"{seed}/{number}"))
        waves = utterances(who, sentences, (seed, number))
        found.append([features(wave).astype(np.float16) for wave in waves])
    return found  # type: ignore[return-value]


class Turn(NamedTuple):
    """Somebody (a number) speaks from `start` to `end`, seconds."""

    who: int
    start: float
    end: float


class Dialogue(NamedTuple):
    wave: Wave
    turns: list[Turn]


def dialogue(
    people: list[Person], rng: Random, turns: int, conditions: Conditions = HEARD
) -> Dialogue:
    """They speak one after another in the same room, with pauses as people make; everybody at least once."""
    order = list(range(len(people)))
    while len(order) < turns:
        order.append(
            rng.choice([who for who in range(len(people)) if who != order[-1] or len(people) == 1])
        )
    parts: list[Wave] = []
    found: list[Turn] = []
    now = 0.0
    for who in order:
        pause = np.zeros(int(rng.uniform(0.15, 0.9) * RATE), np.float32)
        spoken = sentence(people[who], say(rng, rng.choice(CATEGORIES), held_out=True), rng)
        said = _trimmed(resample(spoken.samples, spoken.rate))
        said = said / (np.sqrt(np.mean(said**2)) + 1e-9) * 10 ** (rng.uniform(-3, 3) / 20)
        start = now + len(pause) / RATE
        now = start + len(said) / RATE
        found.append(Turn(who, start, now))
        parts += [pause, said.astype(np.float32)]
    whole = Speech(samples=np.concatenate(parts), rate=RATE, words=(), phonemes=())
    wave, before = expose(whole, np.random.default_rng(rng.getrandbits(63)), conditions)
    return Dialogue(
        wave, [Turn(turn.who, turn.start + before, turn.end + before) for turn in found]
    )


def _trimmed(samples: Wave) -> Wave:
    """Without the silence around it."""
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max())
    return samples[loud[0] : loud[-1] + 1]
