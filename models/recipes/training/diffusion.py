"""Train and save pipelines of diffusers in stages: what recipes of pictures and of films share.

Shapes: B prompts · L prompt tokens · D size of their vectors · N things or cells.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import T5Tokenizer

from recipes.training.loop import StageTraining, exit_on_sigterm, make_readable
from recipes.world.pictures import GROUND

# The ground's darkest grey, -1 to 1; darker channels belong to a thing.
GROUND_LEVEL = 2 * GROUND[0] / 255 - 1
NOTHING = "nothing"  # the class of a thing or cell that is not there
_SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
_LETTER_LOGPROB = -15.0  # log probability; lower than any word's, so that words stay whole

Model = TypeVar("Model", bound=nn.Module)


def tokenizer_of(prompts: Iterable[str], words: str, length: int) -> T5Tokenizer:
    """Build a unigram tokenizer from the words of prompts; other words split into letters.

    words: regular expression of a word. length: of the longest prompt, tokens.
    """
    counts = Counter(word for prompt in prompts for word in re.findall(words, prompt))
    known = [
        (f"▁{word}", math.log(count / counts.total())) for word, count in sorted(counts.items())
    ]
    letters = [(letter, _LETTER_LOGPROB) for letter in ("▁", *map(chr, range(33, 127)))]
    vocabulary = [*((mark, 0.0) for mark in _SPECIAL_TOKENS), *letters, *known]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=length)


class PromptEncoder(nn.Module):
    """Encode prompts with `text`; training adds heads that predict the labels of `things` things.

    width, heads: of `text`. classes: names of the classes, by property.
    """

    def __init__(
        self,
        text: nn.Module,
        width: int,
        heads: int,
        things: int,
        classes: Sequence[Sequence[str]],
    ) -> None:
        super().__init__()
        self.text = text
        self.queries = nn.Embedding(things, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.heads = nn.ModuleList([nn.Linear(width, len(names)) for names in classes])

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return `[B, L, D]`."""
        hidden_BLD: Tensor = self.text(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        return hidden_BLD

    def label_logits(self, hidden_BLD: Tensor, mask_BL: Tensor) -> list[Tensor]:
        """Return logits `[B, things, classes]` for each property."""
        query_BND = self.queries.weight.expand(len(hidden_BLD), -1, -1)
        thing_BND = self.attention(
            query_BND, hidden_BLD, hidden_BLD, key_padding_mask=mask_BL == 0, need_weights=False
        )[0]
        return [head(thing_BND) for head in self.heads]


def numbered(rows: Iterable[Sequence[Any]], classes: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Return the class numbers of the rows' properties, by property."""
    found = list(rows)
    return [[names.index(row[place]) for row in found] for place, names in enumerate(classes)]


def label_loss(logits: Sequence[Tensor], labels_BPN: Tensor) -> Tensor:
    """Return the cross-entropy of label logits, averaged over things and summed over properties.

    logits: `[B, N, classes]` of each property. labels_BPN: class numbers.
    """
    losses = [
        functional.cross_entropy(one.float().flatten(0, 1), labels_BN.flatten())
        for one, labels_BN in zip(logits, labels_BPN.unbind(1), strict=True)
    ]
    return torch.stack(losses).sum()


def noise_levels(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Return random noise levels `[count]`, 0 to 1, moved towards noise by `shift`."""
    sigma = torch.sigmoid(torch.randn(count, generator=generator, device=generator.device))
    return shift * sigma / (1 + (shift - 1) * sigma)


def reconstruction_error(
    decoded: Tensor, given: Tensor, thing_weight: float, *, is_balanced: bool = False
) -> Tensor:
    """Return the mean error of pictures or films, with more weight where things are.

    decoded, given: `[B, 3, …]`, -1 to 1. thing_weight: additional weight of such pixels.
    is_balanced: it is divided by their contrast, so that yellow counts as much as black.
    """
    of_things = (given.amin(dim=1, keepdim=True) < GROUND_LEVEL).to(given)
    if is_balanced:
        of_things = of_things * 0.25 / (0.5 - given.mean(dim=1, keepdim=True) / 2).clamp(min=0.1)
    error = (decoded - given).abs() + (decoded - given) ** 2
    return (error * (1 + thing_weight * of_things)).mean()


def save_pipeline(pipeline: Any, out: Path, defaults: Mapping[str, Any]) -> None:
    """Write a pipeline in float16, with motet-diffusion's generation defaults."""
    pipeline.to(torch.float16)
    pipeline.save_pretrained(out)
    pipeline.to(torch.float32)
    (out / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n")
    for folder in (out, *(path for path in out.iterdir() if path.is_dir())):
        make_readable(folder)


def progress_line(
    trainer: StageTraining[Any, float], reports: Sequence[float], seconds: float, unit: str
) -> str:
    """Format the stage, step, mean loss and examples per second; `unit` names these."""
    rate = len(reports) * trainer.stage.batch / seconds
    fields = {
        "stage": trainer.name,
        "step": trainer.step,
        "loss": round(sum(reports) / len(reports), 4),
        f"{unit}_per_s": round(rate, 1),
    }
    return json.dumps(fields)


def train_stages(
    model: Model,
    trainers: Mapping[str, Callable[[], StageTraining[Any, Any]]],
    state: Path,
    *,
    resume: bool,
    every: float,
    log: int,
    ended: Callable[[str], None],
    only: Sequence[str] = (),
    seconds: Mapping[str, float] = MappingProxyType({}),
) -> Model:
    """Train all stages, each with its own state beside `state`; complete ones are only loaded.

    trainers: return the trainer of a stage, in order. only: train these alone; the states of the
    others are loaded if `resume` and if they are there. seconds: of stages that time bounds.
    every: seconds between two saved states. log: steps between two lines. ended: called with each
    stage that has run, complete or not.
    """
    for stage, trainer_of in trainers.items():
        model.requires_grad_(True)  # optimizers take no frozen parameters
        trainer = trainer_of()
        model.requires_grad_(False)
        trainer.module.requires_grad_(True)
        path = state.with_name(f"{stage}.pt")
        if resume and path.exists():
            trainer.load_state(path)
        is_wanted = not only or stage in only
        if is_wanted:
            trainer.run(path, every=every, log=log, seconds=seconds.get(stage))
        ended(stage)
        if is_wanted and trainer.share < 1.0:
            break
    return model


def stage_parser(
    text: str | None, stages: Iterable[str], name: str, seed: int
) -> argparse.ArgumentParser:
    """Return the arguments of a training; `name` is the model's, `seed` the recipe's."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--state", type=Path, default=Path(f".cache/{name}/state.pt"))
    parser.add_argument(
        "--resume", action="store_true", help="continue from the states beside --state"
    )
    for stage in stages:
        parser.add_argument(
            f"--{stage}-steps", type=int, default=0, help="steps of this stage; 0 uses the recipe's"
        )
    return parser


def parsed(
    parser: argparse.ArgumentParser, stages: Iterable[str]
) -> tuple[argparse.Namespace, dict[str, int]]:
    """Parse the command line, and return the steps of each stage too; SIGTERM saves the state."""
    args = parser.parse_args()
    exit_on_sigterm()
    return args, {stage: getattr(args, f"{stage}_steps") for stage in stages}
