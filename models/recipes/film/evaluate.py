"""Score a pocket-film folder: diffusers generates held-out prompts, `film.check` checks them.

python models/recipes film.evaluate models/pocket-film --count 200
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline

from recipes.film.check import Frames, check
from recipes.film.data import held_out
from recipes.film.recipe import Recipe
from recipes.film.scenes import FRAMES
from recipes.world.pictures import SIZE

GUIDANCE, STEPS = Recipe.guidance, Recipe.denoising_steps


def load(folder: Path) -> WanPipeline:
    """Load the pipeline in float32 on the CPU."""
    pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(
    pipeline: WanPipeline,
    prompts: Sequence[str],
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
) -> list[Frames]:
    """Generate a film of each prompt; the n-th one has the seed `seed + n`."""
    films = pipeline(
        prompt=list(prompts),
        height=SIZE,
        width=SIZE,
        num_frames=FRAMES,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(seed + number) for number in range(len(prompts))],
        max_sequence_length=Recipe.prompt_tokens,
        output_type="np",
    ).frames
    return [np.rint(film * 255).astype(np.uint8) for film in films]


def score(
    folder: Path, count: int, *, steps: int = STEPS, guidance: float = GUIDANCE, batch: int = 25
) -> dict[str, Any]:
    """Return the share of correct films, by number of things too, and the commonest failures."""
    pipeline, prompts = load(folder), list(held_out(count))
    correct: Counter[str] = Counter()
    total: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for first in range(0, len(prompts), batch):
        chunk = prompts[first : first + batch]
        texts = [text for text, _ in chunk]
        films = generate(pipeline, texts, steps=steps, guidance=guidance, seed=first)
        for (_, actors), film in zip(chunk, films, strict=True):
            result = check(film, actors)
            things = f"{len(actors)} things" if len(actors) > 1 else "1 thing"
            total[things] += 1
            correct[things] += result.correct
            if not result.correct:
                failures[result.reason] += 1
    shares = {kind: round(correct[kind] / total[kind], 3) for kind in sorted(total)}
    return {
        "right": round(correct.total() / total.total(), 3),
        **shares,
        "wrong": dict(failures.most_common(8)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="number of held-out prompts")
    parser.add_argument("--steps", type=int, default=STEPS, help="denoising steps")
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    args = parser.parse_args()
    print(
        json.dumps(
            score(args.folder, args.count, steps=args.steps, guidance=args.guidance), indent=1
        )
    )


if __name__ == "__main__":
    main()
