"""Score pocket-chat on held-out pictures: `python models/recipes see.evaluate FOLDER`.

Every question has one expected answer; the model decodes greedily, and an answer counts if it
matches exactly. `--draw FOLDER` scores it on pictures that pocket-draw generates from held-out
prompts; the expected answer is then what `draw.check` detects. `chat/evaluate.py` scores text-only
questions.
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

from recipes.chat.evaluate import MAX_NEW_TOKENS, expected, matches, prompt, table
from recipes.draw.check import MAX_MISFIT, MAX_SPECKLE, detect_things
from recipes.see.data import PER_CATEGORY, PictureConversation, PictureWriter, held_out_questions
from recipes.see.mix import VIEWING
from recipes.see.questions import VISUAL_QUESTION_MAKERS, in_reading_order
from recipes.world.pictures import CELL, Picture
from recipes.world.scenes import GRID, MAX_THINGS, Scene, place


class PictureAnswer(NamedTuple):
    """Hold the model's answer to a question about a picture."""

    item: PictureConversation
    text: str
    expected_text: str

    @property
    def correct(self) -> bool:
        """Return True if the answer matches."""
        return matches(self.text, self.expected_text)


def load(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Load the checkpoint in float32, and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(folder)


@torch.inference_mode()
def decode(model: Any, processor: Any, items: Sequence[PictureConversation]) -> list[str]:
    """Decode a batch of conversations greedily, padded on the left."""
    inputs = processor(
        text=[prompt(item.conversation, processor.tokenizer) for item in items],
        images=[[Image.fromarray(picture) for picture in item.pictures] for item in items],
        padding=True,
        padding_side="left",
        add_special_tokens=False,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    return [text.split("<|im_end|>")[0] for text in texts]


def answer_questions(
    model: Any, processor: Any, items: Sequence[PictureConversation], *, batch: int = 50
) -> Iterator[PictureAnswer]:
    """Answer `items`, whose last messages are the expected answers."""
    for start in range(0, len(items), batch):
        chunk = items[start : start + batch]
        for item, text in zip(chunk, decode(model, processor, chunk), strict=True):
            yield PictureAnswer(item, text, expected(item.conversation, processor.tokenizer))


def score(
    folder: Path, questions: Mapping[str, Sequence[PictureConversation]], *, show: int = 0
) -> dict[str, float]:
    """Return the accuracy by category; print `show` wrong answers of each."""
    model, processor = load(folder)
    accuracy: dict[str, float] = {}
    for category, items in questions.items():
        answers = list(answer_questions(model, processor, items))
        accuracy[category] = sum(answer.correct for answer in answers) / len(answers)
        for answer in [answer for answer in answers if not answer.correct][:show]:
            question = answer.item.conversation.messages[-2]["content"]
            print(f"  {category}: {question!r} → {answer.text!r}, not {answer.expected_text!r}")
    return accuracy


# ------------------------------------------------------------------------------------------------ generated pictures
def detected_scene(picture: Picture) -> Scene | None:
    """Return the detected scene; None if the detection is uncertain or fits no grid."""
    detection = detect_things(picture)
    if detection.speckle > MAX_SPECKLE or not 1 <= len(detection.things) <= MAX_THINGS:
        return None
    if any(one.misfit > MAX_MISFIT for one in detection.things):
        return None
    cells = [
        (min(int(one.x / CELL), GRID - 1), min(int(one.y / CELL), GRID - 1))
        for one in detection.things
    ]
    if len(set(cells)) < len(cells):
        return None
    things = tuple(
        place(one.kind, *cell) for one, cell in zip(detection.things, cells, strict=True)
    )
    return in_reading_order(Scene(things=things))


def questions_about(
    pictures: Sequence[Picture], *, seed: int = 0
) -> dict[str, list[PictureConversation]]:
    """Return a question of each possible category per picture, answered from the detection."""
    found: dict[str, list[PictureConversation]] = defaultdict(list)
    for number, picture in enumerate(pictures):
        scene = detected_scene(picture)
        for category in VISUAL_QUESTION_MAKERS if scene else ():
            writer = PictureWriter(Random(f"about/{seed}/{number}/{category}"), VIEWING)
            writer.show(scene, picture)  # type: ignore[arg-type]
            if writer.ask(category):
                found[category].append(writer.finish_with_pictures(category))
    return dict(found)


def drawn(folder: Path, count: int, steps: int = 16) -> list[Picture]:
    """Generate pictures of held-out prompts with the pipeline in `folder`."""
    from recipes.draw import evaluate as draw_evaluate
    from recipes.draw.data import held_out

    pipeline = draw_evaluate.load(folder)
    return draw_evaluate.generate(pipeline, [prompt for prompt, _ in held_out(count)], steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--per-category", type=int, default=PER_CATEGORY, help="questions of each category"
    )
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per category")
    parser.add_argument(
        "--draw", type=Path, help="folder of pocket_draw.py; asks about its pictures instead"
    )
    parser.add_argument("--count", type=int, default=100, help="pictures to generate with --draw")
    parser.add_argument("--json", type=Path, help="file for the scores, as JSON")
    args = parser.parse_args()
    questions: Mapping[str, Sequence[PictureConversation]]
    if args.draw:
        pictures = drawn(args.draw, args.count)
        questions = questions_about(pictures)
        print(
            f"draw_check detects {sum(detected_scene(picture) is not None for picture in pictures)} pictures"
        )
    else:
        questions = {
            category: [one.example for one in some]
            for category, some in held_out_questions(args.per_category).items()
        }
    accuracy = score(args.folder, questions, show=args.show)
    print(table(accuracy, min(map(len, questions.values()))))
    if args.json:
        args.json.write_text(json.dumps(accuracy, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
