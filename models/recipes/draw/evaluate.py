"""Score a pocket-draw folder: diffusers generates held-out prompts, `draw.check` checks them.

python models/recipes draw.evaluate models/pocket-draw --count 200
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import PixArtSigmaPipeline

from recipes.draw.check import check
from recipes.draw.data import held_out
from recipes.draw.recipe import Recipe
from recipes.training.scoring import Verdict, scoring_parser, shares
from recipes.world.pictures import SIZE, Picture
from recipes.world.scenes import Scene

GUIDANCE, STEPS = Recipe.guidance, Recipe.denoising_steps


def load(folder: Path) -> PixArtSigmaPipeline:
    """Load the pipeline in float32 on the CPU."""
    pipeline = PixArtSigmaPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(
    pipeline: PixArtSigmaPipeline,
    prompts: Sequence[str],
    *,
    steps: int,
    guidance: float = GUIDANCE,
    seed: int = 0,
) -> list[Picture]:
    """Generate a picture of each prompt; the n-th one has the seed `seed + n`."""
    pictures = pipeline(
        prompt=list(prompts),
        negative_prompt="",
        height=SIZE,
        width=SIZE,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(seed + number) for number in range(len(prompts))],
        use_resolution_binning=False,
        clean_caption=False,
        max_sequence_length=Recipe.prompt_tokens,
        output_type="np",
    ).images
    return [np.rint(picture * 255).astype(np.uint8) for picture in pictures]


def score(
    folder: Path, count: int, steps: int, *, guidance: float = GUIDANCE, batch: int = 32
) -> dict[str, Any]:
    """Return the share of correct pictures, by arrangement too, and the commonest failures."""
    pipeline = load(folder)

    def make(prompts: list[str], first: int) -> list[Picture]:
        return generate(pipeline, prompts, steps=steps, guidance=guidance, seed=first)

    def judge(picture: Picture, scene: Scene) -> Verdict:
        result = check(picture, scene)
        return Verdict(scene.arrangement, result.correct, result.reason.split(";")[0])

    return shares(list(held_out(count)), make, judge, batch=batch)


def main() -> None:
    args = scoring_parser(__doc__, STEPS, GUIDANCE).parse_args()
    print(json.dumps(score(args.folder, args.count, args.steps, guidance=args.guidance), indent=1))


if __name__ == "__main__":
    main()
