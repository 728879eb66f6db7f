"""Everything that decides the weights of pocket-draw."""

from __future__ import annotations

from dataclasses import dataclass

from training import Stage


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and stages. Pictures have 64 pixels a side, latents an eighth of that, and the denoiser sees four of them
    as one: 16 tokens, one for each cell of the world's grid."""

    seed: int = 30
    # Prompts
    tokenizer_prompts: int = 4000
    prompt_tokens: int = 64  # longer prompts are cut in training; none of these is
    text_width: int = 128
    text_layers: int = 2
    text_heads: int = 4
    # Pictures into latents
    channels: tuple[int, ...] = (8, 16, 32, 64)
    latents: int = 8
    norm_groups: int = (
        2  # few: a channel that is normalized alone forgets how much of a colour there is
    )
    divergence: float = 1e-4  # weight of the latents' divergence from a normal distribution
    emphasis: float = 8.0  # how much more a thing's pixel counts than one of the ground
    # The denoiser
    heads: int = 6
    head_dim: int = 32
    layers: int = 6
    dropped: float = 0.1  # share of prompts that are left out, for guidance
    shift: float = 3.0  # towards noise, in which it is decided what stands where, of all that is learnt and drawn
    telling: float = 0.25  # weight of what its tokens tell of the cells, halfway
    # How it draws best: `generation_config.json`
    guidance: float = 1.5
    denoising_steps: int = 20
    vae: Stage = Stage(steps=2000, batch=16, matrix_lr=None, other_lr=2e-3)
    reader: Stage = Stage(steps=2000, batch=128, matrix_lr=0.01, other_lr=2e-3)
    painter: Stage = Stage(steps=2800, batch=128, matrix_lr=0.01, other_lr=2e-3)
    decoder: Stage = Stage(steps=1500, batch=16, matrix_lr=None, other_lr=1e-3)
