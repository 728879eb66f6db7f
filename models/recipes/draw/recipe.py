"""Define every number that decides the weights of pocket-draw."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.training.loop import Stage


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define sizes and training stages.

    Pictures have 64 pixels a side, latents an eighth of that. The denoiser patches 2×2 latents into
    one token: 16 tokens, one for each cell of the world's grid.
    """

    seed: int = 30
    # Prompts
    tokenizer_prompts: int = 4000
    prompt_tokens: int = 64  # longer prompts would be cut; none of training's is
    text_width: int = 128
    text_layers: int = 2
    text_heads: int = 4
    # The autoencoder
    channels: tuple[int, ...] = (8, 16, 32, 64)
    latents: int = 8
    norm_groups: int = 2  # few, since normalizing a channel alone removes the amount of a colour
    kl_weight: float = 1e-4  # of the latents' divergence from a normal distribution
    thing_weight: float = 8.0  # additional loss weight of pixels that show a thing
    # The denoiser
    heads: int = 6
    head_dim: int = 32
    layers: int = 6
    prompt_dropout: float = 0.1  # share of prompts replaced by "", for guidance
    shift: float = 3.0  # of noise levels towards noise, where the layout is decided
    label_weight: float = 0.25  # of the auxiliary cell label loss
    # Generation defaults, for `generation_config.json`
    guidance: float = 1.5
    denoising_steps: int = 20
    vae: Stage = Stage(steps=2000, batch=16, matrix_lr=None, other_lr=2e-3)
    reader: Stage = Stage(steps=2000, batch=128, matrix_lr=0.01, other_lr=2e-3)
    painter: Stage = Stage(steps=2800, batch=128, matrix_lr=0.01, other_lr=2e-3)
    decoder: Stage = Stage(steps=1500, batch=16, matrix_lr=None, other_lr=1e-3)
