"""Train the pocket-tts model: `python models/recipes/pocket_tts.py --out models/pocket-tts --makers 1`.

Three trainings, one after another: the reader (letters to phonemes), the codec, and the speaker, which learns the codes
of the finished codec. Examples are a function of (seed, index); a run that is stopped (a file `stop` beside the state,
or a signal) goes on with `--resume`. `--stage` runs one of them alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tts_losses
from chat_optim import Schedule, optimizers
from motet_tts.pocket.config import PocketConfig
from motet_tts.pocket.model import PocketSpeech
from pocket_asr import interrupted
from tts_data import Example, ahead, example, inventory, training_line
from tts_recipe import Recipe, Stage

STAGES = ("reader", "codec", "speaker")


def build_config(recipe: Recipe, **sizes: Any) -> PocketConfig:
    """The settings with the voices of the recipe and the phonemes that its sentences have."""
    return PocketConfig(voices=tuple(recipe.voices), phonemes=inventory(recipe), rates=recipe.rates, **sizes)


def build_model(recipe: Recipe, config: PocketConfig) -> PocketSpeech:
    """A fresh model; its initialization depends on the seed alone."""
    torch.manual_seed(recipe.seed)
    return PocketSpeech(config)


def make_reading(recipe: Recipe, config: PocketConfig, index: int) -> tuple[str, int, tuple[int, ...]] | None:
    made = training_line(recipe, index)
    numbers = {name: number for number, name in enumerate(config.phonemes)}
    names = [name for name, _ in made.phonemes]
    return (made.text, made.voice, tuple(numbers[n] for n in names)) if all(n in numbers for n in names) else None


def make_example(recipe: Recipe, config: PocketConfig, index: int) -> Example | None:
    return example(config, training_line(recipe, index))


class Trainer:
    """One stage of a run. Its examples are the first ones of the seed: every stage meets the same sentences."""

    def __init__(
        self, recipe: Recipe, model: PocketSpeech, stage: str, *, makers: int = 0, half: bool = True, steps: int = 0
    ) -> None:
        self.recipe, self.model, self.name, self.makers, self.step = recipe, model, stage, makers, 0
        self.stage: Stage = getattr(recipe, stage)
        self.half = half and stage != "codec"  # spectra need all their digits
        self.schedule = Schedule(steps=steps or self.stage.steps, warmup=self.stage.warmup, decay=self.stage.decay)
        self.part: nn.Module = getattr(model, stage)
        self.optimizers = optimizers(self.part, matrix_lr=self.stage.matrix_lr, other_lr=self.stage.other_lr)
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def losses(self, batch: Sequence[Any]) -> tts_losses.Losses:
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        if self.name == "reader":
            return tts_losses.reading(self.model, batch)
        if self.name == "speaker":
            return tts_losses.speaking(self.model, batch, generator)
        features, samples = self.segments(batch, generator)
        quantized = self.step >= self.recipe.settle
        if quantized and self.step % 20 == 0 and self.step < 0.6 * self.schedule.steps:
            tts_losses.revive(self.model.codec, features, generator)
        return tts_losses.coding(self.model.codec, features, samples, quantized=quantized, seed=self.step)

    def segments(self, batch: Sequence[Example], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Features `[B, 4 N, bands + 2]` and samples `[B, L]` of N code frames of every example."""
        config, frames = self.model.config, self.recipe.segment
        parts = []
        for one in batch:
            spare = max(0, len(one.pointers) - 1 - frames)
            start = int(torch.randint(spare + 1, (), generator=generator))
            heard = one.features[start * config.stride : (start + frames) * config.stride]
            said = one.samples[start * config.frame_samples : (start + frames) * config.frame_samples]
            silence = heard[-1:].clone()
            silence[:, : config.bands] = one.features[:, : config.bands].min()
            silence[:, config.bands :] = 0
            missing = frames * config.stride - len(heard)
            padded = nn.functional.pad(said, (0, missing * config.hop))
            parts.append((torch.cat([heard, silence.expand(missing, -1)]), padded))
        return torch.stack([heard for heard, _ in parts]), torch.stack([said for _, said in parts])

    def train_step(self, batch: Sequence[Any]) -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            losses = self.losses(batch)
        losses["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.part.parameters(), 1.0)
        factor = self.schedule.at(self.step)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {name: float(loss.detach()) for name, loss in losses.items()}

    def save_state(self, path: Path) -> None:
        state = {"step": self.step, "part": self.part.state_dict()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load_state(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.part.load_state_dict(state["part"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def run(self, state: Path, *, every: float = 120.0, log: int = 50) -> list[dict[str, float]]:
        """Train to the end of the stage, or until a file `stop` lies beside the state; returns the losses."""
        make: Callable[[int], Any] = partial(
            make_reading if self.name == "reader" else make_example, self.recipe, self.model.config
        )
        size, reports = self.stage.batch, []
        since = saved = time.monotonic()
        made = ahead(make, self.step * size, self.schedule.steps * size, makers=self.makers)
        try:
            while batch := list(islice(made, size)):
                reports.append(self.train_step([one for one in batch if one is not None]))
                now = time.monotonic()
                if self.step % log == 0:
                    print(progress(self.name, self.step, reports[-log:], size * log / (now - since)), flush=True)
                    since = now
                if now - saved > every:
                    self.save_state(state)
                    saved = now
                if (state.parent / "stop").exists():
                    break
        finally:
            made.close()
            self.save_state(state)
        return reports


def progress(stage: str, step: int, reports: Sequence[dict[str, float]], speed: float) -> str:
    """A log line: stage, step, mean losses, sentences per second."""
    means = {name: round(sum(report[name] for report in reports) / len(reports), 4) for name in reports[-1]}
    return json.dumps({"stage": stage, "step": step, **means, "sentences_per_s": round(speed, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-tts"), help="a folder")
    parser.add_argument("--resume", action="store_true", help="go on from --state if it is there")
    parser.add_argument("--stage", choices=STAGES, action="append", help="only this one (may be given again)")
    parser.add_argument("--steps", type=int, default=0, help="of the stages that run, instead of the recipe's")
    parser.add_argument("--makers", type=int, default=0, help="processes that make examples ahead of the trainer")
    parser.add_argument("--float32", action="store_true", help="no bfloat16, for CPUs without it")
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed)
    config = build_config(recipe)
    model = build_model(recipe, config)
    signal.signal(signal.SIGTERM, interrupted)
    for stage in STAGES:
        wanted = stage in (args.stage or STAGES)
        trainer = Trainer(
            recipe, model, stage, makers=args.makers, half=not args.float32, steps=args.steps if wanted else 0
        )
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
