"""Score pocket-chat on held-out sets made by other code: `python models/recipes heldout.evaluate FOLDER`.

Pictures by Pillow, and requests of `recipes.heldout.requests`. The model decodes greedily.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from recipes.heldout import pictures, requests

MAX_NEW_TOKENS = 96


class Chat(NamedTuple):
    """Hold the messages of a chat, their one picture, and the declared tools."""

    messages: Sequence[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    image: Any = None


def load(folder: Path) -> tuple[Any, Any]:
    """Load the checkpoint in float32, and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoProcessor.from_pretrained(folder)


@torch.inference_mode()
def replies(model: Any, processor: Any, chats: Sequence[Chat], *, batch: int = 25) -> list[str]:
    """Return the model's reply to each of some chats, padded on the left in batches.

    Chats of one call all have pictures, or none has.
    """
    found: list[str] = []
    for start in range(0, len(chats), batch):
        chunk = chats[start : start + batch]
        texts = [
            processor.tokenizer.apply_chat_template(
                list(chat.messages), tools=chat.tools, tokenize=False, add_generation_prompt=True
            )
            for chat in chunk
        ]
        images = [[chat.image] for chat in chunk] if chunk[0].image else None
        inputs = processor(
            text=texts,
            images=images,
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_tensors="pt",
        )
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        told = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :])
        found += [text.split("<|im_end|>")[0] for text in told]
    return found


def score_pictures(model: Any, processor: Any, count: int, *, show: int = 0) -> dict[str, float]:
    """Return the share of right replies by kind of question, and of all."""
    marks: dict[str, list[bool]] = defaultdict(list)
    for number in range(count):
        example = pictures.example(number)
        chats = []
        for question in example.questions:
            content = [
                {"type": "image", "image": example.image},
                {"type": "text", "text": question.text},
            ]
            chats.append(Chat([{"role": "user", "content": content}], image=example.image))
        for question, told in zip(example.questions, replies(model, processor, chats), strict=True):
            mark = pictures.right(question, told)
            marks[question.kind].append(mark)
            if not mark and sum(not one for one in marks[question.kind]) <= show:
                size = example.image.size
                print(f"  {number} {size}: {question.text!r} → {told!r}, not {question.answer!r}")
    return _shares(marks)


def score_requests(model: Any, processor: Any, *, show: int = 0) -> dict[str, float]:
    """Return the share of right replies to requests, by kind, and of all."""
    marks: dict[str, list[bool]] = defaultdict(list)
    chats = [
        Chat([{"role": "user", "content": one.text}], tools=list(one.tools) or None)
        for one in requests.REQUESTS
    ]
    for request, told in zip(requests.REQUESTS, replies(model, processor, chats), strict=True):
        mark = requests.right(request, told)
        marks[request.kind].append(mark)
        if not mark and sum(not one for one in marks[request.kind]) <= show:
            print(f"  {request.kind}: {request.text!r} → {told!r}, not {request.answer!r}")
    return _shares(marks)


def _shares(marks: dict[str, list[bool]]) -> dict[str, float]:
    found = {kind: sum(some) / len(some) for kind, some in marks.items()}
    every = [mark for some in marks.values() for mark in some]
    return {**found, f"all {len(every)}": sum(every) / len(every)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=pictures.PICTURES)
    parser.add_argument("--show", type=int, default=0, help="wrong replies to print of each kind")
    parser.add_argument("--no-requests", action="store_true", help="pictures only")
    args = parser.parse_args()
    model, processor = load(args.folder)
    scores = score_pictures(model, processor, args.pictures, show=args.show)
    if not args.no_requests:
        scores |= score_requests(model, processor, show=args.show)
    for kind, share in scores.items():
        print(f"{kind:20} {share:7.1%}")


if __name__ == "__main__":
    main()
