"""Measure what limits a tower's gain over transformers: `python -m benchmarks.images.encoder_limit`.

Prints, for each tower of `encoder.py`, the CPU seconds on one thread of transformers' encoder one
picture at a time, of ours stepped with all of them, and of nothing but the matrix products of the
same layers, by torch and by our packed weights, for all pictures at once. What computes the products
no faster can gain no more than the first divided by the third. CPU seconds hardly depend on what else the
machine does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from benchmarks.images.checkpoint import vision_checkpoint
from benchmarks.images.encoder import EncoderPlan
from benchmarks.images.encoder_worker import _features, _motet, _one_by_one, _pictures, _stepped
from benchmarks.support.cache import cache_folder
from motet_kernels.linear.pack import pack_linear

Product = tuple[nn.Linear, int]  # and its rows, for all pictures


def limits(shape: str, cache: Path, rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each way to compute all pictures of a tower."""
    folder = vision_checkpoint(shape, cache)
    engine = _motet(folder, torch.float32, "")
    sizes = [list(size) for size in EncoderPlan().sizes]
    pictures = [engine.family.prepare(picture, 0) for picture in _pictures(sizes)]
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    products = _products(theirs, pictures)
    inputs = [torch.randn(rows, linear.in_features) for linear, rows in products]
    packed = [pack_linear(one.weight.detach(), _bias(one), "float32") for one, _ in products]
    ours = _stepped(engine)
    ways: dict[str, Callable[[], Any]] = {
        "transformers, one by one": lambda: _one_by_one(theirs, pictures),
        "motet": lambda: ours(pictures),
        "products alone, torch": lambda: _multiply([one for one, _ in products], inputs),
        "products alone, packed": lambda: _multiply(packed, inputs),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if number:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _products(model: Any, pictures: list[Any]) -> list[Product]:
    """Return the linear layers that a tower runs, each with its rows for all pictures."""
    rows: dict[nn.Linear, int] = {}

    def count(module: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        rows[module] = rows.get(module, 0) + given[0].numel() // module.in_features

    hooks = [
        module.register_forward_hook(count)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    for picture in pictures:
        _features(model, [picture])
    for hook in hooks:
        hook.remove()
    return list(rows.items())


def _bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


@torch.inference_mode()
def _multiply(layers: list[Any], inputs: list[Tensor]) -> None:
    for layer, given in zip(layers, inputs, strict=True):
        layer(given)


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shapes", nargs="+", default=list(EncoderPlan().shapes))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for shape in given.shapes:
        found = limits(shape, given.cache, given.rounds)
        theirs = found["transformers, one by one"]
        for name, seconds in found.items():
            print(f"| {shape} | {name} | {seconds:.2f} | {theirs / seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
