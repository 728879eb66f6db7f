"""Score pocket-tts by transcribing it: `python models/recipes tts.evaluate models/pocket-tts models/pocket-asr`.

The score is the word error rate of pocket-asr on held-out sentences, spoken by each voice in turn.
The same sentences as espeak-ng speaks them, and as the codec resynthesizes that, are the baselines.
The phonemizer is scored by phoneme errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from motet_tts.pocket.model import PocketSpeech
from recipes.asr import evaluate as asr_evaluate
from recipes.speech.noise import RATE, Wave, resample
from recipes.speech.sentences import CATEGORIES, normalize_words
from recipes.tts.data import example, held_out_text, record
from recipes.tts.recipe import Recipe

SILENCE = np.zeros(RATE // 5, np.float32)


def synthesize(model: PocketSpeech, text: str, voice: str) -> Wave:
    """Speak a sentence with the model, at 16 kHz between short silences."""
    frames = [frame.samples for frame in model.stream(text, voice)]
    samples = torch.cat(frames).numpy() if frames else np.zeros(0, np.float32)
    return np.concatenate([SILENCE, resample(samples, model.config.sample_rate), SILENCE])


def synthesize_with_espeak(recipe: Recipe, text: str, voice: int) -> Wave:
    """Speak a sentence with espeak-ng, at 16 kHz between short silences."""
    speech = record(recipe, text, voice, 1.0).speech
    return np.concatenate([SILENCE, resample(speech.samples, speech.rate), SILENCE])


@torch.inference_mode()
def resynthesize(model: PocketSpeech, recipe: Recipe, text: str, voice: int) -> Wave:
    """Pass espeak-ng's speech through the codec."""
    features = example(model.config, record(recipe, text, voice, 1.0)).features
    codes = model.codec.quantizer(model.codec.encoder(features[None]))[0]
    samples = model.codec.decode([model.codec.begin()], codes)[0].numpy()
    return np.concatenate([SILENCE, resample(samples, model.config.sample_rate), SILENCE])


def phoneme_error_rate(model: PocketSpeech, recipe: Recipe, *, count: int) -> float:
    """Return the phonemizer's errors per phoneme, over all categories."""
    wrong = total = 0
    for category in CATEGORIES:
        for index in range(count):
            text, voice = held_out_text(category, index), index % len(model.config.voices)
            reference = [phoneme.name for phoneme in record(recipe, text, voice, 1.0).phonemes]
            read = model.read(text, model.config.voices[voice]).phonemes
            wrong += asr_evaluate.edit_distance(
                reference, [model.config.phonemes[number] for number in read]
            )
            total += len(reference)
    return wrong / total


def transcribe(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    waves: Sequence[Wave],
    *,
    batch: int = 25,
) -> list[str]:
    """Transcribe recordings in batches."""
    chunks = (waves[start : start + batch] for start in range(0, len(waves), batch))
    return [text for chunk in chunks for text in asr_evaluate.transcribe(model, processor, chunk)]


def errors(texts: Sequence[str], transcripts: Sequence[str]) -> tuple[int, int]:
    """Count word errors and words."""
    pairs = [
        (normalize_words(text).split(), normalize_words(other).split())
        for text, other in zip(texts, transcripts, strict=True)
    ]
    return sum(asr_evaluate.edit_distance(*pair) for pair in pairs), sum(
        len(words) for words, _ in pairs
    )


def score(tts: Path, asr: Path, *, count: int, show: int = 0) -> dict[str, list[float]]:
    """Return word error rates of pocket-tts, its codec and espeak-ng, by category."""
    speech, recipe = PocketSpeech.load(tts), Recipe()
    model, processor = asr_evaluate.load(asr)
    totals: dict[str, list[tuple[int, int]]] = {}
    for category in CATEGORIES:
        many = count * 4 if category == "general" else count
        sentences = [
            (held_out_text(category, index), index % len(speech.config.voices))
            for index in range(many)
        ]
        waves = (
            [synthesize(speech, text, speech.config.voices[voice]) for text, voice in sentences],
            [resynthesize(speech, recipe, text, voice) for text, voice in sentences],
            [synthesize_with_espeak(recipe, text, voice) for text, voice in sentences],
        )
        texts, transcripts = (
            [text for text, _ in sentences],
            [transcribe(model, processor, some) for some in waves],
        )
        wrong = [
            pair
            for pair in zip(texts, transcripts[0], strict=True)
            if normalize_words(pair[0]) != normalize_words(pair[1])
        ]
        for text, transcript in wrong[:show]:
            print(f"  {category}: {text!r} → {transcript!r}")
        found = [errors(texts, some) for some in transcripts]
        for name in (category,) if category == "general" else (category, "micro-world"):
            before = totals.get(name, [(0, 0)] * len(found))
            totals[name] = [(a + c, b + d) for (a, b), (c, d) in zip(before, found, strict=True)]
    return {name: [wrong / words for wrong, words in found] for name, found in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tts", type=Path)
    parser.add_argument("asr", type=Path)
    parser.add_argument(
        "--count",
        type=int,
        default=25,
        help="sentences per category, four times as many general ones",
    )
    parser.add_argument(
        "--show", type=int, default=0, help="print so many wrong transcripts per category"
    )
    args = parser.parse_args()
    print(
        f"reader: {phoneme_error_rate(PocketSpeech.load(args.tts), Recipe(), count=args.count):.2%} of the phonemes"
    )
    print("| category | pocket-tts | its codec | espeak-ng |\n|---|---|---|---|")
    for category, rates in score(args.tts, args.asr, count=args.count, show=args.show).items():
        print(f"| {category} | {' | '.join(f'{rate:.1%}' for rate in rates)} |")


if __name__ == "__main__":
    main()
