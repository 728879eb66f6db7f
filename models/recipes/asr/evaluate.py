"""Score a pocket-asr folder: `python models/recipes asr.evaluate models/pocket-asr`.

Held-out clips have sentences, voices and noise that training never draws. The score is the word
error rate without case and punctuation: substitutions, deletions and insertions over words spoken.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from recipes.asr import data as asr_data
from recipes.asr.data import Clip
from recipes.speech.noise import RATE
from recipes.speech.sentences import CATEGORIES, normalize_words


class ClipScore(NamedTuple):
    """Hold the transcript of a held-out clip and its word errors."""

    clip: Clip
    transcript: str
    errors: int
    words: int


def edit_distance(reference: Sequence[object], transcript: Sequence[object]) -> int:
    """Return the Levenshtein distance of two sequences."""
    row = list(range(len(transcript) + 1))
    for i, word in enumerate(reference, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(transcript, start=1):
            diagonal, row[j] = row[j], min(diagonal + (word != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def load(folder: Path) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    """Load the checkpoint in float32 on the CPU."""
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model, WhisperProcessor.from_pretrained(folder)


@torch.inference_mode()
def transcribe(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    waves: Sequence[asr_data.Wave],
) -> list[str]:
    """Decode greedily with transformers' `generate`, on whole windows."""
    inputs = processor(list(waves), sampling_rate=RATE, return_tensors="pt")
    written = model.generate(inputs["input_features"], do_sample=False, num_beams=1)
    return [text.strip() for text in processor.batch_decode(written, skip_special_tokens=True)]


def score_clips(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    clips: Sequence[Clip],
    *,
    batch: int = 25,
) -> list[ClipScore]:
    """Transcribe clips and count their word errors."""
    results = []
    for start in range(0, len(clips), batch):
        chunk = clips[start : start + batch]
        for clip, transcript in zip(
            chunk, transcribe(model, processor, [clip.wave for clip in chunk]), strict=True
        ):
            reference = normalize_words(clip.text).split()
            results.append(
                ClipScore(
                    clip,
                    transcript,
                    edit_distance(reference, normalize_words(transcript).split()),
                    len(reference),
                )
            )
    return results


def word_error_rate(results: Sequence[ClipScore]) -> float:
    """Return word errors over words spoken."""
    return sum(result.errors for result in results) / sum(result.words for result in results)


def score(folder: Path, *, count: int, clean: bool = False, show: int = 0) -> dict[str, float]:
    """Return the word error rate by category and of the whole micro-world.

    The general category has four times as many clips.
    """
    model, processor = load(folder)
    scores: dict[str, float] = {}
    world: list[ClipScore] = []
    for category in CATEGORIES:
        many = count * 4 if category == "general" else count
        results = score_clips(
            model,
            processor,
            [asr_data.held_out_clip(category, i, clean=clean) for i in range(many)],
        )
        scores[category] = word_error_rate(results)
        world += results if category != "general" else []
        for result in [result for result in results if result.errors][:show]:
            print(
                f"  {category}: {result.clip.text!r} → {result.transcript!r} ({result.clip.voice.name})"
            )
    return {**scores, "micro-world": word_error_rate(world)}


def table(scores: dict[str, float]) -> str:
    """Format scores as a Markdown table."""
    lines = ["| category | word error rate |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {category} | {value:.1%} |" for category, value in scores.items())]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--count", type=int, default=75, help="clips per category, four times as many general ones"
    )
    parser.add_argument(
        "--clean", action="store_true", help="use clips without noise, reverberation and telephones"
    )
    parser.add_argument(
        "--show", type=int, default=0, help="wrong transcripts to print per category"
    )
    parser.add_argument("--json", type=Path, help="file for the scores, as JSON")
    args = parser.parse_args()
    scores = score(args.folder, count=args.count, clean=args.clean, show=args.show)
    print(table(scores))
    if args.json:
        args.json.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
