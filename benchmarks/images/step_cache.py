"""Measure what the first-block cache saves and costs: `python -m benchmarks.images.step_cache`.

Draws the same pictures without it and at each threshold, in one process on the same weights, in turn.
The price is the mean absolute difference of the pictures, of 255, beside that of two seeds; the gain
is time and the share of rows that left blocks out. Another model: `--model FOLDER`, with adapters
`--lora NAME=PATH` (pictures then take turns with and without them). A few minutes on two cores; prints
the table for "Dials" in services/motet_diffusion/README.md, nothing is kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from benchmarks.support.measures import processor, table
from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.engine import Engine
from motet_diffusion.engine.request import Event, Lora, PictureDone, PictureRequest

ROOT = Path(__file__).resolve().parents[2]
_PROMPTS = ("a red circle", "two blue squares", "a green star on the left", "a yellow triangle")


class Drawer:
    """Draw with an engine, and add up its seconds."""

    def __init__(self, config: EngineConfig):
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.engine = Engine(config, self._events.put)
        self.begin()

    def begin(self) -> None:
        """Forget what was counted, as of a picture that only warms up."""
        self.seconds = 0.0
        self.engine.rows = 0
        if self.engine.cache is not None:
            self.engine.cache.computed = self.engine.cache.skipped = 0

    def draw(self, drawing: PictureRequest) -> Any:
        """Return the picture's values, `[height, width, 3]`."""
        began = time.perf_counter()
        self.engine.add("picture", drawing)
        while True:
            self.engine.step()
            while not self._events.empty():
                event = self._events.get()
                if isinstance(event, PictureDone):
                    while self.engine.has_work:
                        self.engine.step()
                    self.seconds += time.perf_counter() - began
                    if event.error is not None:
                        raise event.error
                    return np.asarray(event.picture).astype(float)


def drawings(count: int, steps: int, loras: tuple[Lora, ...]) -> list[PictureRequest]:
    """Return the pictures, every second one with the adapters."""
    return [
        PictureRequest(
            prompt=_PROMPTS[seed % len(_PROMPTS)],
            steps=steps,
            seed=seed,
            loras=loras if seed % 2 else (),
        )
        for seed in range(count)
    ]


def measure(args: argparse.Namespace) -> str:
    """Return the table."""
    loras = tuple(Lora(item.partition("=")[0]) for item in args.lora)
    asked = drawings(args.pictures, args.steps, loras)
    drawers = {
        threshold: Drawer(
            EngineConfig(
                model=args.model, threads=args.threads, loras=tuple(args.lora), step_cache=threshold
            )
        )
        for threshold in (0.0, *args.thresholds)
    }
    for drawer in drawers.values():
        drawer.draw(asked[0])
        drawer.begin()
    errors: dict[float, list[float]] = {threshold: [] for threshold in drawers}
    other_seed = []
    previous = None
    for drawing in asked:
        exact = drawers[0.0].draw(drawing)
        for threshold in args.thresholds:
            found = drawers[threshold].draw(drawing)
            errors[threshold].append(float(np.abs(found - exact).mean()))
        if previous is not None and previous.shape == exact.shape:
            other_seed.append(float(np.abs(previous - exact).mean()))
        previous = exact
    rows = []
    for threshold, drawer in drawers.items():
        engine = drawer.engine
        skipped = 0 if engine.cache is None else engine.cache.skipped
        error = float(np.mean(errors[threshold])) if threshold else 0.0
        rows.append(
            [
                f"{threshold:g}" if threshold else "off",
                f"{len(asked) / drawer.seconds * 60:,.1f}",
                f"{drawers[0.0].seconds / drawer.seconds:.2f}x",
                f"{skipped / max(engine.rows, 1):.0%}",
                f"{error:.2f}",
            ]
        )
        engine.close()
    header = ["threshold", "pictures/min", "speed", "rows that left blocks out", "error of 255"]
    what = f"{Path(args.model).name}, {len(asked)} pictures of {args.steps} steps"
    between = (
        f" Pictures of different seeds and prompts differ by {np.mean(other_seed):.1f}."
        if other_seed
        else ""
    )
    note = f"{what}, {args.threads} threads of {processor()}.{between}"
    return table(header, rows) + "\n\n" + note


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "pocket-draw"))
    parser.add_argument("--lora", action="append", default=[], help="NAME=PATH")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


def main() -> None:
    """Run as a script."""
    print(measure(arguments()))


if __name__ == "__main__":
    main()
