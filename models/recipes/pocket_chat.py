"""Train the pocket-chat model: `python models/recipes/pocket_chat.py --out models/pocket-chat --steps N`.

Batches are a pure function of (seed, step) and nothing else is random after initialization, so a run that is
stopped and resumed takes the same course as one that is not. The learning rate is constant until the last fifth
of the steps: `--resume` with another `--steps` moves the end of a run without changing what was already done.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import chat_tokenizer
from chat_data import Conversation
from chat_optim import Schedule, optimizers
from chat_stream import conversation

MAX_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 20
    hidden: int = 192
    intermediate: int = 512
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    vocabulary: int = chat_tokenizer.VOCABULARY
    tokenizer_conversations: int = 6000
    batches: tuple[tuple[int, int], ...] = ((0, 40), (540, 16))  # (from step, conversations per step)
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    prompt_weight: float = 0.1  # loss weight of tokens that the assistant does not say
    warmup: int = 100

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: change one of them")
        if not self.batches or self.batches[0][0] != 0 or list(self.batches) != sorted(self.batches):
            raise ValueError(f"batches {self.batches} must be in order of steps, from step 0 on")

    def span(self, step: int) -> range:
        """The indices of the conversations of `step`; every conversation is used once."""
        first = 0
        for (start, size), (stop, _) in pairwise((*self.batches, (step + 1, 0))):
            if step < stop:
                return range(first + (step - start) * size, first + (step - start + 1) * size)
            first += (stop - start) * size
        raise ValueError(f"step {step} is negative: steps count from 0")


def render(tokenizer: PreTrainedTokenizerFast, made: Conversation) -> str:
    return tokenizer.apply_chat_template(list(made.messages), tools=list(made.tools) or None, tokenize=False)


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the first conversations of the stream."""
    plain = chat_tokenizer.train([], vocabulary=chat_tokenizer.SMALLEST)
    texts = [render(plain, conversation(recipe.seed, -1 - i)) for i in range(recipe.tokenizer_conversations)]
    texts += [f"{n} {n}" for n in range(21)] * (recipe.tokenizer_conversations // 10)  # one token per number
    return chat_tokenizer.train(texts, vocabulary=recipe.vocabulary)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A fresh model; its initialization depends on the seed alone."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded rows [B, T] of similar length; `weights` is the loss weight of each token as a target."""

    tokens: Tensor
    weights: Tensor


class Stream:
    """Batches by step. Causal attention needs no mask for padding on the right."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, *, rows_by: int = 1536) -> None:
        self.recipe, self.tokenizer, self.rows_by = recipe, tokenizer, rows_by
        self.turn = f"{chat_tokenizer.TURN_START}assistant\n"

    def encode(self, made: Conversation) -> tuple[list[int], list[float]]:
        """Token ids and loss weights: 1 for what the assistant says up to its end of turn."""
        ids: list[int] = []
        weights: list[float] = []
        head, *turns = render(self.tokenizer, made).split(self.turn)
        self._put(head, self.recipe.prompt_weight, ids, weights)
        for turn in turns:
            said, end, rest = turn.partition(chat_tokenizer.TURN_END)
            self._put(self.turn, self.recipe.prompt_weight, ids, weights)
            self._put(said + end, 1.0, ids, weights)
            self._put(rest, self.recipe.prompt_weight, ids, weights)
        return ids[:MAX_LENGTH], weights[:MAX_LENGTH]

    def _put(self, text: str, weight: float, ids: list[int], weights: list[float]) -> None:
        new = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        weights += [weight] * len(new)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of `step`, each of about `rows_by` padded tokens."""
        made = [conversation(self.recipe.seed, index) for index in self.recipe.span(step)]
        rows = sorted((self.encode(one) for one in made), key=lambda row: len(row[0]))
        chunks: list[list[tuple[list[int], list[float]]]] = [[]]
        for row in rows:
            if chunks[-1] and len(row[0]) * (len(chunks[-1]) + 1) > self.rows_by:
                chunks.append([])
            chunks[-1].append(row)
        return [self._pad(chunk) for chunk in chunks]

    def _pad(self, rows: list[tuple[list[int], list[float]]]) -> Batch:
        length, pad = len(rows[-1][0]), self.tokenizer.pad_token_id
        tokens = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
        weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
        return Batch(tokens=tokens, weights=weights)

    def ahead(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The batches of steps `start` to `stop`, made one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.batches, start)
            for step in range(start, stop):
                ready, coming = coming.result(), pool.submit(self.batches, step + 1)
                yield ready


def token_loss(model: Callable[..., Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """Weighted loss sum over all targets, and the plain loss sum over what the assistant says."""
    logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits
    targets, weights = batch.tokens[:, 1:].flatten(), batch.weights[:, 1:].flatten()
    each = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    return (each * weights).sum(), (each.detach() * (weights == 1.0)).sum()


class Trainer:
    """One run: model, optimizers and step, saved together and restored together."""

    def __init__(self, recipe: Recipe, schedule: Schedule, *, compiled: bool = False) -> None:
        self.recipe, self.schedule, self.step = recipe, schedule, 0
        self.tokenizer = build_tokenizer(recipe)
        self.model = build_model(recipe, self.tokenizer)
        self.forward = torch.compile(self.model, dynamic=True) if compiled else self.model
        self.optimizers = optimizers(self.model, matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.stream = Stream(recipe, self.tokenizer)

    def train_step(self, batches: list[Batch]) -> float:
        """One update; returns the mean loss per assistant token."""
        total = sum(float(batch.weights[:, 1:].sum()) for batch in batches)
        spoken = sum(int((batch.weights[:, 1:] == 1.0).sum()) for batch in batches)
        loss = 0.0
        for batch in batches:
            weighted, said = token_loss(self.forward, batch)
            (weighted / total).backward()
            loss += float(said)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = self.schedule.at(self.step)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss / spoken

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
        """Write the checkpoint folder: half-precision weights, tokenizer, template."""
        model = Qwen3ForCausalLM(self.model.config)
        model.load_state_dict(self.model.state_dict())
        model.generation_config = GenerationConfig(
            eos_token_id=[self.tokenizer.eos_token_id, self.tokenizer.pad_token_id],
            pad_token_id=self.tokenizer.pad_token_id,
            do_sample=False,
        )
        model.to(torch.float16).save_pretrained(out)
        self.tokenizer.save_pretrained(out)


def run(trainer: Trainer, *, state: Path, every: float = 240.0, log: int = 20) -> list[float]:
    """Train to the end of the schedule; saves the state every `every` seconds; returns the losses.

    A file `stop` beside the state ends the run after the step under way.
    """
    losses: list[float] = []
    tokens, since, saved = 0, time.monotonic(), time.monotonic()
    for batches in trainer.stream.ahead(trainer.step, trainer.schedule.steps):
        losses.append(trainer.train_step(batches))
        tokens += sum(int((batch.weights > 0).sum()) for batch in batches)
        if trainer.step % log == 0:
            now = time.monotonic()
            line = {"step": trainer.step, "loss": round(sum(losses[-log:]) / len(losses[-log:]), 4)}
            line |= {"tokens_per_s": round(tokens / (now - since)), "lr": round(trainer.schedule.at(trainer.step), 3)}
            print(json.dumps(line), flush=True)
            tokens, since = 0, now
        if time.monotonic() - saved > every:
            trainer.save_state(state)
            saved = time.monotonic()
        if (state.parent / "stop").exists():
            break
    trainer.save_state(state)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-chat/state.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    parser.add_argument("--export", action="store_true", help="only write --out from --state")
    parser.add_argument("--compile", action="store_true", help="torch.compile: about 1.5 times the speed")
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed)
    trainer = Trainer(recipe, Schedule(steps=args.steps, warmup=recipe.warmup), compiled=args.compile)
    if args.resume or args.export:
        trainer.load_state(args.state)
    if not args.export:
        run(trainer, state=args.state)
    trainer.export(args.out)


if __name__ == "__main__":
    main()
