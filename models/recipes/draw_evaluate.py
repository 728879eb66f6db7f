"""How well a folder draws what no training has shown it: diffusers draws, `draw_check` judges.

python models/recipes/draw_evaluate.py models/pocket-draw --count 200
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
from diffusers import PixArtSigmaPipeline

from draw_check import check
from draw_data import held_out
from draw_recipe import Recipe
from world_pictures import SIZE, Picture

GUIDANCE, STEPS = Recipe.guidance, Recipe.denoising_steps


def load(folder: Path) -> PixArtSigmaPipeline:
    pipeline = PixArtSigmaPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(
    pipeline: PixArtSigmaPipeline,
    prompts: Sequence[str],
    *,
    steps: int,
    guidance: float = GUIDANCE,
    seed: int = 0,
) -> list[Picture]:
    """A picture of each prompt, with a seed of its own."""
    drawn = pipeline(
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
    return [np.rint(picture * 255).astype(np.uint8) for picture in drawn]


def score(
    folder: Path, count: int, steps: int, *, guidance: float = GUIDANCE, batch: int = 32
) -> dict[str, Any]:
    """The share of pictures that are fully right, by arrangement, and why the others are not."""
    pipeline, asked = load(folder), list(held_out(count))
    right: Counter[str] = Counter()
    due: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for first in range(0, len(asked), batch):
        some = asked[first : first + batch]
        pictures = paint(
            pipeline, [prompt for prompt, _ in some], steps=steps, guidance=guidance, seed=first
        )
        for (_, scene), picture in zip(some, pictures, strict=True):
            verdict = check(picture, scene)
            due[scene.arrangement] += 1
            right[scene.arrangement] += verdict.right
            if not verdict.right:
                wrong[verdict.why.split(";")[0]] += 1
    shares = {kind: round(right[kind] / due[kind], 3) for kind in sorted(due)}
    return {
        "right": round(right.total() / due.total(), 3),
        **shares,
        "wrong": dict(wrong.most_common(8)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="held-out prompts")
    parser.add_argument("--steps", type=int, default=STEPS, help="denoising steps")
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    args = parser.parse_args()
    print(json.dumps(score(args.folder, args.count, args.steps, guidance=args.guidance), indent=1))


if __name__ == "__main__":
    main()
