"""Score a pocket-draw folder: diffusers generates held-out prompts, `draw.check` checks them.

python models/recipes draw.evaluate models/pocket-draw --count 200
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

from recipes.draw.check import check
from recipes.draw.data import held_out
from recipes.draw.recipe import Recipe
from recipes.world.pictures import SIZE, Picture

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
    pipeline, prompts = load(folder), list(held_out(count))
    correct: Counter[str] = Counter()
    total: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for first in range(0, len(prompts), batch):
        chunk = prompts[first : first + batch]
        pictures = generate(
            pipeline, [prompt for prompt, _ in chunk], steps=steps, guidance=guidance, seed=first
        )
        for (_, scene), picture in zip(chunk, pictures, strict=True):
            result = check(picture, scene)
            total[scene.arrangement] += 1
            correct[scene.arrangement] += result.correct
            if not result.correct:
                failures[result.reason.split(";")[0]] += 1
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
    print(json.dumps(score(args.folder, args.count, args.steps, guidance=args.guidance), indent=1))


if __name__ == "__main__":
    main()
