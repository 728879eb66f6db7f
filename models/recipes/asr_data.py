"""One example of pocket-asr: a clip as log-mel frames, its text, and when which word and phoneme is spoken.

A training example is a pure function of (seed, index). Training refuses the held-out seeds; held-out clips have
sentences and voices that training never draws (see `speech_sentences` and `speech_voices`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

import asr_tokenizer
from asr_recipe import Recipe
from speech_espeak import Mark, Speech, Voice, speak
from speech_noise import CLEAN, NORMAL, RATE, Conditions, Wave, expose, no_speech
from speech_sentences import CATEGORIES, HELD_OUT_SEEDS, say, utterance
from speech_voices import draw_voice

FRAME = 160  # samples
DECADES = 8  # the dynamic range of Whisper's features, in powers of ten
# espeak-ng's names of the phonemes of English in the accents used here, without stress; 0 is silence.
PHONEMES = (
    *(
        "_",
        "t",
        "n",
        "s",
        "I",
        "l",
        "r",
        "d",
        "k",
        "@",
        "z",
        "E",
        "m",
        "a",
        "w",
        "a#",
        "p",
        "0",
        "V",
        "i:",
        "D",
        "aI",
    ),
    *(
        "f",
        "b",
        "v",
        "i",
        "u:",
        "eI",
        "@L",
        "I2",
        "h",
        "3",
        "oU",
        "g",
        "A@",
        "N",
        "3:",
        "dZ",
        "j",
        "@2",
        ";",
        "e@",
    ),
    *(
        "aU",
        "S",
        "T",
        "tS",
        "O:",
        "r-",
        "O@",
        "I#",
        "U",
        "o@",
        "aa",
        "t#",
        "O2",
        "i@3",
        "U@",
        "i@",
        "aI2",
        "OI",
        "A:",
    ),
    *("w#", "aI@", "@-", "t[", "VR", "IR", "Z", "t2", "aI3", "@5", "?", "n-", "O"),
)
UNKNOWN = 255  # another phoneme: nothing is to be learned of it


@dataclass(frozen=True, kw_only=True)
class Clip:
    """What is heard and what was said; `words` are (first character, start, end) in seconds of the clip."""

    wave: Wave
    text: str
    words: tuple[tuple[int, float, float], ...] = ()
    phonemes: tuple[Mark, ...] = ()
    category: str = "silence"
    voice: Voice = field(default_factory=Voice)


@dataclass(frozen=True, kw_only=True)
class Example:
    """Features [80, frames] in bytes from the floor of the clip's range to its peak, and what to learn of them."""

    features: NDArray[np.uint8]
    peak: float
    tokens: tuple[int, ...]  # the text alone
    spans: tuple[tuple[float, float], ...]  # the seconds of each token's word
    phonemes: NDArray[np.uint8]  # one per encoder position

    @property
    def frames(self) -> int:
        return int(self.features.shape[1])


def word_times(text: str, speech: Speech) -> list[tuple[int, float, float]]:
    """(first character, start, end) of every word between blanks, in seconds of the speech, pauses left out."""
    starts = [
        index
        for index, char in enumerate(text)
        if char != " " and (index == 0 or text[index - 1] == " ")
    ]
    times: dict[int, float] = {}
    for mark in speech.words:
        first = starts[max(0, bisect_right(starts, mark.character) - 1)]
        times.setdefault(first, mark.second)
    spoken = sorted(times.items(), key=lambda item: item[1])
    pauses = [mark.second for mark in speech.phonemes if mark.phoneme.startswith("_")]
    found = []
    for (first, start), following in zip(
        spoken, [*(t for _, t in spoken[1:]), speech.seconds], strict=True
    ):
        end = next((pause for pause in pauses if start + 0.05 < pause < following), following)
        found.append((first, start, end))
    return found


def record(
    text: str, voice: Voice, rng: Generator, conditions: Conditions = NORMAL, category: str = ""
) -> Clip:
    """The sentence spoken and heard."""
    speech = speak(text, voice)
    wave, before = expose(speech, rng, conditions)
    words = tuple(
        (first, start + before, end + before) for first, start, end in word_times(text, speech)
    )
    phonemes = tuple(Mark(mark.second + before, phoneme=mark.phoneme) for mark in speech.phonemes)
    return Clip(
        wave=wave, text=text, words=words, phonemes=phonemes, category=category, voice=voice
    )


def clip(recipe: Recipe, index: int) -> Clip:
    """The training clip number `index`; raises ValueError for a held-out seed."""
    if recipe.seed in HELD_OUT_SEEDS:
        raise ValueError(
            f"seed {recipe.seed} is held out for evaluation: train with one below {HELD_OUT_SEEDS.start}"
        )
    rng = Random(f"{recipe.seed}/{index}")
    noise = np.random.default_rng((recipe.seed, index))
    if rng.random() < recipe.silent_share:
        return Clip(wave=no_speech(noise), text="")
    while True:
        said = utterance(rng, general_share=recipe.general_share, long_share=recipe.long_share)
        made = record(said.text, draw_voice(rng), noise, category=said.category)
        if len(made.wave) <= asr_tokenizer.WINDOW * RATE:
            return made


def held_out(category: str, index: int, *, clean: bool = False) -> Clip:
    """The held-out clip number `index` of a category, in a voice that training never draws."""
    if category not in CATEGORIES:
        raise ValueError(f"category {category!r} is unknown: use {', '.join(CATEGORIES)}")
    seed = HELD_OUT_SEEDS[index]
    rng = Random(f"{seed}/{category}")
    noise = np.random.default_rng((seed, CATEGORIES.index(category)))
    while True:
        text = say(rng, category, held_out=True)
        made = record(
            text, draw_voice(rng, held_out=True), noise, CLEAN if clean else NORMAL, category
        )
        if len(made.wave) <= asr_tokenizer.WINDOW * RATE:
            return made


@cache
def _extractor() -> asr_tokenizer.WhisperFeatureExtractor:
    return asr_tokenizer.feature_extractor()


def features(wave: Wave) -> NDArray[np.float32]:
    """Whisper's log-mel features [80, frames] of the clip alone, an even number of frames."""
    padded = np.pad(wave, (0, -len(wave) % (2 * FRAME)))
    made = _extractor()(padded, sampling_rate=RATE, padding="do_not_pad", return_tensors="np")
    return np.asarray(made["input_features"][0], np.float32)


def example(made: Clip, tokenizer: asr_tokenizer.WhisperTokenizer) -> Example:
    """The clip as the trainer stores it."""
    mel = features(made.wave)
    peak = float(mel.max())
    scaled = (mel - peak) * (4 / DECADES) + 1
    encoded = (
        tokenizer(" " + made.text, add_special_tokens=False, return_offsets_mapping=True)
        if made.text
        else {}
    )
    offsets = encoded.get("offset_mapping", [])
    return Example(
        features=np.round(scaled.clip(0, 1) * 255).astype(np.uint8),
        peak=peak,
        tokens=tuple(encoded.get("input_ids", ())),
        spans=tuple(_span(made, max(0, end - 2)) for _, end in offsets),
        phonemes=_phonemes(made, mel.shape[1] // 2),
    )


def _span(made: Clip, character: int) -> tuple[float, float]:
    """The seconds of the word that the character belongs to."""
    index = bisect_right([first for first, _, _ in made.words], character) - 1
    return made.words[max(0, index)][1:] if made.words else (0.0, 0.0)


def _phonemes(made: Clip, positions: int) -> NDArray[np.uint8]:
    """The phoneme in the middle of each encoder position."""
    times = (np.arange(positions) + 0.5) * asr_tokenizer.STEP
    if not made.phonemes:
        return np.zeros(positions, np.uint8)
    index = np.searchsorted([mark.second for mark in made.phonemes], times, side="right") - 1
    labels = np.array([phoneme_label(mark.phoneme) for mark in made.phonemes], np.uint8)
    return np.where(index < 0, 0, labels[np.maximum(index, 0)]).astype(np.uint8)


def phoneme_label(name: str) -> int:
    """The number of a phoneme, whatever its stress; pauses of all kinds are 0."""
    bare = name.lstrip("',")
    if not bare or bare.startswith("_"):
        return 0
    return PHONEMES.index(bare) if bare in PHONEMES else UNKNOWN
