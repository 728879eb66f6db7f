"""Teach pocket-chat to see: `python models/recipes/pocket_see.py --words FOLDER --out models/pocket-chat`.

Two trainings, one after another. The tower learns to tell what stands in each cell of a picture, as embeddings near the
language model's own of these words. Then tower, projector and language model together learn to talk about pictures,
while conversations without any keep what the language model knew. Batches are a function of (seed, step): a run that is
stopped (a file `stop` beside the state, or a signal) goes on with `--resume`. All of it is float32.

Shapes: B pictures · T cells · K kinds of things · X hidden size of the language model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
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

import chat_tokenizer
from pocket_chat import token_loss
from see_batches import Patchwork, Shown, Stream, patchwork
from see_data import CELLS, KINDS
from see_recipe import Recipe
from training import Training, end_on_sigterm, readable
from world import GRID
from world_pictures import SIZE

STAGES = ("tower", "talk")
MARK = "<image>"


def build_tokenizer(words: Path) -> PreTrainedTokenizerFast:
    """That of the language model, with a token that stands for a picture, and this folder's template."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(words)
    tokenizer.add_tokens([AddedToken(MARK, special=True, normalized=False)], special_tokens=True)
    tokenizer.chat_template = chat_tokenizer.TEMPLATE
    for where_from in ("is_local", "local_files_only"):  # of no use to those who read what is saved
        tokenizer.init_kwargs.pop(where_from, None)
    return tokenizer


def build_config(recipe: Recipe, language: Any, tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    """SigLIP's tower without its pooling head; every patch of its last layer is a token."""
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
        image_token_index=tokenizer.convert_tokens_to_ids(MARK),
        image_seq_length=CELLS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


class Model(nn.Module):
    """All that is learnt; what is not the language model's begins with the seed alone. `words`: its folder."""

    def __init__(self, recipe: Recipe, words: Path) -> None:
        super().__init__()
        language: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(
            words, dtype=torch.float32
        )
        torch.manual_seed(recipe.seed)
        self.tokenizer = build_tokenizer(words)
        self.whole = LlavaForConditionalGeneration(
            build_config(recipe, language.config, self.tokenizer)
        )
        self.generation_config = language.generation_config
        known = language.model.state_dict()
        table = known["embed_tokens.weight"]
        new = table[[self.tokenizer.pad_token_id]].expand(
            len(self.tokenizer) - len(table), -1
        )  # as little said
        known["embed_tokens.weight"] = torch.cat([table, new])
        self.whole.model.language_model.load_state_dict(known)
        self.whole.tie_weights()
        self.eyes = nn.ModuleList(
            [self.whole.model.vision_tower, self.whole.model.multi_modal_projector]
        )

    def look(self, pixels_BCHW: Tensor) -> Tensor:
        """Embeddings `[B, T, X]` of the cells of pictures."""
        seen: list[Tensor] = self.whole.get_image_features(
            pixels_BCHW, return_dict=True
        ).pooler_output
        return torch.stack(seen)

    def save(self, out: Path) -> None:
        """The checkpoint folder: half-precision weights, tokenizer, template, image processor."""
        whole = LlavaForConditionalGeneration(self.whole.config)
        whole.load_state_dict(self.whole.state_dict())
        whole.generation_config = self.generation_config
        whole.to(torch.float16).save_pretrained(out)
        processor = SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE})
        LlavaProcessor(
            processor,
            self.tokenizer,
            patch_size=self.whole.config.vision_config.patch_size,
            vision_feature_select_strategy="full",
            chat_template=self.tokenizer.chat_template,
        ).save_pretrained(out)
        processor.save_pretrained(out)  # where those look who need no tokenizer
        self.tokenizer.save_pretrained(out)
        readable(out)


class Meanings:
    """What embeddings of cells are to be: the sum of the words that name a thing, and of a column's and a row's vector.

    These vectors are random and stand for nothing else: words tell no place in a picture.
    """

    def __init__(self, recipe: Recipe, model: Model) -> None:
        table = model.whole.get_input_embeddings().weight.detach().clone()
        self.kinds_KX = torch.stack([_meaning(kind, model.tokenizer, table) for kind in KINDS])
        generator = torch.Generator().manual_seed(recipe.seed)
        places = (
            functional.normalize(torch.randn(2 * GRID, table.shape[1], generator=generator))
            * recipe.place
        )
        columns, rows = places.split(GRID)
        self.places_TX = torch.cat([columns + row for row in rows])
        self.unit = (
            float(torch.pdist(self.kinds_KX).min()) ** 2
        )  # that of the two that are most alike

    def distances(self, seen_BTX: Tensor) -> Tensor:
        """`[B, T, K]`: squared, to each kind in the place of the cell."""
        return (
            torch.cdist(seen_BTX - self.places_TX, self.kinds_KX.expand(len(seen_BTX), -1, -1)) ** 2
        )


def _meaning(kind: Any, tokenizer: PreTrainedTokenizerFast, table: Tensor) -> Tensor:
    words = [] if kind is None else [word for word in (kind.size, kind.colour, kind.shape) if word]
    ids = [
        token for word in words for token in tokenizer.encode(f" {word}", add_special_tokens=False)
    ]
    return table[ids].sum(dim=0)


class Glimpse(NamedTuple):
    """A step of the tower: its loss, and the share of things that it knew."""

    loss: float
    known: float


class TowerTrainer(Training[Patchwork, Glimpse]):
    """The first stage: tower and projector."""

    def __init__(self, recipe: Recipe, model: Model, *, steps: int = 0) -> None:
        self.recipe, self.model, self.meanings = recipe, model, Meanings(recipe, model)
        stage = recipe.tower
        super().__init__(
            model.eyes, stage.schedule(steps), matrix_lr=stage.matrix_lr, other_lr=stage.other_lr
        )

    def batches(self) -> Iterator[Patchwork]:
        for step in range(self.step, self.schedule.steps):
            yield patchwork(self.recipe, step)

    def train_step(self, batch: Patchwork) -> Glimpse:
        """Each embedding shall be nearest to what stands in its cell, and near to it."""
        far_NK = (
            self.meanings.distances(self.model.look(batch.pixels)).flatten(0, 1)
            / self.meanings.unit
        )
        kinds_N = batch.kinds.flatten()
        own_N = far_NK.gather(1, kinds_N[:, None])[:, 0]
        (functional.cross_entropy(-far_NK, kinds_N) + 0.5 * own_N.mean()).backward()
        self.update()
        things = kinds_N > 0
        known = (far_NK.argmin(dim=1) == kinds_N)[things].float().mean() if things.any() else 1.0
        return Glimpse(float(own_N.detach().mean()), float(known))

    def progress(self, reports: Sequence[Glimpse], seconds: float) -> str:
        """Step, mean distance in units of the least between kinds, share of things known, pictures per second."""
        loss, known = (sum(column) / len(reports) for column in zip(*reports, strict=True))
        rate = round(len(reports) * self.recipe.tower.batch / seconds, 1)
        said = {
            "stage": "tower",
            "step": self.step,
            "distance": round(loss, 4),
            "known": round(known, 4),
        }
        return json.dumps({**said, "pictures_per_s": rate})


class Said(NamedTuple):
    """A step of talk: mean loss per word of the assistant where there are pictures and where not; tokens."""

    shown: float
    plain: float
    tokens: int


class TalkTrainer(Training[list[Shown], Said]):
    """The second stage: the whole model."""

    def __init__(self, recipe: Recipe, model: Model, *, steps: int = 0) -> None:
        self.recipe, self.model = recipe, model
        stage = recipe.talk
        super().__init__(
            model.whole, stage.schedule(steps), matrix_lr=stage.matrix_lr, other_lr=stage.other_lr
        )
        self.stream = Stream(recipe, model.tokenizer, model.whole.config.image_token_index)

    def batches(self) -> Iterator[list[Shown]]:
        return self.stream.ahead(self.step, self.schedule.steps)

    def train_step(self, batch: list[Shown]) -> Said:
        losses, words = [0.0, 0.0], [0.0, 0.0]
        total = sum(float(part.batch.weights[:, 1:].sum()) for part in batch)
        for part in batch:
            loss, said = token_loss(partial(self.model.whole, pixel_values=part.pixels), part.batch)
            (loss / total).backward()
            plain = int(part.pixels is None)
            losses[plain] += float(said)
            words[plain] += float((part.batch.weights[:, 1:] == 1.0).sum())
        self.update()
        means = [loss / max(count, 1.0) for loss, count in zip(losses, words, strict=True)]
        return Said(means[0], means[1], sum(int((part.batch.weights > 0).sum()) for part in batch))

    def progress(self, reports: Sequence[Said], seconds: float) -> str:
        """Step, losses of micro-batches with pictures and of those without, tokens per second."""
        shown, plain, tokens = (sum(column) / len(reports) for column in zip(*reports, strict=True))
        said = {
            "stage": "talk",
            "step": self.step,
            "shown": round(shown, 4),
            "plain": round(plain, 4),
        }
        return json.dumps({**said, "tokens_per_s": round(tokens * len(reports) / seconds)})


def train(
    recipe: Recipe, words: Path, state: Path, *, steps: dict[str, int], resume: bool, log: int = 20
) -> tuple[Model, bool]:
    """Both stages, each with a state of its own beside `state`; those that are complete are only read.

    Returns the model, and whether it is trained to the end.
    """
    model = Model(recipe, words)
    tower = TowerTrainer(recipe, model, steps=steps.get("tower", 0))
    if not finish(tower, state.with_name("tower.pt"), resume=resume, log=log):
        return model, False
    talk = TalkTrainer(recipe, model, steps=steps.get("talk", 0))
    return model, finish(talk, state.with_name("talk.pt"), resume=resume, log=log)


def finish(trainer: Training[Any, Any], state: Path, *, resume: bool, log: int) -> bool:
    """Train to the end of a stage, if it is not stopped before; from `state` on if it is to be resumed."""
    if resume and state.exists():
        trainer.load_state(state)
    trainer.run(state, every=120.0, log=log)
    return trainer.step >= trainer.schedule.steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--words", type=Path, required=True, help="the language model: a folder of pocket_chat.py"
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-see/state.pt"))
    parser.add_argument(
        "--resume", action="store_true", help="go on from the states beside --state"
    )
    for stage in STAGES:
        parser.add_argument(
            f"--{stage}-steps", type=int, default=0, help="0: as many as the recipe says"
        )
    args = parser.parse_args()
    end_on_sigterm()
    steps = {"tower": args.tower_steps, "talk": args.talk_steps}
    model, _ = train(
        Recipe(seed=args.seed), args.words, args.state, steps=steps, resume=args.resume
    )
    model.save(args.out)


if __name__ == "__main__":
    main()
