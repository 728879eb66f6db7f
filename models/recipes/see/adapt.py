"""Teach pocket-chat's eyes other styles: `python models/recipes see.adapt --model FOLDER --out FOLDER`.

It continues a complete checkpoint instead of beginning anew. In the first stage, `tower`, a frozen
copy of the tower says what the language model understands: it looks at a scene as the micro-world
draws it, and the tower that learns is to give the same embeddings for the scene in any style; `edges`
goes on with that at lower rates. `words` trains the language model alone on pictures of both kinds,
calls of tools and replies in JSON, `talk` the whole model on the same, and `settle` with more of the
micro-world's own pictures. `tools` and `recall` train the language model on calls among tools that
are alike and on replies that repeat; their weights are not the shipped ones.

Shapes: B pictures · T cells · N = B·T · K kinds of things · X hidden size of the language model.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoProcessor, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from recipes.chat.calls import abilities_conversation, calling_conversation
from recipes.chat.choices import choosing_conversation
from recipes.chat.data import Conversation
from recipes.chat.objects import object_conversation, repeating_conversation
from recipes.chat.stream import held_out_digests, training_conversation
from recipes.chat.tokenizer import TURN_END
from recipes.see.batches import Row, Stream, pixels
from recipes.see.data import (
    CELLS,
    KINDS,
    PictureConversation,
    cell_picture,
    picture_conversation,
)
from recipes.see.mix import LOCATING, SEEING
from recipes.see.recipe import Adaptation, Recipe
from recipes.see.styled import lesson, styled_conversation
from recipes.see.train import Model, TalkTrainer, run_stage
from recipes.training.loop import Stage, Training, exit_on_sigterm

STAGES = ("tower", "words", "edges", "talk", "settle", "tools", "recall")


class LessonBatch(NamedTuple):
    """Hold pictures `[B, 3, H, W]`, the same scenes drawn plainly, and the kind of each cell."""

    pixels: Tensor
    plain: Tensor
    kinds: Tensor


def lesson_batch(recipe: Adaptation, stage: Stage, step: int) -> LessonBatch:
    """Return the tower's batch of `step`: pictures of other styles, then the micro-world's own."""
    size = stage.batch
    own = round(recipe.own_share * size)
    first = stage.first + step * size
    styled = [lesson(recipe.seed, index) for index in range(first, first + size - own)]
    kept = [
        cell_picture(recipe.seed, index, crowded_share=recipe.crowded_share)
        for index in range(first, first + own)
    ]
    pictures = [one.picture for one in kept]
    return LessonBatch(
        pixels([*(one.picture for one in styled), *pictures]),
        pixels([*(one.plain for one in styled), *pictures]),
        torch.from_numpy(np.stack([*(one.kinds for one in styled), *(one.kinds for one in kept)])),
    )


class Teacher(nn.Module):
    """Hold the frozen tower, and what it says on average of each kind and of each cell."""

    def __init__(self, recipe: Adaptation, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model.llava.model)
        self.model.requires_grad_(False)
        self.kinds_KX, self.positions_TX = self._averages(recipe)
        self.scale = float(torch.pdist(self.kinds_KX).min()) ** 2

    @torch.no_grad()
    def embeddings(self, pixels_BCHW: Tensor) -> Tensor:
        """Return embeddings `[B, T, X]` of the cells of pictures."""
        found = self.model.get_image_features(pixels_BCHW, return_dict=True).pooler_output
        return torch.stack(found)

    def _averages(self, recipe: Adaptation) -> tuple[Tensor, Tensor]:
        """Fit kind and cell vectors `[K, X]`, `[T, X]` to the embeddings, by least squares."""
        examples = [
            cell_picture(recipe.seed, index, crowded_share=1.0)
            for index in range(recipe.reference_pictures)
        ]
        kinds = torch.from_numpy(np.stack([one.kinds for one in examples])).flatten()
        cells = torch.arange(CELLS).repeat(len(examples))
        design = torch.cat(
            [functional.one_hot(kinds, len(KINDS)), functional.one_hot(cells, CELLS)], dim=1
        ).float()
        values = torch.cat(
            [self.embeddings(pixels([one.picture for one in part])) for part in _parts(examples)]
        ).flatten(0, 1)
        gram = design.T @ design + 1e-3 * torch.eye(design.shape[1])
        found = torch.linalg.solve(gram, design.T @ values)
        return found[: len(KINDS)], found[len(KINDS) :]


def _parts(examples: Sequence[object], size: int = 64) -> Iterator[Sequence]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


class TowerReport(NamedTuple):
    """Hold the distance from the teacher, and the share of things and empty cells found."""

    distance: float
    things: float
    empty: float


class TowerAdapter(Training[LessonBatch, TowerReport]):
    """Train tower and projector to say of any style what they say of the micro-world's own."""

    def __init__(
        self, recipe: Adaptation, model: Model, stage: Stage, *, teacher: Model, steps: int = 0
    ) -> None:
        self.recipe, self.model, self.stage = recipe, model, stage
        self.teacher = Teacher(recipe, teacher)
        super().__init__(
            model.vision, stage.schedule(steps), matrix_lr=stage.matrix_lr, other_lr=stage.other_lr
        )

    def batches(self) -> Iterator[LessonBatch]:
        """Yield the batches that are left, each computed one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(lesson_batch, self.recipe, self.stage, self.step)
            for step in range(self.step, self.schedule.steps):
                ready, pending = (
                    pending.result(),
                    pool.submit(lesson_batch, self.recipe, self.stage, step + 1),
                )
                yield ready

    def train_step(self, batch: LessonBatch) -> TowerReport:
        """Move each embedding close to the teacher's, and closer to its kind than to others."""
        teacher = self.teacher
        found_BTX = self.model.image_embeddings(batch.pixels)
        wanted_BTX = teacher.embeddings(batch.plain)
        far = ((found_BTX - wanted_BTX) ** 2).sum(dim=2) / teacher.scale
        distance_NK = (
            torch.cdist((found_BTX - teacher.positions_TX).flatten(0, 1), teacher.kinds_KX) ** 2
            / teacher.scale
        )
        kinds_N = batch.kinds.flatten()
        (functional.cross_entropy(-distance_NK, kinds_N) + 0.5 * far.mean()).backward()
        self.update()
        right, things = distance_NK.argmin(dim=1) == kinds_N, kinds_N > 0
        styled = torch.zeros_like(batch.kinds, dtype=torch.bool)
        styled[: len(styled) - round(self.recipe.own_share * len(styled))] = True
        things_styled, empty_styled = things & styled.flatten(), ~things & styled.flatten()
        return TowerReport(
            float(far.detach().mean()),
            float(right[things_styled].float().mean()),
            float(right[empty_styled].float().mean()),
        )

    def progress(self, reports: Sequence[TowerReport], seconds: float) -> str:
        """Format the step, mean distance, accuracies and pictures per second."""
        distance, things, empty = (sum(col) / len(reports) for col in zip(*reports, strict=True))
        fields = {"stage": "tower", "step": self.step, "distance": round(distance, 4)}
        rate = round(len(reports) * self.stage.batch / seconds, 1)
        found = {"things": round(things, 4), "empty": round(empty, 4), "pictures_per_s": rate}
        return json.dumps({**fields, **found})


class LessonStream(Stream):
    """Serve the conversations of the stages after the tower's, by step.

    Each step has the same share of every kind, in the order of `lessons`: pictures of other styles,
    the micro-world's own, calls of tools, replies in JSON, what the model can do, and words alone,
    which preserve the rest.
    """

    def __init__(
        self,
        recipe: Adaptation,
        stage: Stage,
        tokenizer: PreTrainedTokenizerFast,
        placeholder: int,
        lessons: dict[str, int],
    ) -> None:
        self.adaptation, self.stage, self.lessons = recipe, stage, lessons
        super().__init__(Recipe(seed=recipe.seed, talk=stage), tokenizer, placeholder)

    def row(self, index: int) -> Row:
        """Return conversation `index`."""
        recipe, place = self.adaptation, index % self.stage.batch
        index += self.stage.first
        for kind, count in self.lessons.items():
            if place < count:
                return self._lesson(kind, index)
            place -= count
        conversation = training_conversation(recipe.seed, index, mix=recipe.text_mix)
        return Row(*self.encoder.encode(conversation), ())

    def _lesson(self, kind: str, index: int) -> Row:
        recipe = self.adaptation
        if kind == "own":
            return self.picture_row(picture_conversation(recipe.seed, index, mix=LOCATING))
        rng = Random(f"lessons/{recipe.seed}/{kind}/{index}")
        if kind == "repeating":
            ids, weights = self._ending(*repeating_conversation(rng, recipe.text_mix))
            return Row(ids, weights, ())
        while True:
            found = self._conversation(kind, rng)
            if found and not found.conversation.keys & held_out_digests():
                break
        if found.pictures:
            return self.picture_row(found)
        ids, weights = self.encoder.encode(found.conversation)
        if kind == "json":
            weights[weights.index(1.0)] = 0.0  # the reply's first token: nothing asks for it
        return Row(ids, weights, ())

    def _ending(self, conversation: Conversation, told: int) -> tuple[list[int], list[float]]:
        """Encode a conversation whose targets are what follows `told` characters of its last message."""
        ids, weights = self.encoder.encode(conversation)
        reply = f"{conversation.messages[-1]['content']}{TURN_END}"
        encoded = self.encoder.tokenizer.backend_tokenizer.encode(reply, add_special_tokens=False)
        begin = weights.index(1.0)
        for place, (_, end) in enumerate(encoded.offsets, begin):
            if end <= told:
                weights[place] = 0.0
        return ids, weights

    def _conversation(self, kind: str, rng: Random) -> PictureConversation | None:
        if kind == "styled":
            return styled_conversation(rng, SEEING)
        makers = {
            "calls": calling_conversation,
            "choices": choosing_conversation,
            "json": object_conversation,
            "abilities": abilities_conversation,
        }
        return PictureConversation(makers[kind](rng, self.adaptation.text_mix), ())


def load(recipe: Adaptation, folder: Path) -> Model:
    """Load a complete checkpoint for further training, in float32."""
    model = Model.__new__(Model)
    nn.Module.__init__(model)
    model.tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    model.llava = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = model.llava.generation_config
    model.vision = nn.ModuleList(
        [model.llava.model.vision_tower, model.llava.model.multi_modal_projector]
    )
    return model


@torch.no_grad()
def average(recipe: Adaptation, model: Model, folders: Sequence[Path]) -> None:
    """Set the model's weights to the mean of its own and those of checkpoints of the same sizes."""
    states = [model.llava.state_dict(), *(load(recipe, one).llava.state_dict() for one in folders)]
    mean = {name: torch.stack([one[name] for one in states]).mean(dim=0) for name in states[0]}
    model.llava.load_state_dict(mean)  # not weight by weight: a tied one has two names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint to continue")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-see-adapt/state.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from the states")
    parser.add_argument("--stage", choices=STAGES, default="tower")
    parser.add_argument(
        "--teacher", type=Path, help="checkpoint whose tower teaches; --model if left out"
    )
    parser.add_argument("--steps", type=int, default=0, help="of the stage; 0 uses the recipe's")
    parser.add_argument(
        "--average", type=Path, nargs="*", default=(), help="checkpoints to average the result with"
    )
    parser.add_argument("--compile", action="store_true", help="compile the language model")
    args = parser.parse_args()
    exit_on_sigterm()
    torch.set_num_threads(1)
    recipe = Adaptation()
    model = load(recipe, args.model)
    stage = recipe.stages[args.stage]
    trainer: Training
    if args.stage in ("tower", "edges"):
        teacher = load(recipe, args.teacher) if args.teacher else model
        trainer = TowerAdapter(recipe, model, stage, teacher=teacher, steps=args.steps)
    else:
        model.vision.requires_grad_(args.stage not in ("words", "tools", "recall"))
        if args.compile:
            model.llava.model.language_model.compile(dynamic=True)
        stream = LessonStream(
            recipe,
            stage,
            model.tokenizer,
            model.llava.config.image_token_index,
            recipe.lessons[args.stage],
        )
        trainer = TalkTrainer(stage, model, steps=args.steps, stream=stream)
    run_stage(trainer, args.state.with_name(f"{args.stage}.pt"), resume=args.resume, log=10)
    average(recipe, model, args.average)
    model.save(args.out)


if __name__ == "__main__":
    main()
