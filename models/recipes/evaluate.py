"""Score a pocket-chat folder on the held-out questions: `python models/recipes/evaluate.py models/pocket-chat`.

Every held-out conversation ends in one right answer. The model decodes greedily; an answer counts when it is the
right text exactly, a tool call when its name and arguments are the right ones.
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

from chat_data import Conversation
from chat_stream import held_out

MAX_NEW_TOKENS = 96


class Verdict(NamedTuple):
    """What the model said to one held-out conversation."""

    item: Conversation
    said: str
    right: bool


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The checkpoint in float32, for a CPU; one that sees, with its eyes."""
    seeing = type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def expected(item: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    """The right answer as the template writes it, without the end of turn."""
    tools = list(item.tools) or None
    whole = tokenizer.apply_chat_template(list(item.messages), tools=tools, tokenize=False)
    return whole[len(prompt(item, tokenizer)) :].removesuffix("\n").removesuffix("<|im_end|>")


def prompt(item: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything before the answer, up to the opening of the assistant's turn."""
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
    """Greedy continuations of a batch of prompts, padded on the left."""
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


def same(said: str, right: str) -> bool:
    """Exact match; tool calls are compared as JSON."""
    if "<tool_call>" not in right:
        return said.strip() == right.strip()
    return _calls(said) == _calls(right)


def _calls(text: str) -> list[object] | None:
    parts = [part.split("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
    try:
        return [json.loads(part) for part in parts]
    except ValueError:
        return None


def judge(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Conversation],
    *,
    batch: int = 64,
) -> Iterator[Verdict]:
    """Answer `items` in batches of similar length."""
    ordered = sorted(items, key=lambda item: len(prompt(item, tokenizer)))
    for start in range(0, len(ordered), batch):
        chunk = ordered[start : start + batch]
        answers = decode(model, tokenizer, [prompt(item, tokenizer) for item in chunk])
        for item, said in zip(chunk, answers, strict=True):
            yield Verdict(item, said, same(said, expected(item, tokenizer)))


def score(folder: Path, *, per_category: int | None = None, show: int = 0) -> dict[str, float]:
    """Accuracy per category; prints `show` wrong answers of each."""
    model, tokenizer = load(folder)
    accuracy: dict[str, float] = {}
    for category, items in held_out().items():
        verdicts = list(judge(model, tokenizer, items[:per_category]))
        accuracy[category] = sum(verdict.right for verdict in verdicts) / len(verdicts)
        for verdict in [verdict for verdict in verdicts if not verdict.right][:show]:
            asked = " / ".join(message["content"] for message in verdict.item.messages[:-1])
            print(
                f"  {category}: {asked!r} → {verdict.said!r}, not {expected(verdict.item, tokenizer)!r}"
            )
    return accuracy


def table(accuracy: dict[str, float], count: int) -> str:
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
    parser.add_argument(
        "--per-category", type=int, help="only the first so many questions of each category"
    )
    parser.add_argument(
        "--show", type=int, default=0, help="print so many wrong answers per category"
    )
    parser.add_argument("--json", type=Path, help="also write the scores here")
    args = parser.parse_args()
    accuracy = score(args.folder, per_category=args.per_category, show=args.show)
    print(table(accuracy, args.per_category or min(len(items) for items in held_out().values())))
    if args.json:
        args.json.write_text(json.dumps(accuracy, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
