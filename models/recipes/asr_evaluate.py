"""Score a pocket-asr folder on held-out clips: `python models/recipes/asr_evaluate.py models/pocket-asr`.

Held-out clips have sentences, voices and noise that training never met. The score is the word error rate: words
substituted, left out and put in, over words spoken, without regard to case and punctuation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

import asr_data
from asr_data import Clip
from speech_noise import RATE
from speech_sentences import CATEGORIES, plain


class Verdict(NamedTuple):
    """What the model made of one held-out clip: word errors, and words spoken."""

    clip: Clip
    heard: str
    errors: int
    words: int


def distance(said: Sequence[object], heard: Sequence[object]) -> int:
    """The least number of substitutions, deletions and insertions between two sequences, of words for example."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(heard, start=1):
            diagonal, row[j] = row[j], min(diagonal + (word != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def load(folder: Path) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    """The checkpoint in float32, for a CPU."""
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model, WhisperProcessor.from_pretrained(folder)


@torch.inference_mode()
def transcribe(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    waves: Sequence[asr_data.Wave],
) -> list[str]:
    """Greedy transcripts, by transformers' own `generate` on whole windows."""
    inputs = processor(list(waves), sampling_rate=RATE, return_tensors="pt")
    written = model.generate(inputs["input_features"], do_sample=False, num_beams=1)
    return [text.strip() for text in processor.batch_decode(written, skip_special_tokens=True)]


def judge(
    model: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    clips: Sequence[Clip],
    *,
    batch: int = 25,
) -> list[Verdict]:
    verdicts = []
    for start in range(0, len(clips), batch):
        chunk = clips[start : start + batch]
        for clip, heard in zip(
            chunk, transcribe(model, processor, [clip.wave for clip in chunk]), strict=True
        ):
            said = plain(clip.text).split()
            verdicts.append(Verdict(clip, heard, distance(said, plain(heard).split()), len(said)))
    return verdicts


def rate(verdicts: Sequence[Verdict]) -> float:
    return sum(verdict.errors for verdict in verdicts) / sum(verdict.words for verdict in verdicts)


def score(folder: Path, *, count: int, clean: bool = False, show: int = 0) -> dict[str, float]:
    """Word error rate per category, of the whole micro-world and of the general sentences (four times as many)."""
    model, processor = load(folder)
    scores: dict[str, float] = {}
    world: list[Verdict] = []
    for category in CATEGORIES:
        many = count * 4 if category == "general" else count
        verdicts = judge(
            model, processor, [asr_data.held_out(category, i, clean=clean) for i in range(many)]
        )
        scores[category] = rate(verdicts)
        world += verdicts if category != "general" else []
        for verdict in [verdict for verdict in verdicts if verdict.errors][:show]:
            print(
                f"  {category}: {verdict.clip.text!r} → {verdict.heard!r} ({verdict.clip.voice.name})"
            )
    return {**scores, "micro-world": rate(world)}


def table(scores: dict[str, float]) -> str:
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
    parser.add_argument("--clean", action="store_true", help="without noise, rooms and telephones")
    parser.add_argument(
        "--show", type=int, default=0, help="print so many wrong transcripts per category"
    )
    parser.add_argument("--json", type=Path, help="also write the scores here")
    args = parser.parse_args()
    scores = score(args.folder, count=args.count, clean=args.clean, show=args.show)
    print(table(scores))
    if args.json:
        args.json.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
