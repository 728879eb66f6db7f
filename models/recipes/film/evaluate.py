"""Score a pocket-film folder: diffusers generates held-out prompts, `film.check` checks them.

python models/recipes film.evaluate models/pocket-film --count 200
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline

from recipes.film.check import Frames, check
from recipes.film.data import held_out
from recipes.film.recipe import Recipe
from recipes.film.scenes import FRAMES, Actor
from recipes.training.scoring import Verdict, scoring_parser, shares
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
    """Generate a film of each prompt; the n-th one has the seed `seed + n`.

    The noise of the scheduler's steps has it too, which `WanPipeline` does not see to.
    """
    generators = [torch.Generator().manual_seed(seed + number) for number in range(len(prompts))]
    scheduler = pipeline.scheduler
    scheduler.step = partial(type(scheduler).step, scheduler, generator=generators)
    films = pipeline(
        prompt=list(prompts),
        height=SIZE,
        width=SIZE,
        num_frames=FRAMES,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=generators,
        max_sequence_length=Recipe.prompt_tokens,
        output_type="np",
    ).frames
    return [np.rint(film * 255).astype(np.uint8) for film in films]


def score(
    folder: Path, count: int, *, steps: int = STEPS, guidance: float = GUIDANCE, batch: int = 25
) -> dict[str, Any]:
    """Return the share of correct films, by number of things too, and the commonest failures."""
    pipeline = load(folder)

    def make(prompts: list[str], first: int) -> list[Frames]:
        return generate(pipeline, prompts, steps=steps, guidance=guidance, seed=first)

    def judge(film: Frames, actors: list[Actor]) -> Verdict:
        result = check(film, actors)
        things = f"{len(actors)} things" if len(actors) > 1 else "1 thing"
        return Verdict(things, result.correct, result.reason)

    return shares(list(held_out(count)), make, judge, batch=batch)


def main() -> None:
    args = scoring_parser(__doc__, STEPS, GUIDANCE).parse_args()
    print(
        json.dumps(
            score(args.folder, args.count, steps=args.steps, guidance=args.guidance), indent=1
        )
    )


if __name__ == "__main__":
    main()
