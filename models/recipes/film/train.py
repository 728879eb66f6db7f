"""Train pocket-film: `python models/recipes film.train --out models/pocket-film`.

Four stages follow one another, as for pocket-draw. `vae` trains the autoencoder between films and
latents, on crowded films. `reader` trains the text encoder to predict what a prompt says. `painter`
trains the denoiser, a transformer, by flow matching (Lipman et al., 2023); an auxiliary loss
predicts what is in each cell halfway through it. `decoder` trains the autoencoder's decoder once
more: the latents stay as the denoiser knows them. The result is a `WanPipeline` folder for
diffusers. Batches are a function of (seed, step): a run that is stopped (a file `stop` beside the
state, or a signal) continues with `--resume`. Passes compute in bfloat16 where a device has
instructions for it, parameters are float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipes.film.autoencoder import decode, encode, time_kernels
from recipes.film.batches import (
    FilmBatch,
    PromptBatch,
    crowded_films,
    film_batch,
    prompt_batch,
    token_ids,
)
from recipes.film.model import Model, tensor
from recipes.film.recipe import Recipe
from recipes.film.scenes import FRAMES
from recipes.training.diffusion import (
    label_loss,
    noise_levels,
    parsed,
    progress_line,
    reconstruction_error,
    stage_parser,
    train_stages,
)
from recipes.training.loop import Batch, StageTraining, computes_in_half
from recipes.training.prefetch import prefetched
from recipes.world.pictures import SIZE

STAGES = ("picture", "vae", "reader", "painter", "decoder")
_SCALING_FILMS = 64  # films that determine the latents' mean and deviation
_CHUNK = 50  # films encoded at once


class Trainer(StageTraining[Batch, float]):
    """Train the part of the model that belongs to one stage.

    workers: processes that make its batches ahead.
    """

    recipe: Recipe
    model: Model

    def __init__(
        self, recipe: Recipe, model: Model, stage: str, *, steps: int = 0, workers: int = 0
    ) -> None:
        self.workers = workers
        super().__init__(recipe, model, stage, steps=steps)
        self.half = computes_in_half(self.device)

    def train_step(self, batch: Batch) -> float:
        """Run one update and return its loss."""
        generator = torch.Generator(self.device)
        generator.manual_seed(self.recipe.seed * 1_000_003 + self.step)
        with self.autocast(), sdpa_kernel(self.attention()):
            loss = self.loss(batch, generator)
        loss.backward()
        self.update()
        return float(loss.detach())

    def attention(self) -> list[SDPBackend]:
        """Return how attention is computed: in parts on a CPU, where it takes less time so."""
        on_cpu = self.device.type == "cpu"
        return [SDPBackend.MATH] if on_cpu else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    @abstractmethod
    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Return the loss of a batch."""

    def progress(self, reports: Sequence[float], seconds: float) -> str:
        """Format the stage, step, mean loss and films per second."""
        return progress_line(self, reports, seconds, "films")


class AutoencoderTrainer(Trainer[Tensor]):
    """Train the autoencoder on films, on pictures only in stage `picture`, or its decoder alone."""

    def __init__(
        self, recipe: Recipe, model: Model, stage: str, *, steps: int = 0, workers: int = 0
    ) -> None:
        for kernel in time_kernels(model.vae):
            kernel.requires_grad_(stage != "picture")
        super().__init__(recipe, model, stage, steps=steps, workers=workers)

    def batches(self) -> Iterable[Tensor]:
        """Return the films of the steps that are left."""
        frames = 1 if self.name == "picture" else FRAMES
        make = partial(crowded_films, self.recipe, size=self.stage.batch, frames=frames)
        return prefetched(make, self.steps_left, workers=self.workers)

    def loss(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        """Return the reconstruction error and the weighted KL divergence of the latents."""
        films = tensor(batch.to(self.device))
        if self.name == "vae":
            place = torch.Generator().manual_seed(self.step)
            top, left = torch.randint(SIZE - self.recipe.crop + 1, (2,), generator=place).tolist()
            films = films[..., top : top + self.recipe.crop, left : left + self.recipe.crop]
        mean, logvar = encode(self.model.vae, films)
        mean, logvar = mean.float(), logvar.float().clamp(-30, 20)
        noise = torch.randn(mean.shape, generator=generator, device=self.device)
        spread = (logvar / 2).exp() if self.name != "decoder" else self.denoised_spread(mean)
        decoded = decode(self.model.vae, mean + spread * noise).float()
        error = reconstruction_error(
            decoded, films, self.recipe.thing_weight, is_balanced=self.name == "decoder"
        )
        divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        return error + self.recipe.kl_weight * divergence

    def denoised_spread(self, latents: Tensor) -> Tensor:
        """Return the deviation by which the denoiser's latents may be off, per channel."""
        spread = latents.new_tensor(self.model.vae.config.latents_std)[:, None, None, None]
        return self.recipe.latent_error * spread


class ReaderTrainer(Trainer[PromptBatch]):
    """Train the text encoder to predict what a prompt says."""

    def batches(self) -> Iterable[PromptBatch]:
        """Return the prompts of the steps that are left."""
        make = partial(prompt_batch, self.recipe, self.model.tokenizer, size=self.stage.batch)
        return prefetched(make, self.steps_left, workers=self.workers)

    def loss(self, batch: PromptBatch, generator: torch.Generator) -> Tensor:
        """Return the loss of the labels predicted from the tokens of prompts."""
        hidden = self.model.encode_prompts(batch.ids.to(self.device))
        return label_loss(self.model.reader.label_logits(hidden), batch.labels.to(self.device))


class PainterTrainer(Trainer[Tensor]):
    """Train the denoiser on encoded films, each taken as often as the square of its number of things.

    Films of one thing are learnt first: so those of three get their share.
    """

    def batches(self) -> Iterable[Tensor]:
        """Encode the films, and yield the numbers of those of each step that is left."""
        self.pool = encoded_films(self.model, self.autocast, self.device, self.workers)
        self.nothing = token_ids(self.recipe, self.model.tokenizer, [""]).to(self.device)
        for step in self.steps_left:
            generator = torch.Generator(self.device).manual_seed(self.recipe.seed + step)
            yield (self.pool.things.float() ** 2).multinomial(
                self.stage.batch, replacement=True, generator=generator
            )

    def loss(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        """Return the velocity's error at random noise levels, and the weighted cell label loss."""
        pool, count = self.pool, len(batch)
        latents = pool.films[batch].float()
        noise = torch.randn(latents.shape, generator=generator, device=self.device)
        sigma = noise_levels(count, self.recipe.training_shift, generator)
        wording = torch.randint(
            self.recipe.wordings, (count,), generator=generator, device=self.device
        )
        kept = torch.rand(count, generator=generator, device=self.device)
        ids = torch.where(
            kept[:, None] >= self.recipe.prompt_dropout, pool.ids[batch, wording], self.nothing
        )
        with torch.no_grad():
            hidden = self.model.encode_prompts(ids)
        share = sigma[:, None, None, None, None]
        velocity, logits = self.model.painter((1 - share) * latents + share * noise, sigma, hidden)
        error = functional.mse_loss(velocity.float(), noise - latents)
        return error + self.recipe.label_weight * label_loss(logits, pool.labels[batch])


@torch.no_grad()
def encoded_films(
    model: Model, autocast: Callable[[], torch.autocast], device: torch.device, workers: int
) -> FilmBatch:
    """Return all of the recipe's films on a device, as the latents that the denoiser sees."""
    recipe = model.recipe
    make = partial(film_batch, recipe, model.tokenizer, size=_CHUNK)
    parts = []
    for part in prefetched(make, range(0, recipe.pool, _CHUNK), workers=workers):
        with autocast():
            latents = encode(model.vae, tensor(part.films.to(device)))[0]
        parts.append(part._replace(films=model.scaled(latents).half()))
    return FilmBatch(*(torch.cat(column).to(device) for column in zip(*parts, strict=True)))


_TRAINERS: dict[str, type[Trainer]] = {"reader": ReaderTrainer, "painter": PainterTrainer}


def trainer_of(
    recipe: Recipe, model: Model, stage: str, *, steps: int = 0, workers: int = 0
) -> Trainer:
    """Return the trainer of a stage."""
    kind = _TRAINERS.get(stage, AutoencoderTrainer)
    return kind(recipe, model, stage, steps=steps, workers=workers)


def train(
    recipe: Recipe,
    state: Path,
    *,
    steps: dict[str, int],
    resume: bool,
    seconds: Mapping[str, float] = MappingProxyType({}),
    stages: Sequence[str] = STAGES,
    compiled: bool = False,
    device: str = "cpu",
    workers: int = 0,
    log: int = 25,
    init: Path | None = None,
) -> Model:
    """Train stages, each with its own state beside `state`; the others and complete ones are loaded.

    init: folder whose weights it begins with. seconds: of stages that time bounds. workers: processes
    that make the batches ahead.
    """
    model = Model(recipe)
    if init is not None:
        model.load(init)
    model.to(device)
    if compiled:
        for block in model.painter.denoiser.blocks:
            block.compile()

    def ended(stage: str) -> None:
        if stage == "vae" and (init is None or stage in stages):  # else its scaling stays
            films = film_batch(recipe, model.tokenizer, 0, _SCALING_FILMS).films
            model.set_scaling(films.to(device))

    trainers = {
        stage: partial(trainer_of, recipe, model, stage, steps=steps.get(stage, 0), workers=workers)
        for stage in STAGES
    }
    return train_stages(
        model,
        trainers,
        state,
        resume=resume,
        only=stages,
        seconds=seconds,
        every=120.0,
        log=log,
        ended=ended,
    )


def main() -> None:
    parser = stage_parser(__doc__, STAGES, "pocket-film", Recipe.seed)
    parser.add_argument("--init", type=Path, help="checkpoint folder to begin with")
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    parser.add_argument("--device", default="cpu", help="where it is trained, such as cuda")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that make the batches ahead"
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=STAGES,
        help="train these alone; of the others the states are loaded",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        nargs="+",
        default=(),
        help="bound each of --stages by time, in their order, in place of its steps",
    )
    args, steps = parsed(parser, STAGES)
    if args.seconds and len(args.seconds) != len(args.stages):
        parser.error(f"--seconds {args.seconds}: give one number for each of --stages")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    model = train(
        Recipe(seed=args.seed),
        args.state,
        steps=steps,
        resume=args.resume,
        seconds=dict(zip(args.stages, args.seconds, strict=False)),
        stages=args.stages,
        compiled=args.compile,
        init=args.init,
        device=args.device,
        workers=args.workers,
    )
    model.save(args.out)


if __name__ == "__main__":
    main()
