"""Parts of a scored prompt are the same however its scores arrive, moves included."""

from __future__ import annotations

import random

import pytest

from motet_shared.errors import BadRequest, StreamBroken
from motet_shared.messages import PromptPiece, PromptScores, ScoredToken
from motet_tokenizer.prompt_parts import MAX_ENTRIES, PART, PromptParts, check_entries


def spell(token: int) -> bytes:
    return b"<%d>" % token


def scores(prompt: list[int], start: int, end: int) -> PromptScores:
    tokens = [ScoredToken(i, -i / 8, 1 + i, [(0, -0.5)]) for i in prompt[start:end]]
    return PromptScores(start, tokens)


def collected(prompt: list[int], rng: random.Random, *, restarts: int = 0) -> list[PromptPiece]:
    parts = PromptParts(prompt, spell)
    found = list(parts.take())
    at = 1
    while not parts.is_complete:
        size = rng.randint(1, PART)
        found += parts.add(scores(prompt, at, at + size))
        at = min(at + size, len(prompt))
        if restarts and rng.random() < 0.3:
            restarts, at = restarts - 1, 1
    return found


@pytest.mark.parametrize("size", [1, 2, PART, PART + 1, 3 * PART + 7])
def test_parts_do_not_depend_on_how_scores_arrive(size: int) -> None:
    prompt = list(range(size))
    whole = collected(prompt, random.Random(0))
    for seed in range(10):
        assert collected(prompt, random.Random(seed), restarts=3) == whole
    assert [i for piece in whole for i in piece.ids] == prompt
    assert [piece.start for piece in whole] == list(range(0, size, PART))
    entries = [entry for piece in whole for entry in piece.logprobs or ()]
    assert [entry.token for entry in entries] == [spell(i) for i in prompt]
    assert [entry.logprob for entry in entries] == [None, *(-i / 8 for i in prompt[1:])]
    assert [entry.rank for entry in entries[1:]] == [1 + i for i in prompt[1:]]
    assert all(entry.top == [(0, b"<0>", -0.5)] for entry in entries[1:])


def test_missing_scores_break_the_stream() -> None:
    parts = PromptParts(list(range(20)), spell)
    with pytest.raises(StreamBroken):
        list(parts.add(scores(list(range(20)), 5, 9)))


def test_the_number_of_entries_is_bounded() -> None:
    check_entries(MAX_ENTRIES // 21, 20)
    with pytest.raises(BadRequest) as caught:
        check_entries(MAX_ENTRIES // 21 + 1, 20)
    assert caught.value.param == "prompt_logprobs"
