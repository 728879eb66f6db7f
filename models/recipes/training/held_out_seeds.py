"""Keep evaluation data apart from training data: by seed, and by a hash of the text."""

from __future__ import annotations

from hashlib import blake2b

from recipes.training.errors import RecipeError

HELD_OUT_SEEDS = range(900_000_000, 1_000_000_000)


def check_training_seed(seed: int) -> None:
    """Raise RecipeError for a seed of the held-out range."""
    if seed in HELD_OUT_SEEDS:
        raise RecipeError(
            f"seed={seed} is held out for evaluation: train with one below {HELD_OUT_SEEDS.start}",
            param="seed",
        )


def in_held_out_share(text: str, share: int) -> bool:
    """Return True for one text in `share`, the same ones in every process and for every seed."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % share == 0
