"""Train pocket-chat: `python models/recipes chat.train --out models/pocket-chat --steps N`.

Batches are a pure function of (seed, step) and nothing else is random after initialization, so a
run that is stopped and resumed gives the same losses as an uninterrupted one. The learning rate is
constant until the last fifth of the steps: `--resume` with another `--steps` moves the end of a run
without changing the steps already done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from recipes.chat import tokenizer as chat_tokenizer
from recipes.chat.batches import Batch, Stream, render
from recipes.chat.recipe import Recipe
from recipes.chat.stream import training_conversation
from recipes.training.loop import Schedule, Training, make_readable
from recipes.training.ranks import Ranks, run_ranks


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the first conversations of the stream."""
    byte_tokenizer = chat_tokenizer.train([], vocabulary=chat_tokenizer.SMALLEST)
    texts = [
        render(byte_tokenizer, training_conversation(recipe.seed, -1 - i))
        for i in range(recipe.tokenizer_conversations)
    ]
    texts += [f"{n} {n}" for n in range(21)] * (
        recipe.tokenizer_conversations // 10
    )  # so that each number becomes one token
    return chat_tokenizer.train(texts, vocabulary=recipe.vocabulary)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build a model whose initial weights depend on the seed alone."""
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
        initializer_range=recipe.initial_std,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, recipe.initial_gain)
    return model


def token_loss(model: Callable[..., Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the weighted loss sum over all targets, and the loss sum over the assistant's tokens."""
    if len(batch.tokens) == 1:  # torch.compile would specialize on one row
        model = getattr(model, "_orig_mod", model)
    logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits
    targets, weights = batch.tokens[:, 1:].flatten(), batch.weights[:, 1:].flatten()
    each = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    return (each * weights).sum(), (each.detach() * (weights == 1.0)).sum()


class Report(NamedTuple):
    """Hold the mean loss per assistant token of one step, and its tokens."""

    loss: float
    tokens: int


class Trainer(Training[list[Batch], Report]):
    """Train one run, or one rank's share of it."""

    def __init__(
        self,
        recipe: Recipe,
        schedule: Schedule,
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        compiled: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Build the model.

        tokenizer: of an existing model; None trains the recipe's own.
        """
        self.recipe = recipe
        self.tokenizer = tokenizer or build_tokenizer(recipe)
        self.model = build_model(recipe, self.tokenizer)
        self.forward = torch.compile(self.model, dynamic=True) if compiled else self.model
        super().__init__(self.model, schedule, matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)
        self.ranks = ranks or Ranks()
        self.stream = Stream(recipe, self.tokenizer, self.ranks)

    def batches(self) -> Iterator[list[Batch]]:
        """Yield the batches that are left."""
        return self.stream.prefetch(self.step, self.schedule.steps)

    def train_step(self, batch: list[Batch]) -> Report:
        """Run one update on this rank's share of the step."""
        weight = targets = loss_sum = tokens = 0.0
        for part in batch:
            weighted_loss, assistant_loss = token_loss(self.forward, part)
            weighted_loss.backward()
            weight += float(part.weights[:, 1:].sum())
            targets += float((part.weights[:, 1:] == 1.0).sum())
            tokens += float((part.weights > 0).sum())
            loss_sum += float(assistant_loss)
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        weight, targets, loss_sum, tokens = self.ranks.sum(
            [weight, targets, loss_sum, tokens], gradients
        )
        for gradient in gradients:
            gradient.div_(weight)
        self.update(rate=self.recipe.phase(self.step).rate)
        return Report(loss=loss_sum / targets, tokens=int(tokens))

    def progress(self, reports: Sequence[Report], seconds: float) -> str:
        """Format the step, mean loss and tokens per second."""
        loss = sum(report.loss for report in reports) / len(reports)
        tokens = sum(report.tokens for report in reports)
        return json.dumps(
            {"step": self.step, "loss": round(loss, 4), "tokens_per_s": round(tokens / seconds)}
        )

    def export(self, out: Path) -> None:
        """Write the checkpoint in float16: weights, tokenizer, template."""
        model = Qwen3ForCausalLM(self.model.config)
        model.load_state_dict(self.model.state_dict())
        model.generation_config = GenerationConfig(
            eos_token_id=[self.tokenizer.eos_token_id, self.tokenizer.pad_token_id],
            pad_token_id=self.tokenizer.pad_token_id,
            do_sample=False,
        )
        model.to(torch.float16).save_pretrained(out)
        self.tokenizer.save_pretrained(out)
        make_readable(out)


def train(ranks: Ranks, args: argparse.Namespace) -> None:
    """Run the training, or one rank's share of it."""
    recipe = Recipe(seed=args.seed)
    schedule = Schedule(
        steps=args.steps, warmup=recipe.warmup, decay=recipe.decay, restarts=recipe.restarts
    )
    trainer = Trainer(recipe, schedule, compiled=args.compile, ranks=ranks)
    if args.resume or args.export:
        trainer.load_state(args.state)
    if not args.export:
        trainer.run(args.state, every=240.0, log=20)
    if ranks.is_leader:
        trainer.export(args.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=14_500)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-chat/state.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from --state")
    parser.add_argument("--export", action="store_true", help="only export --state to --out")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="use torch.compile: 1.5 times the speed after a minute of compilation",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="single-threaded processes that share every step"
    )
    args = parser.parse_args()
    run_ranks(train, args, count=args.ranks, state=args.state)


if __name__ == "__main__":
    main()
