"""Train pocket-draw: `python models/recipes draw.train --out models/pocket-draw`.

Four stages follow one another. `vae` trains the autoencoder between pictures and latents. `reader`
trains the text encoder to predict the scene of a prompt: a denoiser that learned the words from
pictures alone would need days. `painter` trains the denoiser, a transformer, by flow matching
(Lipman et al., 2023); an auxiliary loss predicts the grid's cells halfway through it. `decoder`
trains the autoencoder's decoder once more: small things need sharp edges, and the latents must stay
as the denoiser knows them. The result is a `PixArtSigmaPipeline` folder for diffusers. Batches are
a function of (seed, step): a run that is stopped (a file `stop` beside the state, or a signal)
continues with `--resume`.

Shapes: B pictures · C channels · H height · W width · L prompt tokens · D size of their vectors · N
things or cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)
from torch import Tensor, nn
from torch.nn import functional
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from recipes.draw.data import MAX_SCENE_THINGS, Example, batch, example
from recipes.draw.recipe import Recipe
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
from recipes.world.pictures import SIZE, Picture
from recipes.world.scenes import ARRANGEMENTS, COLOURS, GRID, SHAPES, SIZES, Scene

STAGES = ("vae", "reader", "painter", "decoder")
_CELL_CLASSES = tuple(
    (*names, NOTHING) for names in (SHAPES, COLOURS, (*SIZES, "None"))
)  # the properties of a thing, or its absence
_SCENE_CLASSES = (*_CELL_CLASSES, (*ARRANGEMENTS, NOTHING))
_SCALING_PICTURES = 64  # pictures that determine the latents' scaling factor


def build_tokenizer(recipe: Recipe) -> T5Tokenizer:
    """Build a unigram tokenizer from the first prompts' words; other words split into letters."""
    prompts = (
        example(recipe.seed, -1 - number).prompt for number in range(recipe.tokenizer_prompts)
    )
    return tokenizer_of(prompts, r"[A-Za-z]+|\d", recipe.prompt_tokens)


def build_scheduler(recipe: Recipe) -> DPMSolverMultistepScheduler:
    """Return a flow-matching scheduler; the timestep is 1000 times the noise level."""
    return DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=recipe.shift
    )


def build_reader(recipe: Recipe, vocabulary: int) -> PromptEncoder:
    """Build the text encoder: T5, with heads that predict the scene's labels."""
    width, heads = recipe.text_width, recipe.text_heads
    text = T5EncoderModel(
        T5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_kv=width // heads,
            d_ff=2 * width,
            num_layers=recipe.text_layers,
            num_heads=heads,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )
    return PromptEncoder(text, width, heads, MAX_SCENE_THINGS, _SCENE_CLASSES)


def scene_labels(scene: Scene) -> list[list[int]]:
    """Return the class numbers of a scene's things, by _SCENE_CLASSES.

    Scattered things have no order and are sorted by kind.
    """
    kinds = [
        (thing.shape, thing.colour, str(thing.size), scene.arrangement) for thing in scene.things
    ]
    if scene.arrangement == "scatter":
        kinds.sort()
    absent = [(NOTHING,) * len(_SCENE_CLASSES)] * (MAX_SCENE_THINGS - len(kinds))
    return numbered([*kinds, *absent], _SCENE_CLASSES)


class Denoiser(nn.Module):
    """Denoise latents; training adds heads that predict the grid's cells halfway.

    This auxiliary loss teaches positions sooner than the denoising loss, in which a cell is small
    (as REPA does with another network's features: Yu et al., 2024).
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width = recipe.heads * recipe.head_dim
        self.denoiser = PixArtTransformer2DModel(
            sample_size=SIZE // 2 ** (len(recipe.channels) - 1),
            num_layers=recipe.layers,
            patch_size=2,
            attention_head_dim=recipe.head_dim,
            num_attention_heads=recipe.heads,
            in_channels=recipe.latents,
            out_channels=recipe.latents,
            cross_attention_dim=width,
            caption_channels=recipe.text_width,
        )
        self.halfway = self.denoiser.transformer_blocks[recipe.layers // 2]
        self.heads = nn.ModuleList([nn.Linear(width, len(names)) for names in _CELL_CLASSES])

    def forward(
        self, noisy_BCHW: Tensor, sigma_B: Tensor, hidden_BLD: Tensor, mask_BL: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return velocities `[B, C, H, W]` from picture to noise, and logits of the cells' labels.

        sigma_B: noise levels, 0 to 1. The logits are `[B, N, classes]` for each entry of
        _CELL_CLASSES.
        """
        tokens: list[Tensor] = []
        with self.halfway.register_forward_hook(lambda *call: tokens.append(call[-1])):
            direction_BCHW = self.denoiser(
                noisy_BCHW,
                encoder_hidden_states=hidden_BLD,
                encoder_attention_mask=mask_BL,
                timestep=sigma_B * 1000,
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ).sample
        (tokens_BND,) = tokens
        grid = tokens_BND.transpose(1, 2).unflatten(2, [size // 2 for size in noisy_BCHW.shape[2:]])
        cells_BND = functional.adaptive_avg_pool2d(grid, GRID).flatten(2).transpose(1, 2)
        return direction_BCHW, [head(cells_BND) for head in self.heads]


def cell_labels(scene: Scene) -> list[list[int]]:
    """Return the class numbers of the grid's cells, row by row, by _CELL_CLASSES."""
    properties = {
        (thing.row, thing.column): (thing.shape, thing.colour, str(thing.size))
        for thing in scene.things
    }
    absent = (NOTHING,) * len(_CELL_CLASSES)
    cells = (properties.get(divmod(cell, GRID), absent) for cell in range(GRID * GRID))
    return numbered(cells, _CELL_CLASSES)


class Model(nn.Module):
    """Hold everything that is trained; the initial weights depend on the seed alone."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.tokenizer = build_tokenizer(recipe)
        blocks = len(recipe.channels)
        self.vae = AutoencoderKL(
            block_out_channels=recipe.channels,
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
            layers_per_block=1,
            latent_channels=recipe.latents,
            norm_num_groups=recipe.norm_groups,
            sample_size=SIZE,
        )
        self.decoder = nn.ModuleList([self.vae.post_quant_conv, self.vae.decoder])
        self.reader = build_reader(recipe, len(self.tokenizer))
        self.painter = Denoiser(recipe)

    @torch.no_grad()
    def set_scaling_factor(self, pictures: Sequence[Picture]) -> None:
        """Set the latents' scaling factor, which gives them a variance of one."""
        latents = self.vae.encode(tensor(pictures)).latent_dist.mean
        self.vae.register_to_config(scaling_factor=1 / float(latents.std()))

    def save(self, out: Path) -> None:
        """Write the pipeline in float16, with motet-diffusion's generation defaults."""
        pipeline = PixArtSigmaPipeline(
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
        }
        save_pipeline(pipeline, out, defaults)


def tensor(pictures: Sequence[Picture]) -> Tensor:
    """Convert pictures to `[B, 3, H, W]` from -1 to 1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


class Trainer(StageTraining[list[Example], float]):
    """Train the part of the model that belongs to one stage."""

    recipe: Recipe
    model: Model

    def batches(self) -> Iterator[list[Example]]:
        """Yield the batches that are left."""
        for step in range(self.step, self.schedule.steps):
            yield batch(self.recipe.seed, step, self.stage.batch)

    def train_step(self, batch: list[Example]) -> float:
        """Run one update and return its loss."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        losses = {
            "reader": self.prompt_loss,
            "painter": self.denoising_loss,
            "vae": self.autoencoder_loss,
            "decoder": self.autoencoder_loss,
        }
        loss = losses[self.name](batch, generator)
        loss.backward()
        self.update()
        return float(loss.detach())

    def autoencoder_loss(self, batch: Sequence[Example], generator: torch.Generator) -> Tensor:
        """Return the reconstruction error and the weighted KL divergence of the latents."""
        pictures = tensor([one.picture for one in batch])
        latents = self.model.vae.encode(pictures).latent_dist
        decoded = self.model.vae.decode(latents.sample(generator)).sample
        error = reconstruction_error(decoded, pictures, self.recipe.thing_weight)
        return error + self.recipe.kl_weight * latents.kl().mean() / latents.mean[0].numel()

    def prompt_loss(self, batch: Sequence[Example], generator: torch.Generator) -> Tensor:
        """Return the loss of the scene labels predicted from prompts."""
        hidden, mask = self.encode_prompts([one.prompt for one in batch])
        logits = self.model.reader.label_logits(hidden, mask)
        return label_loss(logits, torch.tensor([scene_labels(one.scene) for one in batch]))

    def encode_prompts(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Encode prompts to `[B, L, D]` and their mask `[B, L]`."""
        length = self.recipe.prompt_tokens
        ids = self.model.tokenizer(
            prompts, padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        return self.model.reader(ids.input_ids, ids.attention_mask), ids.attention_mask

    def denoising_loss(self, batch: Sequence[Example], generator: torch.Generator) -> Tensor:
        """Return the velocity's error at random noise levels, and the weighted cell label loss."""
        with torch.no_grad():
            latents = self.model.vae.encode(tensor([one.picture for one in batch])).latent_dist.mean
        latents = latents * self.model.vae.config.scaling_factor
        noise = torch.randn(latents.shape, generator=generator)
        sigma = noise_levels(len(batch), self.recipe.shift, generator)
        kept = torch.rand(len(batch), generator=generator) >= self.recipe.prompt_dropout
        hidden, mask = self.encode_prompts(
            [one.prompt if keep else "" for one, keep in zip(batch, kept.tolist(), strict=True)]
        )
        share = sigma[:, None, None, None]
        direction, logits = self.model.painter(
            (1 - share) * latents + share * noise, sigma, hidden, mask
        )
        labels = label_loss(logits, torch.tensor([cell_labels(one.scene) for one in batch]))
        return functional.mse_loss(direction, noise - latents) + self.recipe.label_weight * labels

    def progress(self, reports: Sequence[float], seconds: float) -> str:
        """Format the stage, step, mean loss and pictures per second."""
        return progress_line(self, reports, seconds, "pictures")


def train(
    recipe: Recipe, state: Path, *, steps: dict[str, int], resume: bool, log: int = 50
) -> Model:
    """Train all stages, each with its own state beside `state`; complete ones are only loaded."""
    model = Model(recipe)

    def ended(stage: str) -> None:
        if stage == "vae":
            model.vae.eval()
            model.set_scaling_factor(
                [example(recipe.seed, number).picture for number in range(_SCALING_PICTURES)]
            )

    trainers = {
        stage: partial(Trainer, recipe, model, stage, steps=steps.get(stage, 0)) for stage in STAGES
    }
    return train_stages(model, trainers, state, resume=resume, every=240.0, log=log, ended=ended)


def main() -> None:
    args, steps = parsed(stage_parser(__doc__, STAGES, "pocket-draw", Recipe.seed), STAGES)
    train(Recipe(seed=args.seed), args.state, steps=steps, resume=args.resume).save(args.out)


if __name__ == "__main__":
    main()
