"""Train the pocket-asr model: `python models/recipes/pocket_asr.py --out models/pocket-asr --makers 1`.

Examples are a pure function of (seed, index) and their order one of the step, so a run that is stopped (a file `stop`
beside the state, or a signal) and resumed takes the course of one that is not, up to rounding. The learning rates are
constant until the last share of the steps: `--resume` with another `--steps` moves the end of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from transformers import WhisperForConditionalGeneration, WhisperTokenizer

import asr_tokenizer
from asr_batches import Batch, Stream
from asr_model import Listener
from asr_recipe import Recipe
from asr_shards import Shards
from chat_optim import Schedule, optimizers
from speech_sentences import utterance


def build_tokenizer(recipe: Recipe) -> WhisperTokenizer:
    """Train the tokenizer on sentences that training may use."""
    rng = Random(f"{recipe.seed}/tokenizer")
    texts = (utterance(rng, general_share=0.7).text for _ in range(recipe.tokenizer_sentences))
    return asr_tokenizer.train(texts, vocabulary=recipe.vocabulary)


class Report(NamedTuple):
    """One step: its losses and the number of clips."""

    text: float
    phonemes: float
    alignment: float
    clips: int


class Trainer:
    """One run: model, optimizers and step, saved together and restored together."""

    def __init__(self, recipe: Recipe, schedule: Schedule, *, data: Path, half: bool = True) -> None:
        self.recipe, self.schedule, self.step, self.half = recipe, schedule, 0, half
        self.tokenizer = build_tokenizer(recipe)
        self.model = Listener(recipe, self.tokenizer)
        self.optimizers = optimizers(self.model, matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.shards = Shards(recipe, self.tokenizer, data)
        self.stream = Stream(recipe, self.tokenizer, self.shards)

    def train_step(self, batch: Batch) -> Report:
        """One update, in bfloat16 autocast if `half`."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            losses = self.model(batch)
        weights = (1.0, self.recipe.phoneme_weight, self.recipe.alignment_weight)
        torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = self.schedule.at(self.step)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            with torch.autocast("cpu", torch.bfloat16, enabled=self.half):  # Muon's products are half of a step else
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        text, phonemes, alignment = (float(loss.detach()) for loss in losses)
        return Report(text, phonemes, alignment, len(batch.tokens))

    def save_state(self, path: Path) -> None:
        state = {"step": self.step, "model": self.model.state_dict()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load_state(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def export(self, out: Path) -> None:
        """Write the checkpoint folder: half-precision weights, tokenizer, feature extractor, generation config."""
        trained = self.model.whisper
        model = WhisperForConditionalGeneration(trained.config)
        model.load_state_dict(trained.state_dict())
        model.generation_config = trained.generation_config
        model.to(torch.float16).save_pretrained(out)
        asr_tokenizer.processor(self.tokenizer).save_pretrained(out)
        for path in out.iterdir():
            path.chmod(0o644)  # the weights come out private, which a container's user could not read


def run(trainer: Trainer, *, state: Path, every: float = 120.0, log: int = 50) -> list[Report]:
    """Train to the end of the schedule, or until a file `stop` lies beside the state; returns what each step said."""
    reports: list[Report] = []
    since = saved = time.monotonic()
    for batch in trainer.stream.ahead(trainer.step, trainer.schedule.steps):
        reports.append(trainer.train_step(batch))
        now = time.monotonic()
        if trainer.step % log == 0:
            print(progress(trainer.step, reports[-log:], now - since), flush=True)
            since = now
        if now - saved > every:
            trainer.save_state(state)
            saved = now
        if (state.parent / "stop").exists():
            break
    trainer.save_state(state)
    return reports


def progress(step: int, reports: Sequence[Report], seconds: float) -> str:
    """A log line: step, mean losses, clips per second."""
    count = len(reports)
    means = {name: round(sum(getattr(r, name) for r in reports) / count, 4) for name in Report._fields[:3]}
    return json.dumps({"step": step, **means, "clips_per_s": round(sum(r.clips for r in reports) / seconds, 1)})


def interrupted(*_: object) -> None:
    raise SystemExit(143)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-asr/state.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from --state if it is there")
    parser.add_argument("--export", action="store_true", help="only write --out from --state")
    parser.add_argument("--makers", type=int, default=0, help="processes that make examples ahead of the trainer")
    parser.add_argument("--float32", action="store_true", help="no bfloat16, for CPUs without it")
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed)
    schedule = Schedule(steps=args.steps, warmup=recipe.warmup, decay=recipe.decay, restarts=recipe.restarts)
    trainer = Trainer(recipe, schedule, data=args.state.parent / "data", half=not args.float32)
    if args.export or (args.resume and args.state.exists()):
        trainer.load_state(args.state)
    signal.signal(signal.SIGTERM, interrupted)
    if not args.export:
        trainer.shards.start(args.makers, visit=trainer.step // trainer.stream.per_visit)
        try:
            run(trainer, state=args.state)
        finally:
            trainer.shards.stop()
            trainer.save_state(args.state)
    trainer.export(args.out)


if __name__ == "__main__":
    main()
