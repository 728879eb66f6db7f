"""Score what pocket-chat sees on held-out pictures: `python models/recipes/see_evaluate.py models/pocket-chat`.

Every question has one right answer; the model decodes greedily, and an answer counts when it is the right text exactly.
`--draw FOLDER` scores it on pictures that pocket-draw makes of held-out prompts: there an answer is right if it is what
`draw_check` finds on the picture. The score of words alone is `evaluate.py`'s.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from draw_check import MOST_MISFIT, MOST_SPOTS, look
from evaluate import MAX_NEW_TOKENS, expected, prompt, same, table
from see_data import PER_CATEGORY, Sighted, Viewer, glances
from see_mix import LOOKING
from see_questions import VISUAL_ASKERS, as_seen
from world import GRID, MAX_THINGS, Scene, place
from world_pictures import CELL, Picture


class Verdict(NamedTuple):
    """What the model said of a picture."""

    item: Sighted
    said: str
    due: str

    @property
    def right(self) -> bool:
        return same(self.said, self.due)


def load(folder: Path) -> tuple[PreTrainedModel, Any]:
    """The checkpoint in float32, and transformers' processor of it."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(folder)


@torch.inference_mode()
def decode(model: Any, processor: Any, items: Sequence[Sighted]) -> list[str]:
    """Greedy answers to a batch of conversations, padded on the left."""
    inputs = processor(
        text=[prompt(item.made, processor.tokenizer) for item in items],
        images=[[Image.fromarray(picture) for picture in item.pictures] for item in items],
        padding=True,
        padding_side="left",
        add_special_tokens=False,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    return [text.split("<|im_end|>")[0] for text in texts]


def judge(
    model: Any, processor: Any, items: Sequence[Sighted], *, batch: int = 50
) -> Iterator[Verdict]:
    """Answers to `items`, whose last messages are the right ones."""
    for start in range(0, len(items), batch):
        chunk = items[start : start + batch]
        for item, said in zip(chunk, decode(model, processor, chunk), strict=True):
            yield Verdict(item, said, expected(item.made, processor.tokenizer))


def score(
    folder: Path, questions: Mapping[str, Sequence[Sighted]], *, show: int = 0
) -> dict[str, float]:
    """The share of right answers per category; prints `show` wrong ones of each."""
    model, processor = load(folder)
    accuracy: dict[str, float] = {}
    for category, items in questions.items():
        verdicts = list(judge(model, processor, items))
        accuracy[category] = sum(verdict.right for verdict in verdicts) / len(verdicts)
        for verdict in [verdict for verdict in verdicts if not verdict.right][:show]:
            asked = verdict.item.made.messages[-2]["content"]
            print(f"  {category}: {asked!r} → {verdict.said!r}, not {verdict.due!r}")
    return accuracy


# ------------------------------------------------------------------------------------------- pictures that a model made
def found_scene(picture: Picture) -> Scene | None:
    """What the checker sees as a scene; None where it is not sure, or things are not where scenes have them."""
    seen = look(picture)
    if seen.spots > MOST_SPOTS or not 1 <= len(seen.things) <= MAX_THINGS:
        return None
    if any(one.misfit > MOST_MISFIT for one in seen.things):
        return None
    spots = [
        (min(int(one.x / CELL), GRID - 1), min(int(one.y / CELL), GRID - 1)) for one in seen.things
    ]
    if len(set(spots)) < len(spots):
        return None
    things = tuple(place(one.kind, *spot) for one, spot in zip(seen.things, spots, strict=True))
    return as_seen(Scene(things=things))


def about(pictures: Sequence[Picture], *, seed: int = 0) -> dict[str, list[Sighted]]:
    """A question of every category that is possible about each picture; the answers are what the checker finds."""
    asked: dict[str, list[Sighted]] = defaultdict(list)
    for number, picture in enumerate(pictures):
        scene = found_scene(picture)
        for category in VISUAL_ASKERS if scene else ():
            viewer = Viewer(Random(f"about/{seed}/{number}/{category}"), LOOKING)
            viewer.show(scene, picture)  # type: ignore[arg-type]
            if viewer.ask(category):
                asked[category].append(viewer.sighted(category))
    return dict(asked)


def drawn(folder: Path, count: int, steps: int = 16) -> list[Picture]:
    """Pictures that the pipeline in `folder` makes of held-out prompts."""
    import draw_evaluate
    from draw_data import held_out

    pipeline = draw_evaluate.load(folder)
    return draw_evaluate.paint(pipeline, [said for said, _ in held_out(count)], steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--per-category", type=int, default=PER_CATEGORY, help="questions of each category"
    )
    parser.add_argument(
        "--show", type=int, default=0, help="print so many wrong answers per category"
    )
    parser.add_argument(
        "--draw", type=Path, help="a folder of pocket_draw.py, whose pictures are looked at"
    )
    parser.add_argument("--count", type=int, default=100, help="of these pictures")
    parser.add_argument("--json", type=Path, help="also write the scores here")
    args = parser.parse_args()
    questions: Mapping[str, Sequence[Sighted]]
    if args.draw:
        pictures = drawn(args.draw, args.count)
        questions = about(pictures)
        print(
            f"the checker is sure of {sum(found_scene(picture) is not None for picture in pictures)} pictures"
        )
    else:
        questions = {
            category: [one.sighted for one in some]
            for category, some in glances(args.per_category).items()
        }
    accuracy = score(args.folder, questions, show=args.show)
    print(table(accuracy, min(map(len, questions.values()))))
    if args.json:
        args.json.write_text(json.dumps(accuracy, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
