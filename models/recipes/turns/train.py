"""Train the end-of-turn model: `python models/recipes turns.train --out models/pocket-turns`.

Training sentences are complete or cut after a random word, some with a filler; about half of the
examples are complete. Held-out sentences are evaluated at their end and after every word before it.
Takes half a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from motet_vad.turns import FIRST, LAST, SLOTS, TurnModel, TurnShape, features, words_of
from recipes.speech.general import general
from recipes.speech.sentences import WORLD, is_held_out, spoken_form, training_utterance

# Complete turns of a word or two, which training sentences contain too rarely.
SHORT = (
    *"yes no yeah okay sure right hello hi goodbye bye thanks please sorry stop wait help what why good great".split(),
    *(
        "thank you",
        "no thanks",
        "yes please",
        "of course",
        "go on",
        "not now",
        "never mind",
        "that's it",
        "all right",
    ),
    *(
        "good morning",
        "good night",
        "stop it",
        "wait a minute",
        "how are you",
        "what time is it",
        "tell me more",
    ),
)
FILLERS = "um uh er hmm so and well like you know i mean".split()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define every number of the training."""

    seed: int = 11
    sentences: int = 60_000
    cuts: int = 2  # per sentence
    fillers: float = 0.1  # share of cuts that end in a filler
    short: float = 0.1  # short turns per sentence
    general_share: float = 0.7
    long_share: float = 0.15  # of two joined sentences
    batch: int = 512
    epochs: int = 6
    rate: float = 0.01
    dropout: float = 0.1  # of words, so that the model relies on no single one
    shape: TurnShape = field(default_factory=TurnShape)


class Example(NamedTuple):
    text: str
    finished: bool


def examples(recipe: Recipe) -> list[Example]:
    """Return the training examples: cut sentences, each paired with its complete text.

    Short complete utterances are added with probability `recipe.short` per sentence.
    """
    rng = Random(f"{recipe.seed}/turns")
    found: list[Example] = []
    for _ in range(recipe.sentences):
        words = words_of(
            training_utterance(
                rng, general_share=recipe.general_share, long_share=recipe.long_share
            ).text
        )
        for _ in range(recipe.cuts if len(words) > 1 else 0):
            cut = words[: rng.randrange(1, len(words))]
            if rng.random() < recipe.fillers:
                cut.append(rng.choice(FILLERS))
            found += [Example(" ".join(cut), False), Example(" ".join(words), True)]
        if rng.random() < recipe.short:
            found.append(Example(rng.choice(SHORT), True))
    return found


class Network(nn.Module):
    """Compute `TurnModel.end_probability` for a batch."""

    def __init__(self, shape: TurnShape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.rows, shape.width)
        nn.init.normal_(self.table.weight, std=0.5)
        self.hidden = nn.Linear(SLOTS * shape.width + 1, shape.hidden)
        self.out = nn.Linear(shape.hidden, 1)

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return scores (batch,) of rows (batch, SLOTS, 2) and lengths (batch,)."""
        seen = self.table(rows).sum(dim=2).flatten(1)
        return self.out(torch.tanh(self.hidden(torch.cat([seen, lengths[:, None]], dim=1))))[:, 0]

    def export(self, shape: TurnShape) -> TurnModel:
        """Return the model in NumPy."""
        weights = {
            "table": self.table.weight,
            "hidden.weight": self.hidden.weight,
            "hidden.bias": self.hidden.bias,
            "out.weight": self.out.weight[0],
            "out.bias": self.out.bias,
        }
        return TurnModel(
            shape,
            {name: tensor.detach().numpy() for name, tensor in weights.items()},
            "pocket-turns",
        )


def train(recipe: Recipe) -> TurnModel:
    """Train the model; the same seed gives the same examples in the same order."""
    made = examples(recipe)
    pairs = [features(example.text, recipe.shape.rows) for example in made]
    rows = torch.from_numpy(np.stack([found for found, _ in pairs]))
    lengths = torch.tensor([length for _, length in pairs], dtype=torch.float32)
    labels = torch.tensor([float(example.finished) for example in made])
    torch.manual_seed(recipe.seed)
    network = Network(recipe.shape)
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.rate)
    steps = recipe.epochs * -(-len(made) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)
    for _ in range(recipe.epochs):
        for part in torch.randperm(len(made)).split(recipe.batch):
            kept = torch.rand(len(part), SLOTS, 1) >= recipe.dropout
            kept[:, 0] = True  # never the last word
            scores = network(rows[part] * kept, lengths[part])
            loss = functional.binary_cross_entropy_with_logits(scores, labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.export(recipe.shape)


class Score(NamedTuple):
    """Hold the scores of held-out sentences.

    auc: share of pairs in which the complete sentence is rated above the cut.
    """

    auc: float
    accuracy: float  # at threshold 0.5, mean of complete and cut sentences
    breaks: int
    ends: int


def score(ends: Sequence[float], breaks: Sequence[float]) -> Score:
    """Return the scores for the ratings of complete and cut sentences."""
    order = np.argsort(np.concatenate([breaks, ends]), kind="stable")
    ranks = np.empty(len(order))
    ranks[order] = np.arange(1, len(order) + 1)
    above = ranks[len(breaks) :].sum() - len(ends) * (len(ends) + 1) / 2
    right = (np.mean(np.array(ends) > 0.5) + np.mean(np.array(breaks) <= 0.5)) / 2
    return Score(float(above / len(ends) / len(breaks)), float(right), len(breaks), len(ends))


def held_out(draws: int) -> dict[str, list[str]]:
    """Return the held-out sentences among `draws` random ones of each category, without repeats.

    A category with few different sentences may have none.
    """
    makers = {"general": general, **{category: make for category, (_, make) in WORLD.items()}}
    found: dict[str, list[str]] = {}
    for category, make in makers.items():
        rng = Random(f"held-out/{category}")
        texts = dict.fromkeys(spoken_form(make(rng)) for _ in range(draws))
        found[category] = [text for text in texts if is_held_out(text)]
    return {category: texts for category, texts in found.items() if texts}


def evaluate(model: TurnModel, draws: int = 6000) -> dict[str, Score]:
    """Return scores by category and of all, over the held-out sentences among `draws` of each."""
    ends: dict[str, list[float]] = {}
    breaks: dict[str, list[float]] = {}
    for category, texts in held_out(draws).items():
        for text in texts:
            words = words_of(text)
            rated = [model.end_probability(" ".join(words[: n + 1])) for n in range(len(words))]
            ends.setdefault(category, []).append(rated[-1])
            breaks.setdefault(category, []).extend(rated[:-1])
    scores = {category: score(ends[category], breaks[category]) for category in ends}
    return scores | {"all": score([*chain(*ends.values())], [*chain(*breaks.values())])}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    args = parser.parse_args(argv)
    began = time.monotonic()
    train(Recipe(seed=args.seed)).save(args.out)
    model = TurnModel.load(str(args.out))
    print(
        f"{sum(array.size for array in model.weights.values())} weights, {time.monotonic() - began:.0f} s"
    )
    print(f"features: the last {LAST} words and the first {FIRST}")
    print(json.dumps({name: found._asdict() for name, found in evaluate(model).items()}, indent=1))


if __name__ == "__main__":
    main()
