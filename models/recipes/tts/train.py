"""Train pocket-tts: `python models/recipes tts.train --out FOLDER --resume --makers 1`.

espeak-ng first speaks the training sentences into files beside the state. Three stages follow one
another: `reader` trains the phonemizer, `codec` the codec, `speaker` the frame generator on codes
of the finished codec. Sentences are a function of (seed, index) and batches one of the step; a run
that is stopped (a file `stop` beside the state, or a signal) continues with `--resume`. `--stage`
runs one stage alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from motet_tts.pocket.config import PocketConfig
from motet_tts.pocket.model import PocketSpeech
from recipes.training.errors import RecipeError
from recipes.training.loop import StageTraining, exit_on_sigterm
from recipes.tts import losses as tts_losses
from recipes.tts.batches import BatchOrder, generator_example, phonemizer_example
from recipes.tts.codebooks import fit
from recipes.tts.data import Example
from recipes.tts.recipe import Recipe
from recipes.tts.shards import Shards

STAGES = ("reader", "codec", "speaker")


def build_config(recipe: Recipe, shards: Shards, **sizes: Any) -> PocketConfig:
    """Return the settings with the recipe's voices and the phonemes of its sentences."""
    return PocketConfig(
        voices=tuple(recipe.voices), phonemes=shards.inventory(), rates=recipe.rates, **sizes
    )


def build_model(recipe: Recipe, config: PocketConfig) -> PocketSpeech:
    """Build a model whose initial weights depend on the seed alone."""
    torch.manual_seed(recipe.seed)
    return PocketSpeech(config)


class Trainer(StageTraining[list[Any], dict[str, float]]):
    """Train the part of the model that belongs to one stage."""

    recipe: Recipe
    model: PocketSpeech

    def __init__(
        self, recipe: Recipe, model: PocketSpeech, stage: str, shards: Shards, *, steps: int = 0
    ) -> None:
        super().__init__(recipe, model, stage, steps=steps)
        self.shards = shards

    def items(self) -> list[Any]:
        """Return the training data of the stage."""
        config, codec = self.model.config, self.model.codec.eval()
        if self.name == "codec":
            return [one for shard in self.shards.with_samples() for one in shard]
        every = (one for shard in self.shards for one in shard)
        return [
            phonemizer_example(config, one)
            if self.name == "reader"
            else generator_example(config, codec, one)
            for one in every
        ]

    def losses(self, batch: Sequence[Any]) -> tts_losses.Losses:
        """Return the losses of a batch."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        if self.name == "reader":
            return tts_losses.phonemizer_loss(self.model.reader, batch)
        if self.name == "speaker":
            return tts_losses.generator_loss(self.model.speaker, batch, generator)
        features, samples = self.segments(batch, generator)
        return tts_losses.codec_loss(self.model.codec, features, samples, seed=self.step)

    def fit_codes(self, examples: Sequence[Example]) -> None:
        """Fit the codec's components and codebooks on some of the examples."""
        some = examples[:: max(1, len(examples) // self.recipe.codebook_sentences)]
        fit(
            self.model.codec,
            [one.features for one in some],
            torch.Generator().manual_seed(self.recipe.seed),
        )

    def segments(
        self, batch: Sequence[Example], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Cut N code frames from every example at random.

        Returns features `[B, stride N, bands + 2]` and samples `[B, L]`.
        """
        config, frames = self.model.config, self.recipe.segment
        parts = []
        for one in batch:
            if one.samples is None:
                raise RecipeError(
                    "batch: an example has no samples; train the codec on `Shards.with_samples`",
                    param="batch",
                )
            spare = max(0, len(one.features) // config.stride - frames)
            start = int(torch.randint(spare + 1, (), generator=generator))
            features = one.features[start * config.stride : (start + frames) * config.stride]
            samples = one.samples[
                start * config.frame_samples : (start + frames) * config.frame_samples
            ]
            silence = features[-1:].clone()
            silence[:, : config.bands] = one.features[:, : config.bands].min()
            silence[:, config.bands :] = 0
            missing = frames * config.stride - len(features)
            padded = nn.functional.pad(samples, (0, missing * config.hop))
            parts.append((torch.cat([features, silence.expand(missing, -1)]), padded))
        return torch.stack([one for one, _ in parts]), torch.stack([one for _, one in parts])

    def train_step(self, batch: list[Any]) -> dict[str, float]:
        """Run one update."""
        losses = self.losses(batch)
        losses["loss"].backward()
        self.update()
        return {name: float(loss.detach()) for name, loss in losses.items()}

    def batches(self) -> Iterator[list[Any]]:
        """Yield the batches that are left."""
        items = self.items()
        if self.name == "codec" and not self.step:
            self.fit_codes(items)
        order = BatchOrder([len(one) for one in items], self.stage.batch, self.recipe.seed)
        while self.step < self.schedule.steps:
            yield [items[number] for number in order.batch(self.step)]

    def progress(self, reports: Sequence[dict[str, float]], seconds: float) -> str:
        """Format the stage, step, mean losses and sentences per second."""
        means = {
            name: round(sum(report[name] for report in reports) / len(reports), 4)
            for name in reports[-1]
        }
        speed = round(self.stage.batch * len(reports) / seconds, 1)
        return json.dumps(
            {"stage": self.name, "step": self.step, **means, "sentences_per_s": speed}
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".cache/pocket-tts"),
        help="folder of saved states and data",
    )
    parser.add_argument("--resume", action="store_true", help="continue from --state if it exists")
    parser.add_argument("--export", action="store_true", help="only export --state to --out")
    parser.add_argument(
        "--stage", choices=STAGES, action="append", help="run only this stage (repeatable)"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of the stages that run; 0 uses the recipe's"
    )
    parser.add_argument(
        "--makers", type=int, default=0, help="worker processes that synthesize the sentences"
    )
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed)
    exit_on_sigterm()
    shards = Shards(recipe, args.state / "data", makers=args.makers)
    shards.fill()
    model = build_model(recipe, build_config(recipe, shards))
    for stage in STAGES:
        wanted = stage in (args.stage or STAGES) and not args.export
        trainer = Trainer(recipe, model, stage, shards, steps=args.steps if wanted else 0)
        state = args.state / f"{stage}.pt"
        if state.exists() and (args.resume or not wanted):
            trainer.load_state(state)
        if wanted and trainer.step < trainer.schedule.steps:
            trainer.run(state)
            if (args.state / "stop").exists():
                break
    model.save(args.out)


if __name__ == "__main__":
    main()
