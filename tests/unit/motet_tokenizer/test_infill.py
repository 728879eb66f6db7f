"""Prompts with a suffix have the form that the tokenizer's control tokens stand for."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, processors

from motet_tokenizer.encoding.infill import Infill
from support.checkpoints.tiny_tokenizers import byte_level

PREFIX, SUFFIX = "def red(", "):\n"
PSM = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
]


def tokenizer(*tokens: str) -> Tokenizer:
    backend = Tokenizer.from_str(byte_level().to_str())
    backend.add_special_tokens([*tokens])
    return backend


def shown(backend: Tokenizer, ids: list[int]) -> str:
    return str(backend.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("names", PSM)
def test_prefix_suffix_middle(names: tuple[str, str, str]) -> None:
    backend = tokenizer(*names)
    infill = Infill.of(backend)
    assert infill is not None
    before, between, after = names
    prompt = infill.encode(backend, PREFIX, SUFFIX)
    assert shown(backend, prompt) == f"{before}{PREFIX}{between}{SUFFIX}{after}"
    assert set(map(backend.token_to_id, names)) <= infill.ends


def test_suffix_first() -> None:
    backend = tokenizer("[PREFIX]", "[SUFFIX]")
    infill = Infill.of(backend)
    assert infill is not None
    prompt = infill.encode(backend, PREFIX, SUFFIX)
    assert shown(backend, prompt) == f"[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}"


def test_the_first_token_of_a_text_stays_the_first() -> None:
    backend = tokenizer("<s>", *PSM[0])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    infill = Infill.of(backend)
    assert infill is not None
    prompt = infill.encode(backend, PREFIX, SUFFIX)
    assert [token for token in prompt if token == start] == [start]
    assert prompt[:2] == [start, backend.token_to_id("<|fim_prefix|>")]


def test_a_tokenizer_without_them() -> None:
    assert Infill.of(byte_level()) is None
    assert Infill.of(tokenizer("<|fim_prefix|>", "<|fim_suffix|>")) is None
