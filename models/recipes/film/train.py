"""Train pocket-film: `python models/recipes film.train --out models/pocket-film`.

Four stages follow one another, as for pocket-draw. `vae` trains the autoencoder between films and
latents, on crowded films. `reader` trains the text encoder to predict what a prompt says. `painter`
trains the denoiser, a transformer, by flow matching (Lipman et al., 2023); an auxiliary loss
predicts what is in each cell halfway through it. `decoder` trains the autoencoder's decoder once
more: the latents stay as the denoiser knows them. The result is a `WanPipeline` folder for
diffusers. Batches are a function of (seed, step): a run that is stopped (a file `stop` beside the
state, or a signal) continues with `--resume`. Passes compute in bfloat16, parameters are float32.

Shapes: B films · C channels · F frames · H height · W width · L prompt tokens · D size of their
vectors · N things or cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from recipes.film.autoencoder import decode, encode, start_still, time_kernels
from recipes.film.data import Example, crowded_film, example, prompted
from recipes.film.drawing import Film
from recipes.film.recipe import Recipe
from recipes.film.scenes import (
    COLOURS,
    FRAME_RATE,
    FRAMES,
    MAX_THINGS,
    MOTIONS,
    SHAPES,
    Actor,
    prompt,
)
from recipes.training.diffusion import (
    NOTHING,
    PromptEncoder,
    label_loss,
    noise_levels,
    numbered,
    parsed,
    progress_line,
    reconstruction_error,
    save_pipeline,
    stage_parser,
    tokenizer_of,
    train_stages,
)
from recipes.training.loop import StageTraining
from recipes.world.pictures import CELL, SIZE
from recipes.world.scenes import GRID

STAGES = ("picture", "vae", "reader", "painter", "decoder")
_CLASSES = tuple((*names, NOTHING) for names in (SHAPES, COLOURS, MOTIONS))
_SCALING_FILMS = 64  # films that determine the latents' mean and deviation
_FIRST_LOGVAR = -6.0  # of the latents, before training
_SCALE = 2  # frames of a latent, behind the first
_CHUNK = 32  # films encoded at once


def build_tokenizer(recipe: Recipe) -> T5Tokenizer:
    """Build a unigram tokenizer from the first prompts' words; other words split into letters."""
    prompts = (prompted(recipe.seed, -1 - number)[0] for number in range(recipe.tokenizer_prompts))
    return tokenizer_of(prompts, r"[A-Za-z]+", recipe.prompt_tokens)


def build_scheduler(recipe: Recipe) -> UniPCMultistepScheduler:
    """Return a flow-matching scheduler; the timestep is 1000 times the noise level."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=recipe.shift
    )


class FilmPromptEncoder(PromptEncoder):
    """Encode prompts with UMT5; training adds heads that predict what a prompt says."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        width, heads = recipe.text_width, recipe.text_heads
        text = UMT5EncoderModel(
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
        super().__init__(text, width, heads, MAX_THINGS, _CLASSES)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return `[B, L, D]`, zero behind a prompt's end as `WanPipeline` has it."""
        return super().forward(ids_BL, mask_BL) * mask_BL[..., None]


def prompt_labels(actors: Sequence[Actor]) -> list[list[int]]:
    """Return the class numbers of a prompt's things, in order, by _CLASSES."""
    absent = [(NOTHING,) * len(_CLASSES)] * (MAX_THINGS - len(actors))
    return numbered([*actors, *absent], _CLASSES)


def cell_labels(one: Example) -> list[list[int]]:
    """Return the class numbers of each token's cell, by _CLASSES: the thing whose middle is in it."""
    cells: list[tuple[str, ...]] = [(NOTHING,) * len(_CLASSES)] * (latent_frames() * GRID * GRID)
    for actor, course in zip(one.actors, one.courses, strict=True):
        for number in range(latent_frames()):
            x, y = course.at(max(0.0, _SCALE * number - 0.5))
            cells[(number * GRID + int(y // CELL)) * GRID + int(x // CELL)] = actor
    return numbered(cells, _CLASSES)


def latent_frames() -> int:
    """Return the number of latent frames of a film."""
    return (FRAMES - 1) // _SCALE + 1


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
        self.heads = nn.ModuleList([nn.Linear(width, len(names)) for names in _CLASSES])

    def forward(
        self, noisy_BCFHW: Tensor, sigma_B: Tensor, hidden_BLD: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return velocities `[B, C, F, H, W]` from film to noise, and logits of the cells' labels.

        sigma_B: noise levels, 0 to 1. The logits are `[B, N, classes]` for each entry of _CLASSES.
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
            scale_factor_temporal=_SCALE,
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
    def set_scaling(self, films: Sequence[Film]) -> None:
        """Set the latents' mean and deviation per channel, by which the denoiser sees them."""
        latents = encode(self.vae, tensor(films))[0].transpose(0, 1).flatten(1).float()
        self.vae.register_to_config(
            latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist()
        )

    def scaled(self, latents_BCFHW: Tensor) -> Tensor:
        """Return latents as the denoiser sees them."""
        mean, std = (
            torch.tensor(values)[:, None, None, None]
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (latents_BCFHW.float() - mean) / std

    def encode_prompts(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Encode prompts to `[B, L, D]` and their mask `[B, L]`."""
        length = self.recipe.prompt_tokens
        ids = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        return self.reader(ids.input_ids, ids.attention_mask), ids.attention_mask

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


def tensor(films: Sequence[Film]) -> Tensor:
    """Convert films to `[B, 3, F, H, W]` from -1 to 1."""
    return torch.from_numpy(np.stack(films)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


class Pool:
    """Hold encoded films; it grows with the steps, and each step draws from all of it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.latents: list[Tensor] = []
        self.examples: list[Example] = []
        self.weights = torch.empty(0)  # by which films are drawn: the number of their things

    @torch.no_grad()
    def grow(self, count: int) -> None:
        """Encode films until there are `count`."""
        while len(self.latents) < count:
            first = len(self.latents)
            new = [
                example(self.model.recipe.seed, number)
                for number in range(first, min(first + _CHUNK, count))
            ]
            with torch.autocast("cpu", torch.bfloat16):
                latents = encode(self.model.vae, tensor([one.film for one in new]))[0]
            self.latents += self.model.scaled(latents).unbind()
            self.examples += [one._replace(film=one.film[:0].copy()) for one in new]
            counts = torch.tensor([float(len(one.actors)) for one in new])
            self.weights = torch.cat([self.weights, counts])


class Trainer(StageTraining[int, float]):
    """Train the part of the model that belongs to one stage."""

    half = True
    recipe: Recipe
    model: Model

    def __init__(self, recipe: Recipe, model: Model, stage: str, *, steps: int = 0) -> None:
        for kernel in time_kernels(model.vae):
            kernel.requires_grad_(stage != "picture")
        super().__init__(recipe, model, stage, steps=steps)
        self.pool = Pool(model)

    def batches(self) -> Iterator[int]:
        """Yield the steps that are left."""
        yield from range(self.step, self.schedule.steps)

    def train_step(self, batch: int) -> float:
        """Run one update and return its loss."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + batch)
        losses = {
            "reader": self.prompt_loss,
            "painter": self.denoising_loss,
            "picture": self.autoencoder_loss,
            "vae": self.autoencoder_loss,
            "decoder": self.autoencoder_loss,
        }
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            loss = losses[self.name](batch, generator)
        loss.backward()
        self.update()
        return float(loss.detach())

    def autoencoder_loss(self, step: int, generator: torch.Generator) -> Tensor:
        """Return the reconstruction error and the weighted KL divergence of the latents."""
        size = self.stage.batch
        numbers = range(step * size, (step + 1) * size)
        frames = 1 if self.name == "picture" else FRAMES
        films = tensor(
            [crowded_film(self.recipe.seed, n, self.recipe.crowd, frames) for n in numbers]
        )
        if self.name == "vae":
            top, left = torch.randint(SIZE - self.recipe.crop + 1, (2,), generator=generator)
            films = films[..., top : top + self.recipe.crop, left : left + self.recipe.crop]
        mean, logvar = encode(self.model.vae, films)
        mean, logvar = mean.float(), logvar.float().clamp(-30, 20)
        noise = torch.randn(mean.shape, generator=generator)
        decoded = decode(self.model.vae, mean + (logvar / 2).exp() * noise).float()
        error = reconstruction_error(decoded, films, self.recipe.thing_weight)
        divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        return error + self.recipe.kl_weight * divergence

    def prompt_loss(self, step: int, generator: torch.Generator) -> Tensor:
        """Return the loss of the labels predicted from prompts."""
        size = self.stage.batch
        batch = [
            prompted(self.recipe.seed, number) for number in range(step * size, (step + 1) * size)
        ]
        hidden, mask = self.model.encode_prompts([text for text, _ in batch])
        logits = self.model.reader.label_logits(hidden, mask)
        return label_loss(logits, [prompt_labels(actors) for _, actors in batch])

    def denoising_loss(self, step: int, generator: torch.Generator) -> Tensor:
        """Return the velocity's error at random noise levels, and the weighted cell label loss.

        A film is taken as often as it has things: those of one thing are learnt first.
        """
        pool, size = self.pool, self.stage.batch
        pool.grow(self.recipe.pool_start + step * self.recipe.pool_step)
        chosen = pool.weights.multinomial(size, replacement=True, generator=generator).tolist()
        batch = [pool.examples[number] for number in chosen]
        latents = torch.stack([pool.latents[number] for number in chosen])
        noise = torch.randn(latents.shape, generator=generator)
        sigma = noise_levels(size, self.recipe.shift, generator)
        kept = torch.rand(size, generator=generator) >= self.recipe.prompt_dropout
        rng = Random(f"film/{self.recipe.seed}/words/{step}")
        texts = [
            prompt(one.actors, rng) if keep else ""
            for one, keep in zip(batch, kept.tolist(), strict=True)
        ]
        hidden, _ = self.model.encode_prompts(texts)
        share = sigma[:, None, None, None, None]
        velocity, logits = self.model.painter((1 - share) * latents + share * noise, sigma, hidden)
        labels = label_loss(logits, [cell_labels(one) for one in batch])
        error = functional.mse_loss(velocity.float(), noise - latents)
        return error + self.recipe.label_weight * labels

    def progress(self, reports: Sequence[float], seconds: float) -> str:
        """Format the stage, step, mean loss and films per second."""
        return progress_line(self, reports, seconds, "films")


def train(
    recipe: Recipe,
    state: Path,
    *,
    steps: dict[str, int],
    resume: bool,
    compiled: bool = False,
    log: int = 25,
) -> Model:
    """Train all stages, each with its own state beside `state`; complete ones are only loaded."""
    model = Model(recipe)
    if compiled:
        for block in model.painter.denoiser.blocks:
            block.compile()

    def ended(stage: str) -> None:
        if stage == "vae":
            model.set_scaling(
                [example(recipe.seed, number).film for number in range(_SCALING_FILMS)]
            )

    trainers = {
        stage: partial(Trainer, recipe, model, stage, steps=steps.get(stage, 0)) for stage in STAGES
    }
    return train_stages(model, trainers, state, resume=resume, every=120.0, log=log, ended=ended)


def main() -> None:
    parser = stage_parser(__doc__, STAGES, "pocket-film", Recipe.seed)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    args, steps = parsed(parser, STAGES)
    model = train(
        Recipe(seed=args.seed), args.state, steps=steps, resume=args.resume, compiled=args.compile
    )
    model.save(args.out)


if __name__ == "__main__":
    main()
