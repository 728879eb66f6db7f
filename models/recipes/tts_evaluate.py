"""Let pocket-asr hear what pocket-tts says: `tts_evaluate.py models/pocket-tts models/pocket-asr`.

Held-out sentences, each in one voice after another. The score is the word error rate of the whole loop, text to speech
to text; what the same sentences score as espeak-ng speaks them, and as the codec repeats that, stands beside it. The
reader by itself is scored by phonemes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

import asr_evaluate
from motet_tts.pocket.model import PocketSpeech
from speech_noise import RATE, Wave, resample
from speech_sentences import CATEGORIES, plain
from tts_data import example, held_out_text, line
from tts_recipe import Recipe

SILENCE = np.zeros(RATE // 5, np.float32)


def say(model: PocketSpeech, text: str, voice: str) -> Wave:
    """The sentence at 16 kHz with a little silence around it."""
    frames = [spoken.samples for spoken in model.stream(text, voice)]
    samples = torch.cat(frames).numpy() if frames else np.zeros(0, np.float32)
    return np.concatenate([SILENCE, resample(samples, model.config.sample_rate), SILENCE])


def reference(recipe: Recipe, text: str, voice: int) -> Wave:
    """The same by espeak-ng."""
    speech = line(recipe, text, voice, 1.0).speech
    return np.concatenate([SILENCE, resample(speech.samples, speech.rate), SILENCE])


@torch.inference_mode()
def repeat(model: PocketSpeech, recipe: Recipe, text: str, voice: int) -> Wave:
    """What espeak-ng says, through the codec."""
    features = example(model.config, line(recipe, text, voice, 1.0)).features
    codes = model.codec.quantizer(model.codec.encoder(features[None]))[0]
    samples = model.codec.decode([model.codec.begin()], codes)[0].numpy()
    return np.concatenate([SILENCE, resample(samples, model.config.sample_rate), SILENCE])


def misread(model: PocketSpeech, recipe: Recipe, *, count: int) -> float:
    """The reader's phoneme errors per phoneme, over all categories."""
    wrong = total = 0
    for category in CATEGORIES:
        for index in range(count):
            text, voice = held_out_text(category, index), index % len(model.config.voices)
            wanted = [sound.name for sound in line(recipe, text, voice, 1.0).sounds]
            read = model.read(text, model.config.voices[voice]).phonemes
            wrong += asr_evaluate.distance(
                wanted, [model.config.phonemes[number] for number in read]
            )
            total += len(wanted)
    return wrong / total


def listen(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    waves: Sequence[Wave],
    *,
    batch: int = 25,
) -> list[str]:
    """Transcripts, a batch of waves at a time."""
    chunks = (waves[start : start + batch] for start in range(0, len(waves), batch))
    return [text for chunk in chunks for text in asr_evaluate.transcribe(model, processor, chunk)]


def errors(texts: Sequence[str], heard: Sequence[str]) -> tuple[int, int]:
    """Word errors and words."""
    pairs = [
        (plain(text).split(), plain(other).split())
        for text, other in zip(texts, heard, strict=True)
    ]
    return sum(asr_evaluate.distance(*pair) for pair in pairs), sum(len(said) for said, _ in pairs)


def score(tts: Path, asr: Path, *, count: int, show: int = 0) -> dict[str, list[float]]:
    """Word error rates of pocket-tts, its codec and espeak-ng, per category and of the whole micro-world."""
    speech, recipe = PocketSpeech.load(tts), Recipe()
    model, processor = asr_evaluate.load(asr)
    totals: dict[str, list[tuple[int, int]]] = {}
    for category in CATEGORIES:
        many = count * 4 if category == "general" else count
        said = [
            (held_out_text(category, index), index % len(speech.config.voices))
            for index in range(many)
        ]
        spoken = (
            [say(speech, text, speech.config.voices[voice]) for text, voice in said],
            [repeat(speech, recipe, text, voice) for text, voice in said],
            [reference(recipe, text, voice) for text, voice in said],
        )
        texts, heard = (
            [text for text, _ in said],
            [listen(model, processor, waves) for waves in spoken],
        )
        wrong = [
            pair for pair in zip(texts, heard[0], strict=True) if plain(pair[0]) != plain(pair[1])
        ]
        for text, written in wrong[:show]:
            print(f"  {category}: {text!r} → {written!r}")
        found = [errors(texts, written) for written in heard]
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
        f"reader: {misread(PocketSpeech.load(args.tts), Recipe(), count=args.count):.2%} of the phonemes"
    )
    print("| category | pocket-tts | its codec | espeak-ng |\n|---|---|---|---|")
    for category, rates in score(args.tts, args.asr, count=args.count, show=args.show).items():
        print(f"| {category} | {' | '.join(f'{rate:.1%}' for rate in rates)} |")


if __name__ == "__main__":
    main()
