"""Train pocket-asr: `python models/recipes asr.train --out models/pocket-asr --makers 1`.

Examples are a pure function of (seed, index) and their order one of the step, so a run that is
stopped (a file `stop` beside the state, or a signal) and resumed gives the same losses as an
uninterrupted one, up to rounding. The learning rates are constant until the last share of the
steps: `--resume` with another `--steps` moves the end of a run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from transformers import WhisperForConditionalGeneration, WhisperTokenizer

from recipes.asr import tokenizer as asr_tokenizer
from recipes.asr.batches import Batch, Stream
from recipes.asr.model import WhisperWithHeads
from recipes.asr.recipe import Recipe
from recipes.asr.shards import Shards
from recipes.speech.sentences import training_utterance
from recipes.training.loop import Schedule, Training, exit_on_sigterm, make_readable


def build_tokenizer(recipe: Recipe) -> WhisperTokenizer:
    """Train the tokenizer on training sentences."""
    rng = Random(f"{recipe.seed}/tokenizer")
    texts = (
        training_utterance(rng, general_share=0.7).text for _ in range(recipe.tokenizer_sentences)
    )
    return asr_tokenizer.train(texts, vocabulary=recipe.vocabulary)


class Report(NamedTuple):
    """Hold the losses of one step and its number of clips."""

    text: float
    phonemes: float
    alignment: float
    clips: int


class Trainer(Training[Batch, Report]):
    """Train on shards of examples."""

    def __init__(
        self, recipe: Recipe, schedule: Schedule, *, data: Path, half: bool = True
    ) -> None:
        self.recipe, self.half = recipe, half
        self.tokenizer = build_tokenizer(recipe)
        self.model = WhisperWithHeads(recipe, self.tokenizer)
        super().__init__(self.model, schedule, matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)
        self.shards = Shards(recipe, self.tokenizer, data)
        self.stream = Stream(recipe, self.tokenizer, self.shards)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches that are left."""
        return self.stream.prefetch(self.step, self.schedule.steps)

    def train_step(self, batch: Batch) -> Report:
        """Run one update, in bfloat16 autocast if `half`."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            losses = self.model(batch)
        weights = (1.0, self.recipe.phoneme_weight, self.recipe.alignment_weight)
        torch.stack(
            [weight * loss for weight, loss in zip(weights, losses, strict=True)]
        ).sum().backward()
        self.update()
        text, phonemes, alignment = (float(loss.detach()) for loss in losses)
        return Report(text, phonemes, alignment, len(batch.tokens))

    def progress(self, reports: Sequence[Report], seconds: float) -> str:
        """Format the step, mean losses and clips per second."""
        count = len(reports)
        means = {
            name: round(sum(getattr(r, name) for r in reports) / count, 4)
            for name in Report._fields[:3]
        }
        speed = round(sum(r.clips for r in reports) / seconds, 1)
        return json.dumps({"step": self.step, **means, "clips_per_s": speed})

    def load_weights(self, folder: Path) -> None:
        """Load an exported checkpoint; the phoneme head, which it lacks, is trained from scratch."""
        weights = WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).state_dict()
        self.model.whisper.load_state_dict(weights)

    def export(self, out: Path) -> None:
        """Write the checkpoint in float16, with tokenizer, feature extractor, generation config."""
        trained = self.model.whisper
        model = WhisperForConditionalGeneration(trained.config)
        model.load_state_dict(trained.state_dict())
        model.generation_config = trained.generation_config
        model.to(torch.float16).save_pretrained(out)
        asr_tokenizer.processor(self.tokenizer).save_pretrained(out)
        make_readable(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=26_000)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-asr/state.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from --state if it exists")
    parser.add_argument(
        "--init",
        type=Path,
        help="checkpoint of this recipe to start from if there is no state to resume",
    )
    parser.add_argument("--export", action="store_true", help="only export --state to --out")
    parser.add_argument(
        "--makers",
        type=int,
        default=0,
        help="worker processes that write training examples in advance",
    )
    parser.add_argument(
        "--float32", action="store_true", help="train in float32, for CPUs without bfloat16"
    )
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed)
    schedule = Schedule(
        steps=args.steps, warmup=recipe.warmup, decay=recipe.decay, restarts=recipe.restarts
    )
    trainer = Trainer(recipe, schedule, data=args.state.parent / "data", half=not args.float32)
    if args.export or (args.resume and args.state.exists()):
        trainer.load_state(args.state)
    elif args.init:
        trainer.load_weights(args.init)
    exit_on_sigterm()
    if not args.export:
        trainer.shards.start(args.makers, visit=trainer.step // trainer.stream.steps_per_visit)
        try:
            trainer.run(args.state)
        finally:
            trainer.shards.stop()
    trainer.export(args.out)


if __name__ == "__main__":
    main()
