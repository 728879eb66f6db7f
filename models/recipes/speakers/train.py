"""Train the speaker encoder: `python models/recipes speakers.train --out FOLDER`.

It learns to separate some hundred synthetic speakers by a second or two of speech (additive angular
margin: Deng et al., 2019), and is evaluated on held-out speakers. Takes five minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from motet_speakers.encoder import EPSILON, KERNEL, KERNEL_WIDTH, Shape, SpeakerEncoder
from motet_speakers.features import BANDS, Floats
from recipes.speakers.data import training_features


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define every number of the training."""

    seed: int = 7
    people: int = 400
    sentences: int = 10  # per person
    batch: int = 48
    steps: int = 900
    frames: tuple[int, int] = (80, 180)  # of a crop, shortest and longest
    rate: float = 2e-3
    warmup: int = 100
    decay: float = 0.05  # weight decay
    scale: float = 24.0
    margin: float = 0.2  # radians
    shape: Shape = field(default_factory=Shape)


class Layer(nn.Module):
    """Compute a normalized convolution over time as one matrix product, as `SpeakerEncoder` does."""

    def __init__(
        self, channels: int, out: int, kernel: int = 1, dilation: int = 1, stride: int = 1
    ) -> None:
        super().__init__()
        self.kernel, self.dilation, self.stride = kernel, dilation, stride
        self.product = nn.Linear(kernel * channels, out)
        self.norm = nn.BatchNorm1d(out)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return `relu(norm(conv(x)))`, `[B, T, out]`.

        With a kernel wider than one frame, it is `[B, ⌈T / stride⌉, out]`.
        """
        if self.kernel > 1:
            half, frames = self.kernel // 2 * self.dilation, x_BTC.shape[1]
            padded = functional.pad(x_BTC, (0, 0, half, half))
            taps = range(0, self.kernel * self.dilation, self.dilation)
            x_BTC = torch.cat([padded[:, tap : tap + frames : self.stride] for tap in taps], dim=2)
        return functional.relu(
            self.norm(self.product(x_BTC).flatten(0, 1)).unflatten(0, x_BTC.shape[:2])
        )


def folded(product: nn.Linear, norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Fold a normalization into its product: weight (inputs, outputs) and bias."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    gain = torch.rsqrt(norm.running_var + norm.eps) * (norm.weight if norm.affine else 1.0)
    bias = (product.bias - norm.running_mean) * gain + (norm.bias if norm.affine else 0.0)
    return (product.weight * gain[:, None]).T, bias


class Network(nn.Module):
    """Compute what `SpeakerEncoder` does, with normalizations that `export` folds."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.first = Layer(BANDS, width, KERNEL, stride=2)
        self.deep = nn.ModuleList(
            Layer(width, width, KERNEL_WIDTH, dilation) for dilation in shape.dilations
        )
        self.wide = Layer(width, shape.pooled)
        self.worth = nn.Parameter(torch.zeros(shape.pooled))
        self.out = nn.Linear(2 * shape.pooled, shape.size)
        self.out_norm = nn.BatchNorm1d(shape.size, affine=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return unit-length vectors (B, size) of features (B, T, BANDS)."""
        x_BTC = self.first(x_BTC)
        for layer in self.deep:
            x_BTC = x_BTC + layer(x_BTC)
        x_BTC = self.wide(x_BTC)
        attention = torch.softmax(x_BTC @ self.worth, dim=1)[..., None]
        mean = (x_BTC * attention).sum(dim=1)
        deviation = torch.sqrt(((x_BTC**2 * attention).sum(dim=1) - mean**2).clamp_min(EPSILON))
        return functional.normalize(self.out_norm(self.out(torch.cat([mean, deviation], dim=1))))

    @torch.no_grad()
    def export(self, name: str) -> SpeakerEncoder:
        """Fold the normalizations and return the encoder."""
        layers: dict[str, Layer] = {"first": self.first, "wide": self.wide}
        layers |= {f"deep.{number}": layer for number, layer in enumerate(self.deep)}  # type: ignore[misc]
        pairs = {key: (layer.product, layer.norm) for key, layer in layers.items()}
        weights: dict[str, Tensor] = {"worth.weight": self.worth}
        for key, (product, norm) in (pairs | {"out": (self.out, self.out_norm)}).items():
            weights[f"{key}.weight"], weights[f"{key}.bias"] = folded(product, norm)
        arrays = {key: tensor.detach().contiguous().numpy() for key, tensor in weights.items()}
        return SpeakerEncoder(self.shape, arrays, name)


class Margin(nn.Module):
    """Compute the additive angular margin loss over the training speakers."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.randn(recipe.people, recipe.shape.size))
        self.scale, self.margin = recipe.scale, recipe.margin

    def forward(self, vectors: Tensor, labels: Tensor, strength: float) -> Tensor:
        """Return the loss of vectors (B, size) with speakers `labels` (B).

        strength: 0 to 1, share of the margin that applies.
        """
        cosine = vectors @ functional.normalize(self.directions).T
        angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
        own = functional.one_hot(labels, len(self.directions)).bool()
        logits = torch.where(own, torch.cos(angle + self.margin * strength), cosine)
        return functional.cross_entropy(self.scale * logits, labels)


def crop(data: list[list[Floats]], people: Sequence[int], frames: int, rng: Random) -> Tensor:
    """Return (B, frames, BANDS): a random stretch of each person; short sentences are repeated."""
    parts = []
    for number in people:
        utterance = rng.choice(data[number])
        while len(utterance) < frames:
            utterance = np.concatenate([utterance, utterance])
        start = rng.randrange(len(utterance) - frames + 1)
        part = utterance[start : start + frames].astype(np.float32)
        parts.append(part - part.mean())  # as `features` normalizes a stretch
    return torch.from_numpy(np.stack(parts))


def train(recipe: Recipe, data: list[list[Floats]], *, log: bool = True) -> Network:
    """Train the network; the same seed and data give the same crops in the same order."""
    torch.manual_seed(recipe.seed)
    rng = Random(f"{recipe.seed}/crops")
    network, loss_of = Network(recipe.shape), Margin(recipe)
    parameters = [*network.parameters(), *loss_of.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.rate, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.rate, total_steps=recipe.steps, pct_start=recipe.warmup / recipe.steps
    )
    correct = total = 0.0
    for step in range(recipe.steps):
        people = rng.sample(range(recipe.people), min(recipe.batch, recipe.people))
        vectors = network(crop(data, people, rng.randint(*recipe.frames), rng))
        labels = torch.tensor(people)
        loss = loss_of(vectors, labels, min(1.0, 3 * step / recipe.steps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += float(loss.detach())
        correct += float((vectors @ loss_of.directions.T).argmax(1).eq(labels).float().mean())
        if log and (step + 1) % 100 == 0:
            print(
                f"step {step + 1}: loss {total / 100:.3f}, accuracy {correct / 100:.3f}", flush=True
            )
            correct = total = 0.0
    return network.eval()


def main(argv: Sequence[str] | None = None) -> None:
    from recipes.speakers.evaluate import best_threshold, report

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    args = parser.parse_args(argv)
    recipe = Recipe(seed=args.seed)
    data = training_features(recipe.seed, recipe.people, recipe.sentences)
    print(
        f"{sum(map(len, data))} sentences, {time.process_time():.0f} s of CPU time",
        flush=True,
    )
    model = train(recipe, data).export(args.out.name)
    model.shape = replace(model.shape, alike=best_threshold(model))
    model.save(args.out)
    print(
        f"{sum(array.size for array in model.weights.values())} weights, {time.process_time():.0f} s"
    )
    print(json.dumps(report(SpeakerEncoder.load(str(args.out))), indent=1))


if __name__ == "__main__":
    main()
