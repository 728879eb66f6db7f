"""Teach pocket-chat's eyes other styles: `python models/recipes see.adapt --model FOLDER --out FOLDER`.

It continues a complete checkpoint instead of beginning anew. In the first stage, `tower`, a frozen
copy of the tower says what the language model understands: it looks at a scene as the micro-world
draws it, and the tower that learns is to give the same embeddings for the scene in any style; `edges`
goes on with that at lower rates. `words` trains the language model alone on pictures of both kinds,
calls of tools and replies in JSON, `talk` the whole model on the same, and `settle` with more of the
micro-world's own pictures. `tools` and `recall` train the language model on calls among tools that
are alike and on replies that repeat; their weights are not the shipped ones. `whole` trains
everything at once: each step moves the eyes close to the frozen tower's, as `edges` does, and the
whole model through conversations. It is made for a GPU, and for a bound of time (`--minutes`).

Shapes: B pictures · T cells · N = B·T · K kinds of things · X hidden size of the language model.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
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
from recipes.chat.records import record_conversation, shares
from recipes.chat.spelling import pieces, respelled
from recipes.chat.stream import held_out_digests, training_conversation
from recipes.chat.tokenizer import TURN_END
from recipes.see.batches import PictureBatch, Row, Stream, packed, pixels, unpacked
from recipes.see.data import (
    CELLS,
    KINDS,
    PictureConversation,
    cell_picture,
    picture_conversation,
)
from recipes.see.mix import LOCATING, SCATTERED, SEEING
from recipes.see.recipe import Adaptation, Recipe
from recipes.see.styled import lesson, styled_conversation
from recipes.see.train import Model, TalkReport, TalkTrainer, run_stage
from recipes.training.averages import Average
from recipes.training.loop import Stage, Training, exit_on_sigterm
from recipes.training.prefetch import on_device, prefetched
from recipes.world.styles import EVEN, Slant

STAGES = ("tower", "words", "edges", "talk", "settle", "tools", "recall", "whole")
GPU_TOKENS = 65_536  # of a micro-batch, padded: one launch of each kernel for all rows
AVERAGED_SHARE = 1 / 3  # of `whole`, at its end
KEPT_SHARE = 0.6  # of `whole`, after which its weights are kept


class LessonBatch(NamedTuple):
    """Hold pictures `[B, 3, H, W]`, the same scenes drawn plainly, and the kind of each cell."""

    pixels: Tensor
    plain: Tensor
    kinds: Tensor


def lesson_batch(
    recipe: Adaptation, stage: Stage, step: int, *, slant: Slant = EVEN
) -> LessonBatch:
    """Return the tower's batch of `step`: pictures of other styles, then the micro-world's own."""
    size = stage.batch
    own = round(recipe.own_share * size)
    first = stage.first + step * size
    styled = [lesson(recipe.seed, index, slant=slant) for index in range(first, first + size - own)]
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


class TowerReport(NamedTuple):
    """Hold the distance from the teacher, and the share of things and empty cells found."""

    distance: Tensor
    things: Tensor
    empty: Tensor


class Teacher(nn.Module):
    """Hold the frozen tower, and what it says on average of each kind and of each cell."""

    kinds_KX: Tensor
    positions_TX: Tensor

    def __init__(self, recipe: Adaptation, model: Model) -> None:
        super().__init__()
        self.own_share, device = recipe.own_share, model.llava.device
        self.model = copy.deepcopy(model.llava.model).cpu()
        self.model.requires_grad_(False)
        kinds_KX, positions_TX = self._averages(recipe)
        self.scale = float(torch.pdist(kinds_KX).min()) ** 2
        self.register_buffer("kinds_KX", kinds_KX)
        self.register_buffer("positions_TX", positions_TX)
        self.to(device)

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

    def loss(self, model: Model, batch: LessonBatch) -> tuple[Tensor, TowerReport]:
        """Return the loss of what a model says of pictures, and how right it is.

        Each embedding is to be close to the teacher's, and closer to its kind than to others.
        """
        found_BTX = model.image_embeddings(batch.pixels).float()
        wanted_BTX = self.embeddings(batch.plain).float()
        far = ((found_BTX - wanted_BTX) ** 2).sum(dim=2) / self.scale
        distance_NK = (
            torch.cdist(
                (found_BTX - self.positions_TX).flatten(0, 1),
                self.kinds_KX,
                compute_mode="donot_use_mm_for_euclid_dist",  # matrices round on a GPU
            )
            ** 2
            / self.scale
        )
        kinds_N = batch.kinds.flatten()
        loss = functional.cross_entropy(-distance_NK, kinds_N) + 0.5 * far.mean()
        right, things = distance_NK.argmin(dim=1) == kinds_N, kinds_N > 0
        styled = torch.zeros_like(batch.kinds, dtype=torch.bool)
        styled[: len(styled) - round(self.own_share * len(styled))] = True
        of_things, of_empty = things & styled.flatten(), ~things & styled.flatten()
        report = TowerReport(
            far.detach().mean(),
            (right & of_things).sum() / of_things.sum(),
            (right & of_empty).sum() / of_empty.sum(),
        )
        return loss, report


def _parts(examples: Sequence[object], size: int = 64) -> Iterator[Sequence]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


class TowerAdapter(Training[LessonBatch, TowerReport]):
    """Train tower and projector to say of any style what they say of the micro-world's own."""

    def __init__(
        self,
        recipe: Adaptation,
        model: Model,
        stage: Stage,
        *,
        teacher: Model,
        steps: int = 0,
        workers: int = 0,
    ) -> None:
        self.recipe, self.model, self.stage, self.workers = recipe, model, stage, workers
        self.teacher = Teacher(recipe, teacher)
        super().__init__(
            model.vision, stage.schedule(steps), matrix_lr=stage.matrix_lr, other_lr=stage.other_lr
        )

    def batches(self) -> Iterable[LessonBatch]:
        """Yield the batches that are left."""
        make = partial(lesson_batch, self.recipe, self.stage)
        return prefetched(make, self.steps_left, workers=self.workers)

    def train_step(self, batch: LessonBatch) -> TowerReport:
        """Run one update."""
        moved = LessonBatch(*(on_device(one, self.device) for one in batch))
        with self.autocast():
            loss, report = self.teacher.loss(self.model, moved)
        loss.backward()
        self.update()
        return report

    def progress(self, reports: Sequence[TowerReport], seconds: float) -> str:
        """Format the step, mean distance, accuracies and pictures per second."""
        distance, things, empty = (
            float(sum(col)) / len(reports) for col in zip(*reports, strict=True)
        )
        fields = {"stage": "tower", "step": self.step, "distance": round(distance, 4)}
        rate = round(len(reports) * self.stage.batch / seconds, 1)
        found = {"things": round(things, 4), "empty": round(empty, 4), "pictures_per_s": rate}
        return json.dumps({**fields, **found})


class WholeBatch(NamedTuple):
    """Hold a step's pictures for the tower, and its conversations."""

    lessons: LessonBatch
    talk: list[PictureBatch]


class WholeReport(NamedTuple):
    """Hold the reports of both halves of a step."""

    tower: TowerReport
    talk: TalkReport


class WholeTrainer(Training[WholeBatch, WholeReport]):
    """Train eyes and language model at once, by the teacher and through conversations.

    kept: weights after KEPT_SHARE of the run. average: mean weights of its end.
    """

    def __init__(
        self,
        recipe: Adaptation,
        model: Model,
        stage: Stage,
        *,
        teacher: Model,
        stream: Stream,
        steps: int = 0,
        workers: int = 0,
    ) -> None:
        self.recipe, self.workers = recipe, workers
        self.pictures = replace(stage, batch=recipe.whole_pictures)
        self.teacher = Teacher(recipe, teacher)
        self.talk = TalkTrainer(stage, model, stream, steps=steps)
        super().__init__(
            model.llava, stage.schedule(steps), matrix_lr=stage.matrix_lr, other_lr=stage.other_lr
        )
        self.kept: dict[str, Tensor] | None = None
        self.average = Average(model.llava)

    def make(self, step: int) -> WholeBatch:
        """Return the batch of a step; its pictures are packed."""
        lessons = lesson_batch(self.recipe, self.pictures, step, slant=self.recipe.slant)
        talk = self.talk.stream.batches(step)
        return WholeBatch(
            lessons._replace(pixels=packed(lessons.pixels), plain=packed(lessons.plain)),
            [
                part if part.pixels is None else part._replace(pixels=packed(part.pixels))
                for part in talk
            ],
        )

    def batches(self) -> Iterable[WholeBatch]:
        """Yield the batches that are left."""
        held_out_digests()  # once, not in each worker
        return prefetched(self.make, self.steps_left, workers=self.workers)

    def train_step(self, batch: WholeBatch) -> WholeReport:
        """Run one update."""
        pictures, plain, kinds = (on_device(one, self.device) for one in batch.lessons)
        lessons = LessonBatch(unpacked(pictures), unpacked(plain), kinds)
        with self.autocast():
            loss, tower = self.teacher.loss(self.talk.model, lessons)
        loss.backward()
        talk = self.talk.backward(
            [
                part
                if part.pixels is None
                else part._replace(pixels=unpacked(on_device(part.pixels, self.device)))
                for part in batch.talk
            ]
        )
        self.update()
        if self.kept is None and self.share >= KEPT_SHARE:
            self.kept = {name: one.clone() for name, one in self.module.state_dict().items()}
        if self.share >= 1 - AVERAGED_SHARE:
            self.average.follow()
        return WholeReport(tower, talk)

    def progress(self, reports: Sequence[WholeReport], seconds: float) -> str:
        """Format the share that is done, the step, and the means of the last steps."""
        count = len(reports)
        means = {
            "distance": sum(float(one.tower.distance) for one in reports) / count,
            "things": sum(float(one.tower.things) for one in reports) / count,
            "picture_loss": sum(float(one.talk.picture_loss) for one in reports) / count,
            "text_loss": sum(float(one.talk.text_loss) for one in reports) / count,
            "steps_per_s": count / seconds,
            "tokens_per_s": sum(one.talk.tokens for one in reports) / seconds,
        }
        rounded = {name: round(one, 4) for name, one in means.items()}
        fields = {"stage": "whole", "step": self.step, "share": round(self.share, 3)}
        return json.dumps({**fields, **rounded})

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights that were kept on the way, by name, of a run that came that far."""
        found = {} if self.kept is None else {"kept": self.kept}
        if self.average.count:
            found["mean"] = {**self.module.state_dict(), **self.average.state()}
        return found


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
        self.pieces = pieces(tokenizer)
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
        if kind == "record":
            weights = self._weighed(found.conversation, weights)
        if kind in ("json", "record"):
            weights[weights.index(1.0)] = 0.0  # the reply's first token: nothing asks for it
        return Row(ids, weights, ())

    def _weighed(self, conversation: Conversation, weights: list[float]) -> list[float]:
        """Weigh the tokens of a record by the least weight of their characters."""
        reply = conversation.messages[-1]["content"]
        found = [*shares(reply), *[1.0] * len(TURN_END)]
        encoded = self.encoder.tokenizer.backend_tokenizer.encode(
            f"{reply}{TURN_END}", add_special_tokens=False
        )
        begin = weights.index(1.0)
        weights = list(weights)
        for place, (first, end) in enumerate(encoded.offsets, begin):
            weights[place] = min(found[first:end])
        return weights

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
        if kind == "spelled":
            called = choosing_conversation(rng, self.adaptation.text_mix)
            return PictureConversation(respelled(called, rng, self.pieces), ())
        if kind == "scattered":
            return styled_conversation(rng, SCATTERED, slant=self.adaptation.slant)
        makers = {
            "calls": calling_conversation,
            "choices": choosing_conversation,
            "json": object_conversation,
            "record": record_conversation,
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
    if not folders:
        return
    device = model.llava.device
    others = (load(recipe, one).to(device).llava.state_dict() for one in folders)
    states = [model.llava.state_dict(), *others]
    mean = {name: torch.stack([one[name] for one in states]).mean(dim=0) for name in states[0]}
    model.llava.load_state_dict(mean)  # not weight by weight: a tied one has two names


def main() -> None:
    begun = time.monotonic()
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
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="processes that make batches; 0 makes them in a thread",
    )
    parser.add_argument(
        "--minutes", type=float, help="of the whole command, in place of the stage's steps"
    )
    args = parser.parse_args()
    exit_on_sigterm()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    recipe = Adaptation()
    model = load(recipe, args.model)
    model.to(args.device)
    trainer = build_trainer(recipe, model, args)
    seconds = None if args.minutes is None else 60 * args.minutes - (time.monotonic() - begun)
    state = args.state.with_name(f"{args.stage}.pt")
    try:
        run_stage(
            trainer,
            state,
            resume=args.resume,
            log=10 if args.device == "cpu" else 100,
            seconds=seconds,
        )
    finally:  # after SIGTERM, too
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a worker that fails now stops no saving
        if isinstance(trainer, WholeTrainer):
            for name, weights in trainer.saved().items():
                save(recipe, model, weights, args.out.with_name(f"{args.out.name}-{name}"))
        average(recipe, model, args.average)
        model.save(args.out)


def build_trainer(recipe: Adaptation, model: Model, args: argparse.Namespace) -> Training:
    """Return the trainer of the stage that the command line asks for."""
    stage = recipe.stages[args.stage]
    teacher = load(recipe, args.teacher).to(args.device) if args.teacher else model
    options = {"steps": args.steps, "workers": args.workers}
    if args.stage in ("tower", "edges"):
        return TowerAdapter(recipe, model, stage, teacher=teacher, **options)
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
    if args.device != "cpu":
        stream.micro_batch = GPU_TOKENS
    if args.stage == "whole":
        return WholeTrainer(recipe, model, stage, teacher=teacher, stream=stream, **options)
    return TalkTrainer(stage, model, stream, **options)


def save(recipe: Adaptation, model: Model, weights: dict[str, Tensor], out: Path) -> None:
    """Write a checkpoint of other weights of the same model; its own stay as they are."""
    own = {name: one.clone() for name, one in model.llava.state_dict().items()}
    model.llava.load_state_dict(weights)
    model.save(out)
    model.llava.load_state_dict(own)


if __name__ == "__main__":
    main()
