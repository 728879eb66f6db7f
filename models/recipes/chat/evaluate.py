"""Score a pocket-chat folder: `python models/recipes chat.evaluate models/pocket-chat`.

Every held-out conversation ends in one expected answer. The model decodes greedily; a text counts
if it matches exactly, a tool call if its name and arguments do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from recipes.chat.data import Conversation
from recipes.chat.stream import held_out

MAX_NEW_TOKENS = 96


class Answer(NamedTuple):
    """Hold the model's answer to one held-out conversation."""

    item: Conversation
    text: str
    correct: bool


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a text or image-text checkpoint in float32 on the CPU, and its tokenizer."""
    takes_images = type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    loader = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    return loader.from_pretrained(
        folder, dtype=torch.float32
    ).eval(), AutoTokenizer.from_pretrained(folder)


def expected(item: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the expected answer as the template renders it, without the end of turn."""
    tools = list(item.tools) or None
    conversation = tokenizer.apply_chat_template(list(item.messages), tools=tools, tokenize=False)
    return (
        conversation[len(prompt(item, tokenizer)) :].removesuffix("\n").removesuffix("<|im_end|>")
    )


def prompt(item: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    """Render everything before the answer, the assistant's header included."""
    return tokenizer.apply_chat_template(
        list(item.messages[:-1]),
        tools=list(item.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
    )


@torch.inference_mode()
def decode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]
) -> list[str]:
    """Decode a batch of prompts greedily, padded on the left."""
    inputs = tokenizer(
        list(prompts),
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
    )
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    return [text.split("<|im_end|>")[0] for text in texts]


def matches(answer: str, reference: str) -> bool:
    """Compare texts exactly and tool calls as JSON."""
    if "<tool_call>" not in reference:
        return answer.strip() == reference.strip()
    return _calls(answer) == _calls(reference)


def _calls(text: str) -> list[object] | None:
    parts = [part.split("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
    try:
        return [json.loads(part) for part in parts]
    except ValueError:
        return None


def answer_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Conversation],
    *,
    batch: int = 64,
) -> Iterator[Answer]:
    """Answer `items` in batches of similar length."""
    ordered = sorted(items, key=lambda item: len(prompt(item, tokenizer)))
    for start in range(0, len(ordered), batch):
        chunk = ordered[start : start + batch]
        texts = decode(model, tokenizer, [prompt(item, tokenizer) for item in chunk])
        for item, text in zip(chunk, texts, strict=True):
            yield Answer(item, text, matches(text, expected(item, tokenizer)))


def score(folder: Path, *, per_category: int | None = None, show: int = 0) -> dict[str, float]:
    """Return the accuracy by category; print `show` wrong answers of each."""
    model, tokenizer = load(folder)
    accuracy: dict[str, float] = {}
    for category, items in held_out().items():
        answers = list(answer_questions(model, tokenizer, items[:per_category]))
        accuracy[category] = sum(answer.correct for answer in answers) / len(answers)
        for answer in [answer for answer in answers if not answer.correct][:show]:
            question = " / ".join(message["content"] for message in answer.item.messages[:-1])
            print(
                f"  {category}: {question!r} → {answer.text!r}, not {expected(answer.item, tokenizer)!r}"
            )
    return accuracy


def table(accuracy: dict[str, float], count: int) -> str:
    """Format accuracies as a Markdown table."""
    lines = ["| category | questions | exact match |", "|---|---|---|"]
    lines += [f"| {category} | {count} | {value:.1%} |" for category, value in accuracy.items()]
    lines.append(
        f"| **mean** | {count * len(accuracy)} | **{sum(accuracy.values()) / len(accuracy):.1%}** |"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-category", type=int, help="limit on the questions of each category")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per category")
    parser.add_argument("--json", type=Path, help="file for the scores, as JSON")
    args = parser.parse_args()
    accuracy = score(args.folder, per_category=args.per_category, show=args.show)
    print(table(accuracy, args.per_category or min(len(items) for items in held_out().values())))
    if args.json:
        args.json.write_text(json.dumps(accuracy, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
