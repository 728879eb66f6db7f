"""Score pocket-chat on held-out sets made by other code: `python models/recipes heldout.evaluate FOLDER`.

Pictures by Pillow, and requests of `recipes.heldout.requests`. The model decodes greedily.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from recipes.heldout import pictures, requests

MAX_NEW_TOKENS = 96


def load(folder: Path) -> tuple[Any, Any]:
    """Load the checkpoint in float32, and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoProcessor.from_pretrained(folder)


@torch.inference_mode()
def reply(model: Any, processor: Any, messages: list, *, tools: list | None = None) -> str:
    """Return the model's reply to messages, whose pictures are PIL images."""
    images = [
        part["image"]
        for message in messages
        for part in (message["content"] if isinstance(message["content"], list) else ())
        if part["type"] == "image"
    ]
    text = processor.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    inputs = processor(
        text=[text], images=images or None, add_special_tokens=False, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    told: str = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :])[0]
    return told.split("<|im_end|>")[0]


def score_pictures(model: Any, processor: Any, count: int, *, show: int = 0) -> dict[str, float]:
    """Return the share of right replies by kind of question, and of all."""
    marks: dict[str, list[bool]] = defaultdict(list)
    for number in range(count):
        example = pictures.example(number)
        for question in example.questions:
            content = [
                {"type": "image", "image": example.image},
                {"type": "text", "text": question.text},
            ]
            told = reply(model, processor, [{"role": "user", "content": content}])
            mark = pictures.right(question, told)
            marks[question.kind].append(mark)
            if not mark and sum(not one for one in marks[question.kind]) <= show:
                size = example.image.size
                print(f"  {number} {size}: {question.text!r} → {told!r}, not {question.answer!r}")
    return _shares(marks)


def score_requests(model: Any, processor: Any, *, show: int = 0) -> dict[str, float]:
    """Return the share of right replies to requests, by kind, and of all."""
    marks: dict[str, list[bool]] = defaultdict(list)
    for request in requests.REQUESTS:
        message = [{"role": "user", "content": request.text}]
        told = reply(model, processor, message, tools=list(request.tools) or None)
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
