"""Add vision to pocket-chat: `python models/recipes see.train --words FOLDER --out FOLDER`.

Two stages follow one another. `tower` trains the vision tower and projector to describe each cell
of a picture by embeddings close to the language model's own for the same words. `talk` trains
tower, projector and language model on conversations about pictures, mixed with text-only ones that
preserve the language model. Batches are a function of (seed, step): a run that is stopped (a file
`stop` beside the state, or a signal) continues with `--resume`. All of it is float32.

Shapes: B pictures · T cells · N = B·T · K kinds of things · X hidden size of the language model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from recipes.chat import tokenizer as chat_tokenizer
from recipes.chat.batches import Batch
from recipes.chat.train import token_loss
from recipes.see.batches import CellBatch, PictureBatch, Stream, cell_batch
from recipes.see.data import CELLS, KINDS
from recipes.see.recipe import Recipe
from recipes.training.loop import Stage, Training, exit_on_sigterm, make_readable
from recipes.training.prefetch import on_device, prefetched
from recipes.world.pictures import SIZE
from recipes.world.scenes import GRID

STAGES = ("tower", "talk")
IMAGE_TOKEN = "<image>"


def build_tokenizer(language_model: Path) -> PreTrainedTokenizerFast:
    """Add the image token and this folder's template to the language model's tokenizer."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(language_model)
    tokenizer.add_tokens(
        [AddedToken(IMAGE_TOKEN, special=True, normalized=False)], special_tokens=True
    )
    tokenizer.chat_template = chat_tokenizer.TEMPLATE
    for setting in ("is_local", "local_files_only"):  # of this process, not of the saved folder
        tokenizer.init_kwargs.pop(setting, None)
    return tokenizer


def build_config(recipe: Recipe, language: Any, tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    """Configure SigLIP's tower without its pooling head; each patch of its last layer is a token."""
    vision = SiglipVisionConfig(
        image_size=SIZE,
        patch_size=recipe.patch,
        hidden_size=recipe.width,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        vision_use_head=False,
    )
    text = {**language.to_dict(), "vocab_size": len(tokenizer), "dtype": None}
    text.pop("_name_or_path", None)
    return LlavaConfig(
        vision_config=vision.to_dict(),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=CELLS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


class Model(nn.Module):
    """Hold everything that is trained; new weights depend on the seed alone.

    language_model: its checkpoint folder.
    """

    def __init__(self, recipe: Recipe, language_model: Path) -> None:
        super().__init__()
        language: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(
            language_model, dtype=torch.float32
        )
        torch.manual_seed(recipe.seed)
        self.tokenizer = build_tokenizer(language_model)
        self.llava = LlavaForConditionalGeneration(
            build_config(recipe, language.config, self.tokenizer)
        )
        self.generation_config = language.generation_config
        weights = language.model.state_dict()
        table = weights["embed_tokens.weight"]
        # A new token begins as the padding token, whose embedding carries no meaning either.
        new = table[[self.tokenizer.pad_token_id]].expand(len(self.tokenizer) - len(table), -1)
        weights["embed_tokens.weight"] = torch.cat([table, new])
        self.llava.model.language_model.load_state_dict(weights)
        self.llava.tie_weights()
        self.vision = nn.ModuleList(
            [self.llava.model.vision_tower, self.llava.model.multi_modal_projector]
        )

    def image_embeddings(self, pixels_BCHW: Tensor) -> Tensor:
        """Return embeddings `[B, T, X]` of the cells of pictures."""
        embeddings: list[Tensor] = self.llava.get_image_features(
            pixels_BCHW, return_dict=True
        ).pooler_output
        return torch.stack(embeddings)

    def reply(self, pixels_BCHW: Tensor | None, *, input_ids: Tensor, **options: Any) -> Any:
        """Run the model on tokens and pictures.

        As its own `forward`, but nothing is counted: on a GPU that would wait for every batch.
        """
        if pixels_BCHW is None:
            return self.llava(input_ids=input_ids, **options)
        embeddings_BTX = self.llava.get_input_embeddings()(input_ids)
        places = (input_ids == self.llava.config.image_token_index)[..., None]
        found = self.image_embeddings(pixels_BCHW)
        embeddings_BTX = embeddings_BTX.masked_scatter(places, found.to(embeddings_BTX.dtype))
        return self.llava(inputs_embeds=embeddings_BTX, **options)

    def save(self, out: Path) -> None:
        """Write the checkpoint in float16: weights, tokenizer, template, image processor."""
        llava = LlavaForConditionalGeneration(self.llava.config)
        llava.load_state_dict(self.llava.state_dict())
        llava.generation_config = self.generation_config
        llava.to(torch.float16).save_pretrained(out)
        processor = SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE})
        LlavaProcessor(
            processor,
            self.tokenizer,
            patch_size=self.llava.config.vision_config.patch_size,
            vision_feature_select_strategy="full",
            chat_template=self.tokenizer.chat_template,
        ).save_pretrained(out)
        processor.save_pretrained(
            out
        )  # also alone: AutoImageProcessor loads it without a tokenizer
        self.tokenizer.save_pretrained(out)
        make_readable(out)


class CellTargets:
    """Hold the target embeddings of cells: word embeddings plus a column and a row vector.

    The position vectors are random: the language model has no words for positions in a picture.
    """

    def __init__(self, recipe: Recipe, model: Model) -> None:
        table = model.llava.get_input_embeddings().weight.detach().clone()
        self.kinds_KX = torch.stack(
            [_word_embedding(kind, model.tokenizer, table) for kind in KINDS]
        )
        generator = torch.Generator().manual_seed(recipe.seed)
        positions = (
            functional.normalize(torch.randn(2 * GRID, table.shape[1], generator=generator))
            * recipe.position_norm
        )
        columns, rows = positions.split(GRID)
        self.positions_TX = torch.cat([columns + row for row in rows])
        self.min_distance = (
            float(torch.pdist(self.kinds_KX).min()) ** 2
        )  # between the two kinds that are closest

    def distances(self, embeddings_BTX: Tensor) -> Tensor:
        """Return squared distances `[B, T, K]` to each kind at the cell's position."""
        return (
            torch.cdist(
                embeddings_BTX - self.positions_TX,
                self.kinds_KX.expand(len(embeddings_BTX), -1, -1),
            )
            ** 2
        )


def _word_embedding(kind: Any, tokenizer: PreTrainedTokenizerFast, table: Tensor) -> Tensor:
    words = [] if kind is None else [word for word in (kind.size, kind.colour, kind.shape) if word]
    ids = [
        token for word in words for token in tokenizer.encode(f" {word}", add_special_tokens=False)
    ]
    return table[ids].sum(dim=0)


class TowerReport(NamedTuple):
    """Hold the loss of a tower step, and the share of things classified correctly."""

    loss: float
    accuracy: float


class TowerTrainer(Training[CellBatch, TowerReport]):
    """Train tower and projector, the first stage."""

    def __init__(self, recipe: Recipe, model: Model, *, steps: int = 0) -> None:
        self.recipe, self.model, self.targets = recipe, model, CellTargets(recipe, model)
        stage = recipe.tower
        super().__init__(
            model.vision, stage.schedule(steps), matrix_lr=stage.matrix_lr, other_lr=stage.other_lr
        )

    def batches(self) -> Iterator[CellBatch]:
        """Yield the batches from the current step to the end of the schedule."""
        for step in range(self.step, self.schedule.steps):
            yield cell_batch(self.recipe, step)

    def train_step(self, batch: CellBatch) -> TowerReport:
        """Move each embedding close to its cell's target, and closer than to any other kind's."""
        distance_NK = (
            self.targets.distances(self.model.image_embeddings(batch.pixels)).flatten(0, 1)
            / self.targets.min_distance
        )
        kinds_N = batch.kinds.flatten()
        own_N = distance_NK.gather(1, kinds_N[:, None])[:, 0]
        (functional.cross_entropy(-distance_NK, kinds_N) + 0.5 * own_N.mean()).backward()
        self.update()
        things = kinds_N > 0
        accuracy = (
            (distance_NK.argmin(dim=1) == kinds_N)[things].float().mean() if things.any() else 1.0
        )
        return TowerReport(float(own_N.detach().mean()), float(accuracy))

    def progress(self, reports: Sequence[TowerReport], seconds: float) -> str:
        """Format the step, mean distance, accuracy and pictures per second.

        Distances are in units of the least distance between two kinds.
        """
        loss, accuracy = (sum(column) / len(reports) for column in zip(*reports, strict=True))
        rate = round(len(reports) * self.recipe.tower.batch / seconds, 1)
        fields = {
            "stage": "tower",
            "step": self.step,
            "distance": round(loss, 4),
            "accuracy": round(accuracy, 4),
        }
        return json.dumps({**fields, "pictures_per_s": rate})


class TalkReport(NamedTuple):
    """Hold mean losses per assistant token, with and without pictures, and the tokens of a step."""

    picture_loss: Tensor
    text_loss: Tensor
    tokens: int


class TalkTrainer(Training[list[PictureBatch], TalkReport]):
    """Train the whole model, the second stage."""

    def __init__(
        self, stage: Stage, model: Model, stream: Stream, *, steps: int = 0, workers: int = 0
    ) -> None:
        self.model, self.stream, self.workers = model, stream, workers
        super().__init__(
            model.llava, stage.schedule(steps), matrix_lr=stage.matrix_lr, other_lr=stage.other_lr
        )

    def batches(self) -> Iterable[list[PictureBatch]]:
        """Yield the batches that are left."""
        if not self.workers:
            return self.stream.prefetch(self.step, self.last_step)
        steps = self.steps_left
        return prefetched(self.stream.batches, steps, workers=self.workers)

    def train_step(self, batch: list[PictureBatch]) -> TalkReport:
        """Run one update."""
        report = self.backward(batch)
        self.update()
        return report

    def backward(self, batch: list[PictureBatch]) -> TalkReport:
        """Add the gradients of a step's micro-batches."""
        losses = [torch.zeros((), device=self.device) for _ in range(2)]
        counts = [0, 0]
        total = sum(float(part.batch.weights[:, 1:].sum()) for part in batch)
        for part in batch:
            text = int(part.pixels is None)
            counts[text] += int((part.batch.weights[:, 1:] == 1.0).sum())
            tokens = Batch(
                tokens=on_device(part.batch.tokens, self.device),
                weights=on_device(part.batch.weights, self.device),
            )
            pictures = None if part.pixels is None else on_device(part.pixels, self.device)
            with self.autocast():
                loss, assistant_loss = token_loss(partial(self.model.reply, pictures), tokens)
            (loss / total).backward()
            losses[text] += assistant_loss
        means = [loss / max(count, 1) for loss, count in zip(losses, counts, strict=True)]
        return TalkReport(
            means[0], means[1], sum(int((part.batch.weights > 0).sum()) for part in batch)
        )

    def progress(self, reports: Sequence[TalkReport], seconds: float) -> str:
        """Format the step, losses with and without pictures, and tokens per second."""
        picture_loss, text_loss, tokens = (
            float(sum(column)) / len(reports) for column in zip(*reports, strict=True)
        )
        fields = {
            "stage": "talk",
            "step": self.step,
            "picture_loss": round(picture_loss, 4),
            "text_loss": round(text_loss, 4),
        }
        return json.dumps({**fields, "tokens_per_s": round(tokens * len(reports) / seconds)})


def train(
    recipe: Recipe,
    language_model: Path,
    state: Path,
    *,
    steps: dict[str, int],
    resume: bool,
    log: int = 20,
) -> tuple[Model, bool]:
    """Train both stages, each with its own state beside `state`; complete ones are only loaded.

    Returns the model, and whether training is complete.
    """
    model = Model(recipe, language_model)
    tower = TowerTrainer(recipe, model, steps=steps.get("tower", 0))
    if not run_stage(tower, state.with_name("tower.pt"), resume=resume, log=log):
        return model, False
    stream = Stream(recipe, model.tokenizer, model.llava.config.image_token_index)
    talk = TalkTrainer(recipe.talk, model, stream, steps=steps.get("talk", 0))
    return model, run_stage(talk, state.with_name("talk.pt"), resume=resume, log=log)


def run_stage(
    trainer: Training[Any, Any],
    state: Path,
    *,
    resume: bool,
    log: int,
    seconds: float | None = None,
) -> bool:
    """Train a stage from `state` if resumed; return True if it reached its last step.

    seconds: of the stage, in place of its steps.
    """
    if resume and state.exists():
        trainer.load_state(state)
    trainer.run(state, every=120.0, log=log, seconds=seconds)
    return trainer.step >= trainer.schedule.steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--words",
        type=Path,
        required=True,
        help="language model: checkpoint folder of pocket_chat.py",
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-see/state.pt"))
    parser.add_argument(
        "--resume", action="store_true", help="continue from the states beside --state"
    )
    for stage in STAGES:
        parser.add_argument(
            f"--{stage}-steps", type=int, default=0, help="steps of this stage; 0 uses the recipe's"
        )
    args = parser.parse_args()
    exit_on_sigterm()
    steps = {"tower": args.tower_steps, "talk": args.talk_steps}
    model, _ = train(
        Recipe(seed=args.seed), args.words, args.state, steps=steps, resume=args.resume
    )
    model.save(args.out)


if __name__ == "__main__":
    main()
