"""Define every number that decides the weights of pocket-film."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.training.loop import Stage


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define sizes and training stages.

    Films have 9 frames of 64 pixels a side. A latent stands for 16×16 pixels of two frames (of one
    at the start) and is one token of the denoiser: 5×4×4 tokens.
    """

    seed: int = 31
    # Prompts
    tokenizer_prompts: int = 4000
    prompt_tokens: int = 40  # longer prompts would be cut; none of training's is
    text_width: int = 64
    text_layers: int = 2
    text_heads: int = 4
    # The autoencoder
    patch: int = 4  # pixels of a side that its first layer sees as one
    encoder_channels: int = 32
    decoder_channels: int = 48
    multipliers: tuple[int, ...] = (1, 1, 1)
    latents: int = 32
    kl_weight: float = 1e-4  # of the latents' divergence from a normal distribution
    thing_weight: float = 8.0  # additional loss weight of pixels that show a thing
    crowd: int = 5  # things of a film that the autoencoder learns from
    latent_error: float = 0.08  # of the latents that the last stage decodes, in their deviations
    crop: int = 48  # pixels of a side of what it first sees of them
    # The denoiser
    heads: int = 4
    head_dim: int = 32
    layers: int = 5
    ffn_width: int = 224
    prompt_dropout: float = 0.1  # share of prompts replaced by "", for guidance
    shift: float = 3.0  # of the noise levels of generation towards noise
    training_shift: float = 4.0  # of training's: the layout is decided in much noise
    label_weight: float = 0.25  # of the auxiliary cell label loss
    pool: int = 16_000  # films that the denoiser learns from
    wordings: int = 3  # prompts of each
    # Generation defaults, for `generation_config.json`
    guidance: float = 1.6
    denoising_steps: int = 24
    picture: Stage = Stage(
        steps=1200, batch=16, matrix_lr=None, other_lr=3e-3, kernel_lr=0.02, decay=0.5
    )
    vae: Stage = Stage(
        steps=3600, batch=8, matrix_lr=None, other_lr=2e-3, kernel_lr=0.015, decay=0.5
    )
    reader: Stage = Stage(steps=900, batch=64, matrix_lr=0.01, other_lr=3e-3)
    painter: Stage = Stage(steps=28_000, batch=24, matrix_lr=0.015, other_lr=2e-3, decay=0.6)
    decoder: Stage = Stage(steps=4800, batch=6, matrix_lr=None, other_lr=2e-3, kernel_lr=0.015)
