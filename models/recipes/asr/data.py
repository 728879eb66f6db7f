"""Make pocket-asr examples: log-mel frames, text, and the times of words and phonemes.

A training example is a pure function of (seed, index). Held-out seeds are refused in training;
held-out clips have sentences and voices that training never draws (see `speech.sentences` and
`speech.voices`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from recipes.asr import tokenizer as asr_tokenizer
from recipes.asr.recipe import Recipe
from recipes.speech.espeak import Speech, SpeechMark, Voice, speak
from recipes.speech.noise import CLEAN, NORMAL, RATE, Conditions, Wave, apply_conditions, no_speech
from recipes.speech.sentences import CATEGORIES, sample_sentence, training_utterance
from recipes.speech.voices import draw_voice
from recipes.training.errors import RecipeError
from recipes.training.held_out_seeds import HELD_OUT_SEEDS, check_training_seed

FRAME = 160  # samples
DYNAMIC_RANGE = 8  # of Whisper's features, in decades
# English phonemes of the accents used, by espeak-ng's names without stress; 0 is silence.
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
UNKNOWN = 255  # label of any other phoneme; has no loss


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Hold a recording and its transcript.

    words: (first character, start, end), in seconds of the clip.
    """

    wave: Wave
    text: str
    words: tuple[tuple[int, float, float], ...] = ()
    phonemes: tuple[SpeechMark, ...] = ()
    category: str = "silence"
    voice: Voice = field(default_factory=Voice)


@dataclass(frozen=True, kw_only=True)
class Example:
    """Hold a clip as the trainer stores it.

    features: [80, frames], quantized to 8 bits between the floor of the clip's range and `peak`.
    """

    features: NDArray[np.uint8]
    peak: float
    tokens: tuple[int, ...]  # without special tokens
    spans: tuple[tuple[float, float], ...]  # start and end of each token's word, seconds
    phonemes: NDArray[np.uint8]  # one per encoder position

    @property
    def frames(self) -> int:
        return int(self.features.shape[1])


def word_times(text: str, speech: Speech) -> list[tuple[int, float, float]]:
    """Return (first character, start, end) of each word, in seconds without trailing pauses."""
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


def scale_throat(speech: Speech, scale: float) -> Speech:
    """Scale formants, pitch and speed, all by the same factor.

    The new rate is a multiple of 150 Hz, so that few filters resample it.
    """
    rate = round(speech.rate * scale / 150) * 150
    words, phonemes = (
        tuple(mark._replace(second=mark.second * speech.rate / rate) for mark in marks)
        for marks in (speech.words, speech.phonemes)
    )
    return replace(speech, rate=rate, words=words, phonemes=phonemes)


def draw_speech(recipe: Recipe, rng: Random, text: str) -> tuple[Speech, Voice]:
    """Speak a text with a random voice; a share of them has a throat of another length."""
    scale = 1.0
    if recipe.throat_share and rng.random() < recipe.throat_share:
        scale = rng.uniform(*recipe.throats)
    voice = draw_voice(rng)
    if scale == 1.0:
        return speak(text, voice), voice
    slower = replace(voice, rate=max(85, round(voice.rate / scale)))  # so that its speed stays
    return scale_throat(speak(text, slower), scale), voice


def record_clip(
    text: str,
    speech: Speech,
    voice: Voice,
    rng: Generator,
    conditions: Conditions = NORMAL,
    category: str = "",
) -> Clip:
    """Record the speech of a text under conditions."""
    wave, before = apply_conditions(speech, rng, conditions)
    words = tuple(
        (first, start + before, end + before) for first, start, end in word_times(text, speech)
    )
    phonemes = tuple(
        SpeechMark(mark.second + before, phoneme=mark.phoneme) for mark in speech.phonemes
    )
    return Clip(
        wave=wave, text=text, words=words, phonemes=phonemes, category=category, voice=voice
    )


def training_clip(recipe: Recipe, index: int) -> Clip:
    """Return the training clip number `index`. Raises RecipeError for a held-out seed."""
    check_training_seed(recipe.seed)
    rng = Random(f"{recipe.seed}/{index}")
    noise = np.random.default_rng((recipe.seed, index))
    if rng.random() < recipe.no_speech_share:
        return Clip(wave=no_speech(noise), text="")
    while True:
        sentence = training_utterance(
            rng, general_share=recipe.general_share, long_share=recipe.long_share
        )
        speech, voice = draw_speech(recipe, rng, sentence.text)
        clip = record_clip(
            sentence.text, speech, voice, noise, recipe.conditions, sentence.category
        )
        if len(clip.wave) <= asr_tokenizer.WINDOW * RATE:
            return clip


def held_out_clip(category: str, index: int, *, clean: bool = False) -> Clip:
    """Return the held-out clip number `index` of a category. Raises RecipeError if unknown."""
    if category not in CATEGORIES:
        raise RecipeError(
            f"category={category!r} is unknown: use one of {', '.join(CATEGORIES)}",
            param="category",
        )
    seed = HELD_OUT_SEEDS[index]
    rng = Random(f"{seed}/{category}")
    noise = np.random.default_rng((seed, CATEGORIES.index(category)))
    while True:
        text = sample_sentence(rng, category, held_out=True)
        voice = draw_voice(rng, held_out=True)
        clip = record_clip(
            text, speak(text, voice), voice, noise, CLEAN if clean else NORMAL, category
        )
        if len(clip.wave) <= asr_tokenizer.WINDOW * RATE:
            return clip


@cache
def _extractor() -> asr_tokenizer.WhisperFeatureExtractor:
    return asr_tokenizer.feature_extractor()


def features(wave: Wave) -> NDArray[np.float32]:
    """Return Whisper's log-mel features [80, frames] of the clip alone; `frames` is even."""
    padded = np.pad(wave, (0, -len(wave) % (2 * FRAME)))
    outputs = _extractor()(padded, sampling_rate=RATE, padding="do_not_pad", return_tensors="np")
    return np.asarray(outputs["input_features"][0], np.float32)


def example(clip: Clip, tokenizer: asr_tokenizer.WhisperTokenizer) -> Example:
    """Convert a clip to its stored form."""
    mel = features(clip.wave)
    peak = float(mel.max())
    scaled = (mel - peak) * (4 / DYNAMIC_RANGE) + 1
    tokens, spans = token_spans(clip, tokenizer)
    return Example(
        features=np.round(scaled.clip(0, 1) * 255).astype(np.uint8),
        peak=peak,
        tokens=tokens,
        spans=spans,
        phonemes=_phonemes(clip, mel.shape[1] // 2),
    )


def token_spans(
    clip: Clip, tokenizer: asr_tokenizer.WhisperTokenizer
) -> tuple[tuple[int, ...], tuple[tuple[float, float], ...]]:
    """Return the tokens of a clip's text, and the start and end of each one's word in seconds."""
    if not clip.text:
        return (), ()
    encoded = tokenizer(" " + clip.text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    return tuple(encoded["input_ids"]), tuple(_span(clip, max(0, end - 2)) for _, end in offsets)


def _span(clip: Clip, character: int) -> tuple[float, float]:
    """Return the start and end, in seconds, of the word at a character."""
    index = bisect_right([first for first, _, _ in clip.words], character) - 1
    return clip.words[max(0, index)][1:] if clip.words else (0.0, 0.0)


def _phonemes(clip: Clip, positions: int) -> NDArray[np.uint8]:
    """Return the phoneme label at the middle of each encoder position."""
    times = (np.arange(positions) + 0.5) * asr_tokenizer.STEP
    if not clip.phonemes:
        return np.zeros(positions, np.uint8)
    index = np.searchsorted([mark.second for mark in clip.phonemes], times, side="right") - 1
    labels = np.array([phoneme_label(mark.phoneme) for mark in clip.phonemes], np.uint8)
    return np.where(index < 0, 0, labels[np.maximum(index, 0)]).astype(np.uint8)


def phoneme_label(name: str) -> int:
    """Return the number of a phoneme regardless of stress; every pause is 0."""
    bare = name.lstrip("',")
    if not bare or bare.startswith("_"):
        return 0
    return PHONEMES.index(bare) if bare in PHONEMES else UNKNOWN
