"""Train pocket-asr: `python models/recipes asr.train --out models/pocket-asr --makers 1`.

Examples are a pure function of (seed, index) and their order one of the step, so a run that is
stopped (a file `stop` beside the state, or a signal) and resumed gives the same losses as an
uninterrupted one, up to rounding. The learning rates are constant until the last share of the
steps: `--resume` with another `--steps` moves the end of a run.

With `--minutes` a run ends by the clock. With `--pool` it trains on a pool of speech whose rooms,
noise and masks are drawn anew at each visit, on the device: as much as the processes that make
speech and a GPU can do. Neither is repeatable; the clips are.
"""

from __future__ import annotations

import argparse
import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration, WhisperTokenizer

from recipes.asr import tokenizer as asr_tokenizer
from recipes.asr.batches import Batch, Stream
from recipes.asr.model import WhisperWithHeads
from recipes.asr.pool import PoolStream
from recipes.asr.recipe import FurtherRecipe, PoolRecipe, Recipe
from recipes.asr.shards import Shards
from recipes.asr.speech import start_makers
from recipes.speech.sentences import training_utterance
from recipes.training.loop import (
    Schedule,
    Training,
    exit_on_sigterm,
    make_readable,
)
from recipes.training.ranks import Ranks, run_ranks


def build_tokenizer(recipe: Recipe) -> WhisperTokenizer:
    """Train the tokenizer on training sentences."""
    rng = Random(f"{recipe.seed}/tokenizer")
    texts = (
        training_utterance(rng, general_share=0.7).text for _ in range(recipe.tokenizer_sentences)
    )
    return asr_tokenizer.train(texts, vocabulary=recipe.vocabulary)


class Report(NamedTuple):
    """Hold the losses of one step, which stay on the device, and its number of clips."""

    text: Tensor
    phonemes: Tensor
    alignment: Tensor
    clips: int


class Trainer(Training[Batch, Report]):
    """Train on examples, which subclasses provide."""

    def __init__(
        self,
        recipe: Recipe,
        schedule: Schedule,
        *,
        data: Path,
        half: bool = True,
        device: str = "cpu",
        tokenizer: WhisperTokenizer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Build the model; `tokenizer`: that of a checkpoint to start from, instead of a new one.

        Each of several ranks has examples of its own, of the seeds behind the recipe's.
        """
        self.recipe, self.half, self.data = recipe, half, data
        self.ranks = ranks or Ranks()
        if self.ranks.count > 1:
            self.data = data / str(self.ranks.rank)
        self.tokenizer = tokenizer or build_tokenizer(recipe)
        self.model = WhisperWithHeads(recipe, self.tokenizer).to(device)
        if device != "cpu":
            self.model.whisper.set_attn_implementation("sdpa")
        super().__init__(self.model, schedule, matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)
        self.recipe = replace(recipe, seed=recipe.seed + self.ranks.rank)
        self.open_data()

    @abstractmethod
    def open_data(self) -> None:
        """Prepare what batches are made of."""

    @abstractmethod
    def makers(self, count: int) -> AbstractContextManager[None]:
        """Run `count` processes that make examples ahead."""

    def train_step(self, batch: Batch) -> Report:
        """Run one update, in bfloat16 autocast if `half`; waits for nothing on a GPU."""
        with self.autocast():
            losses = self.model(batch)
        weights = (1.0, self.recipe.phoneme_weight, self.recipe.alignment_weight)
        torch.stack(
            [weight * loss for weight, loss in zip(weights, losses, strict=True)]
        ).sum().backward()
        self.mean_gradients()
        self.update()
        text, phonemes, alignment = (loss.detach() for loss in losses)
        return Report(text, phonemes, alignment, len(batch.tokens))

    def progress(self, reports: Sequence[Report], seconds: float) -> str:
        """Format the step, mean losses and clips per second."""
        means = {
            name: round(float(torch.stack([getattr(r, name) for r in reports]).mean()), 4)
            for name in Report._fields[:3]
        }
        speed = round(self.ranks.count * sum(r.clips for r in reports) / seconds, 1)
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
        compact = str(out / "tokenizer.json")  # half the size of the one that was just saved
        self.tokenizer.backend_tokenizer.save(compact, pretty=False)
        make_readable(out)


class ShardTrainer(Trainer):
    """Train on shards of examples, each a few times."""

    def open_data(self) -> None:
        """Prepare what batches are made of."""
        self.shards = Shards(self.recipe, self.tokenizer, self.data)
        self.stream = Stream(self.recipe, self.tokenizer, self.shards)

    @contextmanager
    def makers(self, count: int) -> Iterator[None]:
        """Run `count` processes that write examples ahead."""
        self.shards.start(count, visit=self.step // (self.recipe.shard // self.recipe.batch))
        try:
            yield
        finally:
            self.shards.stop()

    def batches(self) -> Iterator[Batch]:
        """Yield the batches that are left."""
        return self.stream.prefetch(self.step, self.last_step)


class PoolTrainer(Trainer):
    """Train on a pool of speech; every saved state is exported to `out`."""

    recipe: PoolRecipe
    out: Path | None = None

    def open_data(self) -> None:
        """Make room for the pool on the device."""
        self.stream = PoolStream(self.recipe, self.tokenizer, self.data, self.device)

    @contextmanager
    def makers(self, count: int) -> Iterator[None]:
        """Run `count` processes that speak, and a thread that reads what they write."""
        self.processes = start_makers(self.recipe, self.tokenizer, self.data, max(1, count))
        self.stream.start()
        try:
            yield
        finally:
            self.stream.stop()
            for process in self.processes:
                process.terminate()
            for process in self.processes:
                process.join()

    def batches(self) -> Iterator[Batch]:
        """Yield batches until the run is over. Raises RuntimeError if nothing speaks any more."""
        return self.stream.batches(self._goes_on)

    def _goes_on(self) -> bool:
        if not any(process.is_alive() for process in self.processes):
            raise RuntimeError("the processes that speak have ended: see their errors above")
        return self.step < self.last_step and self.share < 1.0

    def progress(self, reports: Sequence[Report], seconds: float) -> str:
        """Format the losses and speed, the clips made so far, and the share of the run."""
        line = json.loads(super().progress(reports, seconds))
        share = round(self.share, 4)
        return json.dumps({**line, "clips": self.stream.pool.added, "share": share})

    def save_state(self, path: Path) -> None:
        """Save the state and export the weights as they are."""
        super().save_state(path)
        if self.out:
            self.export(self.out)


def train(ranks: Ranks, args: argparse.Namespace) -> None:
    """Train and export, or do one rank's share of it."""
    begin = time.monotonic()
    changes: dict[str, Any] = {"seed": args.seed}
    if args.batch:
        changes["batch"] = args.batch
    if args.rates:
        changes["matrix_lr"], changes["other_lr"] = args.rates
    options: dict[str, Any] = {
        "data": args.state.parent / "data",
        "half": not args.float32,
        "device": args.device,
        "tokenizer": WhisperTokenizer.from_pretrained(args.init) if args.init else None,
        "ranks": ranks,
    }
    trainer: Trainer
    if args.pool:
        pooled = PoolRecipe(**changes)
        course = Schedule(steps=pooled.steps, warmup=pooled.warmup, decay=pooled.decay)
        trainer = PoolTrainer(pooled, course, **options)
        trainer.out = args.out
    else:
        recipe = FurtherRecipe(**changes) if args.init else Recipe(**changes)
        schedule = Schedule(
            steps=args.steps, warmup=recipe.warmup, decay=recipe.decay, restarts=recipe.restarts
        )
        trainer = ShardTrainer(recipe, schedule, **options)
    if args.export or (args.resume and args.state.exists()):
        trainer.load_state(args.state)
    elif args.init:
        trainer.load_weights(args.init)
    exit_on_sigterm()
    if not args.export:
        bound = None if args.minutes is None else 60 * args.minutes - (time.monotonic() - begin)
        with trainer.makers(args.makers):
            trainer.run(args.state, seconds=bound)
    if ranks.is_leader:
        trainer.export(args.out)


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
    parser.add_argument("--device", default="cpu", help="where to train: cpu, cuda, cuda:1")
    parser.add_argument(
        "--minutes",
        type=float,
        help="end this long after the start; the rates follow the time instead of --steps",
    )
    parser.add_argument(
        "--pool", action="store_true", help="train on a pool of speech on the device, as for a GPU"
    )
    parser.add_argument("--batch", type=int, help="clips per step, instead of the recipe's")
    parser.add_argument(
        "--rates",
        type=float,
        nargs=2,
        metavar=("MATRIX", "OTHER"),
        help="learning rates, instead of the recipe's",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="processes of one thread that share every step, each with a batch and makers of its own",
    )
    args = parser.parse_args()
    run_ranks(train, args, count=args.ranks, state=args.state)


if __name__ == "__main__":
    main()
