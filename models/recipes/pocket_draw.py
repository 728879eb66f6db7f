"""Train the pocket-draw model: `python models/recipes/pocket_draw.py --out models/pocket-draw`.

Four trainings, one after another. The *autoencoder* makes latents of pictures and pictures of latents. The *reader*
makes vectors of a prompt, of which it can be told what the scene holds: a painter that had to learn the words from
pictures alone would be at it for days. The *painter*, a transformer, turns noise into latents of what those vectors say
(flow matching: Lipman et al., 2023); halfway through it, it can be told what it is about to put where. The *decoder* is
that of the autoencoder, once more alone: small things need sharp edges, and the latents that the painter knows must
stay. The folder is a `PixArtSigmaPipeline` that diffusers loads by itself. Batches are a function of (seed, step): a
run that is stopped (a file `stop` beside the state, or a signal) goes on with `--resume`.

Shapes: B pictures · C channels · H height · W width · L tokens of a prompt · D numbers of its vectors.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
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

from draw_data import MOST_THINGS, Example, batch, example
from draw_recipe import Recipe
from training import Stage, Training, end_on_sigterm, readable
from world import ARRANGEMENTS, COLOURS, GRID, SHAPES, SIZES, Scene
from world_pictures import GROUND, SIZE, Picture

STAGES = ("vae", "reader", "painter", "decoder")
_MARKS = ("<pad>", "</s>", "<unk>")
_LETTER = -15.0  # logarithm of a letter's probability: any word is likelier than its letters
_GROUND = (
    2 * GROUND[0] / 255 - 1
)  # its darkest grey, from -1 to 1: what is darker in a channel is of a thing
_NOTHING = "nothing"
_KINDS = tuple(
    (*names, _NOTHING) for names in (SHAPES, COLOURS, (*SIZES, "None"))
)  # what a thing is, or none
_TOLD = (*_KINDS, (*ARRANGEMENTS, _NOTHING))
_MEASURED = 64  # pictures whose latents tell their scale


def build_tokenizer(recipe: Recipe) -> T5Tokenizer:
    """The words of the first prompts, the likelier the more often they occur; other words fall into letters."""
    prompts = [
        example(recipe.seed, -1 - number).prompt for number in range(recipe.tokenizer_prompts)
    ]
    counts = Counter(word for prompt in prompts for word in re.findall(r"[A-Za-z]+|\d", prompt))
    words = [
        (f"▁{word}", math.log(count / counts.total())) for word, count in sorted(counts.items())
    ]
    letters = [(letter, _LETTER) for letter in ("▁", *map(chr, range(33, 127)))]
    vocabulary = [*((mark, 0.0) for mark in _MARKS), *letters, *words]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=recipe.prompt_tokens)


def build_scheduler(recipe: Recipe) -> DPMSolverMultistepScheduler:
    """For directions from the picture to the noise; a step's time is a thousand times its share of noise."""
    return DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=recipe.shift
    )


class Reader(nn.Module):
    """A text encoder, and what tells the scene by its vectors: that is left out of the folder."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        super().__init__()
        width, heads = recipe.text_width, recipe.text_heads
        self.text = T5EncoderModel(
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
        self.places = nn.Embedding(MOST_THINGS, width)
        self.look = nn.MultiheadAttention(width, heads, batch_first=True)
        self.told = nn.ModuleList([nn.Linear(width, len(names)) for names in _TOLD])

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """`[B, L, D]`."""
        said: Tensor = self.text(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        return said

    def tell(self, said_BLD: Tensor, mask_BL: Tensor) -> list[Tensor]:
        """Logits `[B, MOST_THINGS, names]` of each of _TOLD: what the first thing is, the second, and so on."""
        asked_BND = self.places.weight.expand(len(said_BLD), -1, -1)
        seen_BND = self.look(
            asked_BND, said_BLD, said_BLD, key_padding_mask=mask_BL == 0, need_weights=False
        )[0]
        return [told(seen_BND) for told in self.told]


def told(scene: Scene) -> list[list[int]]:
    """What `Reader.tell` should say, by _TOLD. Scattered things have no order: they are told by their kinds."""
    kinds = [
        (thing.shape, thing.colour, str(thing.size), scene.arrangement) for thing in scene.things
    ]
    if scene.arrangement == "scatter":
        kinds.sort()
    rows = [*kinds, *[(_NOTHING,) * len(_TOLD)] * (MOST_THINGS - len(kinds))]
    return [[names.index(row[place]) for row in rows] for place, names in enumerate(_TOLD)]


class Painter(nn.Module):
    """A denoiser, and what tells the grid by its tokens halfway: that is left out of the folder.

    What stands in a cell is told to it sooner by such a loss than by that of the picture, in which a cell is little
    (as in REPA: Yu et al., 2024, whose tokens are told what another network sees)."""

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
        self.told = nn.ModuleList([nn.Linear(width, len(names)) for names in _KINDS])

    def forward(
        self, noisy_BCHW: Tensor, sigma_B: Tensor, said_BLD: Tensor, mask_BL: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Directions `[B, C, H, W]` from pictures to noise, and logits `[B, cells, names]` of each of _KINDS.

        `sigma_B`: the share of noise, 0 to 1."""
        tokens: list[Tensor] = []
        with self.halfway.register_forward_hook(lambda *made: tokens.append(made[-1])):
            direction_BCHW = self.denoiser(
                noisy_BCHW,
                encoder_hidden_states=said_BLD,
                encoder_attention_mask=mask_BL,
                timestep=sigma_B * 1000,
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ).sample
        (tokens_BND,) = tokens
        grid = tokens_BND.transpose(1, 2).unflatten(2, [size // 2 for size in noisy_BCHW.shape[2:]])
        cells_BND = functional.adaptive_avg_pool2d(grid, GRID).flatten(2).transpose(1, 2)
        return direction_BCHW, [told(cells_BND) for told in self.told]


def seen(scene: Scene) -> list[list[int]]:
    """What `Painter` should tell of the grid's cells, row by row, by _KINDS."""
    stand = {
        (thing.row, thing.column): (thing.shape, thing.colour, str(thing.size))
        for thing in scene.things
    }
    cells = [
        stand.get(divmod(cell, GRID), (_NOTHING,) * len(_KINDS)) for cell in range(GRID * GRID)
    ]
    return [[names.index(cell[place]) for cell in cells] for place, names in enumerate(_KINDS)]


class Model(nn.Module):
    """All that is learnt; its initialization depends on the seed alone."""

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
        self.reader = Reader(recipe, len(self.tokenizer))
        self.painter = Painter(recipe)

    @torch.no_grad()
    def measure(self, pictures: Sequence[Picture]) -> None:
        """Note the latents' scale, by which they get a variance of one."""
        latents = self.vae.encode(tensor(pictures)).latent_dist.mean
        self.vae.register_to_config(scaling_factor=1 / float(latents.std()))

    def save(self, out: Path) -> None:
        """The folder, in half precision, and beside what diffusers saves, how motet-diffusion is to draw with it."""
        pipeline = PixArtSigmaPipeline(
            tokenizer=self.tokenizer,
            text_encoder=self.reader.text,
            vae=self.vae,
            transformer=self.painter.denoiser,
            scheduler=build_scheduler(self.recipe),
        )
        pipeline.to(torch.float16)
        pipeline.save_pretrained(out)
        pipeline.to(torch.float32)
        best = {
            "num_inference_steps": self.recipe.denoising_steps,
            "guidance_scale": self.recipe.guidance,
        }
        best["max_sequence_length"] = self.recipe.prompt_tokens
        (out / "generation_config.json").write_text(json.dumps(best, indent=2) + "\n")
        for folder in (out, *(path for path in out.iterdir() if path.is_dir())):
            readable(folder)


def tensor(pictures: Sequence[Picture]) -> Tensor:
    """`[B, 3, H, W]` from -1 to 1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def unlikely(logits: Sequence[Tensor], due: Sequence[list[list[int]]]) -> Tensor:
    """Mean cross-entropy, summed over properties: logits `[B, things, names]` of each, and what holds of each scene."""
    apart = [
        functional.cross_entropy(of_all.flatten(0, 1), torch.tensor(rows).flatten())
        for of_all, rows in zip(logits, zip(*due, strict=True), strict=True)
    ]
    return torch.stack(apart).sum()


class Trainer(Training[list[Example], float]):
    """One stage of a run: it trains its part of the model."""

    saved_as = "part"

    def __init__(self, recipe: Recipe, model: Model, stage: str, *, steps: int = 0) -> None:
        self.recipe, self.model, self.name = recipe, model, stage
        self.stage: Stage = getattr(recipe, stage)
        schedule = self.stage.schedule(steps)
        super().__init__(
            getattr(model, stage),
            schedule,
            matrix_lr=self.stage.matrix_lr,
            other_lr=self.stage.other_lr,
        )

    def batches(self) -> Iterator[list[Example]]:
        for step in range(self.step, self.schedule.steps):
            yield batch(self.recipe.seed, step, self.stage.batch)

    def train_step(self, batch: list[Example]) -> float:
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        losses = {
            "reader": self.reading,
            "painter": self.painting,
            "vae": self.coding,
            "decoder": self.coding,
        }
        loss = losses[self.name](batch, generator)
        loss.backward()
        self.update()
        return float(loss.detach())

    def coding(self, batch: Sequence[Example], generator: torch.Generator) -> Tensor:
        """How far pictures are from what comes back of them, and latents from a normal distribution."""
        pictures = tensor([one.picture for one in batch])
        latents = self.model.vae.encode(pictures).latent_dist
        back = self.model.vae.decode(latents.sample(generator)).sample
        of_things = pictures.amin(dim=1, keepdim=True) < _GROUND
        apart = (back - pictures).abs() + (back - pictures) ** 2
        apart = (apart * (1 + self.recipe.emphasis * of_things)).mean()
        return apart + self.recipe.divergence * latents.kl().mean() / latents.mean[0].numel()

    def reading(self, batch: Sequence[Example], generator: torch.Generator) -> Tensor:
        """How unlikely the scenes are by what is read of the prompts."""
        said, mask = self.said([one.prompt for one in batch])
        return unlikely(self.model.reader.tell(said, mask), [told(one.scene) for one in batch])

    def said(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """What the reader makes of prompts, `[B, L, D]`, and their mask `[B, L]`."""
        length = self.recipe.prompt_tokens
        ids = self.model.tokenizer(
            prompts, padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        return self.model.reader(ids.input_ids, ids.attention_mask), ids.attention_mask

    def painting(self, batch: Sequence[Example], generator: torch.Generator) -> Tensor:
        """How far directions are from those from pictures to noise, at random shares of it, and what is told amiss."""
        with torch.no_grad():
            latents = self.model.vae.encode(tensor([one.picture for one in batch])).latent_dist.mean
        latents = latents * self.model.vae.config.scaling_factor
        noise = torch.randn(latents.shape, generator=generator)
        sigma = torch.sigmoid(torch.randn(len(batch), generator=generator))
        sigma = self.recipe.shift * sigma / (1 + (self.recipe.shift - 1) * sigma)
        kept = torch.rand(len(batch), generator=generator) >= self.recipe.dropped
        said, mask = self.said(
            [one.prompt if keep else "" for one, keep in zip(batch, kept.tolist(), strict=True)]
        )
        share = sigma[:, None, None, None]
        found, cells = self.model.painter((1 - share) * latents + share * noise, sigma, said, mask)
        amiss = unlikely(cells, [seen(one.scene) for one in batch])
        return functional.mse_loss(found, noise - latents) + self.recipe.telling * amiss

    def progress(self, reports: Sequence[float], seconds: float) -> str:
        """Stage, step, mean loss, pictures per second."""
        rate = len(reports) * self.stage.batch / seconds
        said = {
            "stage": self.name,
            "step": self.step,
            "loss": round(sum(reports) / len(reports), 4),
        }
        return json.dumps(said | {"pictures_per_s": round(rate, 1)})


def train(
    recipe: Recipe, state: Path, *, steps: dict[str, int], resume: bool, log: int = 50
) -> Model:
    """All stages, each with a state of its own beside `state`; those that are complete are only read."""
    model = Model(recipe)
    for stage in STAGES:
        trainer = Trainer(recipe, model, stage, steps=steps.get(stage, 0))
        model.requires_grad_(False)
        trainer.learnt.requires_grad_(True)
        own = state.with_name(f"{stage}.pt")
        if resume and own.exists():
            trainer.load_state(own)
        trainer.run(own, every=240.0, log=log)
        if stage == "vae":
            model.vae.eval()
            model.measure([example(recipe.seed, number).picture for number in range(_MEASURED)])
        if trainer.step < trainer.schedule.steps:
            break
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-draw/state.pt"))
    parser.add_argument(
        "--resume", action="store_true", help="go on from the states beside --state"
    )
    for stage in STAGES:
        parser.add_argument(
            f"--{stage}-steps", type=int, default=0, help="0: as many as the recipe says"
        )
    args = parser.parse_args()
    end_on_sigterm()
    steps = {stage: getattr(args, f"{stage}_steps") for stage in STAGES}
    train(Recipe(seed=args.seed), args.state, steps=steps, resume=args.resume).save(args.out)


if __name__ == "__main__":
    main()
