"""Run all encoders of `images.py` on one checkpoint: `python -m benchmarks.images.encoder_worker TASK_JSON`.

Pictures, weights and threads are the same, in one process and in turn. Prints JSON: seconds of each
encoder for all pictures by round, and its distance to transformers' embeddings.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from motet_encoder.checkpoint import load_family
from motet_encoder.engine import Engine
from motet_encoder.families import Prepared
from motet_shared.process.starts import collect_rarely

Encoder = Callable[[list[Prepared]], list[Tensor]]


def measure(task: dict[str, Any]) -> dict[str, Any]:
    folder, dtype = Path(task["folder"]), getattr(torch, task["dtype"])
    engines = {
        f"motet {form or task['dtype']}": _motet(folder, dtype, form)
        for form in ("", *task["forms"])
    }
    family = next(iter(engines.values())).family
    start = time.perf_counter()
    pictures = [family.prepare(picture, 0) for picture in _pictures(task["sizes"])]
    prepared = time.perf_counter() - start
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    encoders: dict[str, Encoder] = {name: _stepped(engine) for name, engine in engines.items()}
    encoders |= {
        f"transformers {task['dtype']}, one by one": lambda given: _one_by_one(theirs, given),
        f"transformers {task['dtype']}, one batch": lambda given: _features(theirs, given),
    }
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    collect_rarely()
    made: dict[str, list[Tensor]] = {}
    for repeat in range(task["rounds"] + 1):
        for name, encoder in encoders.items():
            start = time.perf_counter()
            made[name] = encoder(pictures)
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    wanted = made[next(name for name in encoders if name.endswith("one by one"))]
    return {
        "seconds": seconds,
        "apart": {name: _apart(found, wanted) for name, found in made.items()},
        "pictures": len(pictures),
        "patches": [picture.patches for picture in pictures],
        "prepare": prepared,
    }


def _motet(folder: Path, dtype: torch.dtype, form: str) -> Engine:
    return Engine(load_family(folder, dtype, form or "exact"), max_patches=4096)


def _stepped(engine: Engine) -> Encoder:
    """Return an encoder that steps the engine as the service does, with all pictures waiting."""

    def encode(pictures: list[Prepared]) -> list[Tensor]:
        for key, picture in enumerate(pictures):
            engine.add(key, picture)
        found: dict[Any, Tensor] = {}
        while engine.has_work:
            for output in engine.step():
                if not isinstance(output.result, Tensor):
                    raise output.result
                found[output.key] = output.result
        return [found[key] for key in range(len(pictures))]

    return encode


def _one_by_one(model: Any, pictures: list[Prepared]) -> list[Tensor]:
    return [_features(model, [picture])[0] for picture in pictures]


@torch.inference_mode()
def _features(model: Any, pictures: list[Prepared]) -> list[Tensor]:
    names = pictures[0].inputs
    features = model.model.get_image_features(
        **{n: torch.cat([p.inputs[n] for p in pictures]) for n in names}
    )
    return [layer.float()[None] for layer in features.pooler_output]


def _apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest relative distance of a picture's embeddings."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def _pictures(sizes: list[list[int]]) -> list[Image.Image]:
    """Return pictures of random blurred colours, always the same."""
    colours = np.random.default_rng(0).integers(0, 256, (len(sizes), 6, 8, 3), dtype=np.uint8)
    return [
        Image.fromarray(colour).resize((width, height), Image.Resampling.BICUBIC)
        for colour, (width, height) in zip(colours, sizes, strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
