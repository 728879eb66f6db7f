"""Build pocket-film's parts, with the heads that training adds, and write the pipeline's folder.

Shapes: B films · C channels · F frames · H height · W width · L prompt tokens · D size of their
vectors · N things or cells.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor, nn
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from recipes.film.autoencoder import encode, start_still
from recipes.film.batches import CLASSES, SCALE, TOKEN_CLASSES
from recipes.film.data import prompted
from recipes.film.recipe import Recipe
from recipes.film.scenes import FRAME_RATE, FRAMES
from recipes.training.diffusion import save_pipeline, tokenizer_of
from recipes.world.pictures import CELL, SIZE

_FIRST_LOGVAR = -6.0  # of the latents, before training


def build_tokenizer(recipe: Recipe) -> T5Tokenizer:
    """Build a unigram tokenizer from the first prompts' words; other words split into letters."""
    prompts = (prompted(recipe.seed, -1 - number)[0] for number in range(recipe.tokenizer_prompts))
    return tokenizer_of(prompts, r"[A-Za-z]+", recipe.prompt_tokens)


def build_scheduler(recipe: Recipe) -> FlowMatchEulerDiscreteScheduler:
    """Return a flow-matching scheduler; the timestep is 1000 times the noise level.

    Each step adds new noise to its estimate of the film, so that later steps can still change how
    many things there are: half again as many films are right as along the path of one noise.
    """
    return FlowMatchEulerDiscreteScheduler(shift=recipe.shift, stochastic_sampling=True)


class FilmPromptEncoder(nn.Module):
    """Encode prompts with UMT5; training adds heads that predict what each token's clause says.

    Every vector of a clause then tells its thing's shape, colour and motion together, and its place
    among the prompt's things: the denoiser need not find out which words belong to one another.
    """

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        super().__init__()
        width, heads = recipe.text_width, recipe.text_heads
        self.text = UMT5EncoderModel(
            UMT5Config(
                vocab_size=vocabulary,
                d_model=width,
                d_kv=width // heads,
                d_ff=2 * width,
                num_layers=recipe.text_layers,
                num_heads=heads,
                dropout_rate=0.0,
            )
        )
        self.heads = nn.ModuleList([nn.Linear(width, len(names)) for names in TOKEN_CLASSES])

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return `[B, L, D]`, zero behind a prompt's end as `WanPipeline` has it."""
        hidden_BLD: Tensor = self.text(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        return hidden_BLD * mask_BL[..., None]

    def label_logits(self, hidden_BLD: Tensor) -> list[Tensor]:
        """Return logits `[B, L, classes]` for each entry of TOKEN_CLASSES."""
        return [head(hidden_BLD) for head in self.heads]


class Denoiser(nn.Module):
    """Denoise latents; training adds heads that predict the cells halfway.

    This auxiliary loss teaches positions sooner than the denoising loss, in which a cell is small
    (as REPA does with another network's features: Yu et al., 2024).
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width = recipe.heads * recipe.head_dim
        self.denoiser = WanTransformer3DModel(
            patch_size=(1, 1, 1),
            num_attention_heads=recipe.heads,
            attention_head_dim=recipe.head_dim,
            in_channels=recipe.latents,
            out_channels=recipe.latents,
            text_dim=recipe.text_width,
            freq_dim=64,
            ffn_dim=recipe.ffn_width,
            num_layers=recipe.layers,
            cross_attn_norm=True,
            rope_max_seq_len=64,
        )
        self.halfway = self.denoiser.blocks[recipe.layers // 2]
        self.heads = nn.ModuleList([nn.Linear(width, len(names)) for names in CLASSES])

    def forward(
        self, noisy_BCFHW: Tensor, sigma_B: Tensor, hidden_BLD: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return velocities `[B, C, F, H, W]` from film to noise, and logits of the cells' labels.

        sigma_B: noise levels, 0 to 1. The logits are `[B, N, classes]` for each entry of CLASSES.
        """
        tokens: list[Tensor] = []
        with self.halfway.register_forward_hook(lambda *call: tokens.append(call[-1])):
            velocity = self.denoiser(noisy_BCFHW, sigma_B * 1000, hidden_BLD, return_dict=False)[0]
        return velocity, [head(tokens[0]) for head in self.heads]


class Model(nn.Module):
    """Hold everything that is trained; the initial weights depend on the seed alone."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.tokenizer = build_tokenizer(recipe)
        pixels = 3 * recipe.patch**2
        self.vae = AutoencoderKLWan(
            base_dim=recipe.encoder_channels,
            decoder_base_dim=recipe.decoder_channels,
            z_dim=recipe.latents,
            dim_mult=list(recipe.multipliers),
            num_res_blocks=1,
            temperal_downsample=[False, True],
            patch_size=recipe.patch,
            in_channels=pixels,
            out_channels=pixels,
            scale_factor_spatial=int(CELL),
            scale_factor_temporal=SCALE,
            latents_mean=[0.0] * recipe.latents,
            latents_std=[1.0] * recipe.latents,
        )
        start_still(self.vae)
        with torch.no_grad():  # else noise drowns the latents for hundreds of steps
            self.vae.quant_conv.bias[recipe.latents :] = _FIRST_LOGVAR
        self.picture = self.vae
        self.decoder = nn.ModuleList([self.vae.post_quant_conv, self.vae.decoder])
        self.reader = FilmPromptEncoder(recipe, len(self.tokenizer))
        self.painter = Denoiser(recipe)

    @torch.no_grad()
    def set_scaling(self, films_BFHW3: Tensor) -> None:
        """Set the latents' mean and deviation per channel, by which the denoiser sees them."""
        latents = encode(self.vae, tensor(films_BFHW3))[0].transpose(0, 1).flatten(1).float()
        self.vae.register_to_config(
            latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist()
        )

    def scaled(self, latents_BCFHW: Tensor) -> Tensor:
        """Return latents as the denoiser sees them."""
        mean, std = (
            latents_BCFHW.new_tensor(values, dtype=torch.float32)[:, None, None, None]
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (latents_BCFHW.float() - mean) / std

    def encode_prompts(self, ids_BL: Tensor) -> Tensor:
        """Encode the tokens of prompts to `[B, L, D]`."""
        hidden_BLD: Tensor = self.reader(ids_BL, (ids_BL != self.tokenizer.pad_token_id).long())
        return hidden_BLD

    def load(self, folder: Path) -> None:
        """Take the weights of a saved pipeline; heads that training adds stay as they are."""
        saved = WanPipeline.from_pretrained(folder, dtype=torch.float32)
        self.vae.load_state_dict(saved.vae.state_dict())
        moments = {name: saved.vae.config[name] for name in ("latents_mean", "latents_std")}
        self.vae.register_to_config(**moments)
        self.reader.text.load_state_dict(saved.text_encoder.state_dict())
        self.painter.denoiser.load_state_dict(saved.transformer.state_dict())

    def save(self, out: Path) -> None:
        """Write the pipeline in float16, with motet-diffusion's generation defaults."""
        pipeline = WanPipeline(
            tokenizer=self.tokenizer,
            text_encoder=self.reader.text,
            vae=self.vae,
            transformer=self.painter.denoiser,
            scheduler=build_scheduler(self.recipe),
        )
        defaults = {
            "num_inference_steps": self.recipe.denoising_steps,
            "guidance_scale": self.recipe.guidance,
            "max_sequence_length": self.recipe.prompt_tokens,
            "frame_rate": FRAME_RATE,
            "num_frames": FRAMES,
            "width": SIZE,
            "height": SIZE,
        }
        save_pipeline(pipeline, out, defaults)


def tensor(films_BFHW3: Tensor) -> Tensor:
    """Convert films in 8 bits to `[B, 3, F, H, W]` from -1 to 1."""
    return films_BFHW3.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
