"""Marks of media become their tokens, as if the whole text had been encoded at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from motet_shared.errors import BadRequest
from motet_tokenizer.encoding.template import ChatTemplate
from support.checkpoints.language_checkpoints import VOCAB, write_tokenizer
from support.running.refusals import refuses

BREAKS = "ĊĊ"  # two line breaks, in the letters of byte-level vocabularies


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer with marks, and with a token for two line breaks."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    like = content["added_tokens"][0]
    for token in content["added_tokens"]:  # behind the vocabulary, which grows by one
        token["id"] += 1
    content["added_tokens"] += [
        {**like, "id": VOCAB + 1 + number, "content": mark}
        for number, mark in enumerate(("<begin>", "<soft>"))
    ]
    content["pre_tokenizer"]["use_regex"] = False  # as Gemma, which does not split at line breaks
    content["model"]["vocab"][BREAKS] = 256
    content["model"]["merges"] = [["Ċ", "Ċ"]]
    file.write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text", ["Look:\nM\n\nSo?", "M", "M\nM", "a\n\n\nM\n\n\n\nb", "\nM\n", "Look: M and M."]
)
def test_line_breaks_at_borders_are_encoded_together(tokenizer: Any, text: str) -> None:
    begin = tokenizer.convert_tokens_to_ids("<begin>")
    template = ChatTemplate(tokenizer, "eyes", {"image": begin})
    picture = "\n\n<begin><soft><soft>\n\n"

    def encode(whole: str) -> list[int]:
        ids: list[int] = tokenizer.encode(whole, add_special_tokens=False)
        return ids

    prompt = encode(text.replace("M", "<begin>"))
    pictures = [encode(picture)] * text.count("M")
    senses = ["image"] * len(pictures)
    expanded = template.expand_placeholders(prompt, senses, pictures)
    assert expanded == encode(text.replace("M", picture))


@pytest.mark.parametrize("senses", [[], ["image"], ["image", "audio"], ["audio", "image", "image"]])
def test_media_of_other_numbers_or_order_are_refused(tokenizer: Any, senses: list[str]) -> None:
    template = ChatTemplate(tokenizer, "eyes", {"image": 2, "audio": 3})
    assert template.expand_placeholders([1, 3, 2], ["audio", "image"], [[8], [9]]) == [1, 8, 9]
    with refuses(BadRequest, "messages"):
        template.expand_placeholders([1, 3, 2], senses, [[8]] * len(senses))
