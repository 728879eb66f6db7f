"""Who waits and who is served: texts of many requests in one engine, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from motet_embedding.config import EngineConfig
from motet_embedding.encoder import Encoder
from motet_embedding.engine import Engine
from motet_embedding.request_queues import RequestQueues, cost
from motet_embedding.texts import Text
from motet_shared.errors import InternalError, Overloaded

FOLDER = str(Path(__file__).parents[3] / "models" / "pocket-chat")  # whose model is never read
LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=8)


class Counting:
    """An encoder whose vector of a text is its first token and its length."""

    packed = True

    def encode(self, texts: Sequence[Text]) -> Tensor:
        return torch.tensor([[float(text.ids[0]), float(len(text))] for text in texts])


def text(length: int, first: int = 0) -> Text:
    return Text([first] * length)


@given(LENGTHS, st.booleans(), st.integers(1, 60))
def test_every_text_is_taken_once_and_no_pass_costs_more(
    requests: list[list[int]], packed: bool, most: int
) -> None:
    lines = RequestQueues()
    for key, lengths in enumerate(requests):
        lines.add(key, [text(length) for length in lengths])
    seen: list[tuple[int, int]] = []
    while len(lines):
        taken = lines.take(most, packed=packed)
        assert taken
        assert len(taken) == 1 or cost([len(one.text) for one in taken], packed=packed) <= most
        seen += [(cast(int, one.key), one.place) for one in taken]
    assert sorted(seen) == [
        (key, place) for key, lengths in enumerate(requests) for place in range(len(lengths))
    ]
    assert lines.take(most, packed=packed) == []


def test_texts_of_a_lower_priority_wait() -> None:
    lines = RequestQueues()
    lines.add("batch", [text(4)] * 3, priority=-2)
    assert [one.key for one in lines.take(4, packed=True)] == ["batch"]
    lines.add("now", [text(4)] * 2)
    lines.add("late", [text(4)] * 2, priority=-2)
    assert {one.key for one in lines.take(100, packed=True)} == {"now"}
    lines.cancel("late")
    assert [one.key for one in lines.take(100, packed=True)] == ["batch"] * 2
    assert not len(lines)


@given(LENGTHS, st.booleans())
def test_nobody_waits_longer_than_there_are_requests(
    requests: list[list[int]], packed: bool
) -> None:
    lines = RequestQueues()
    for key, lengths in enumerate(requests):
        lines.add(key, [text(length) for length in lengths])
    lines.add("late", [text(7)])
    served: set[object] = set()
    for _ in range(len(requests) + 1):
        served |= {one.key for one in lines.take(10, packed=packed)}
    assert "late" in served


def test_with_padding_texts_of_one_length_share_a_pass() -> None:
    lines = RequestQueues()
    lines.add("a", [text(length) for length in (3, 40, 4, 38, 3, 39)])
    assert [len(one.text) for one in lines.take(16, packed=False)] == [3, 3, 4]
    assert [len(one.text) for one in lines.take(120, packed=False)] == [40, 39, 38]


def test_what_a_pass_costs() -> None:
    assert (
        cost([3, 9, 9], packed=True),
        cost([3, 9, 9], packed=False),
        cost([], packed=False),
    ) == (21, 27, 0)


def test_vectors_come_back_to_their_request_and_place() -> None:
    engine = Engine(EngineConfig(model=FOLDER, max_batch_tokens=6), cast(Encoder, Counting()))
    engine.add("a", [text(2, 10), text(3, 11)])
    engine.add("b", [text(1, 20)])
    found: dict[tuple[object, int], list[float]] = {}
    steps = 0
    while engine.has_work:
        steps += 1
        for output in engine.step():
            for place, row in zip(output.places, output.vectors, strict=True):
                found[output.key, place] = row[0].tolist()
    assert found == {("a", 0): [10, 2], ("a", 1): [11, 3], ("b", 0): [20, 1]}
    assert (
        steps,
        engine.stats()["texts"],
        engine.stats()["tokens"],
        engine.stats()["padding"],
    ) == (1, 3, 6, 0)
    assert engine.step() == []


def test_what_is_cancelled_is_gone_and_what_does_not_fit_is_refused() -> None:
    config = EngineConfig(model=FOLDER, max_waiting=3, max_batch_tokens=1)
    engine = Engine(config, cast(Encoder, Counting()))
    engine.add("a", [text(1), text(1)])
    with pytest.raises(Overloaded, match="max_waiting=3"):
        engine.add("b", [text(1), text(1)])
    with pytest.raises(InternalError):
        engine.add("a", [text(1)])
    engine.step()
    engine.cancel("a")
    engine.cancel("nobody")
    assert not engine.has_work
    engine.add("b", [text(1)] * 3)
    assert engine.stats()["waiting"] == 3


class Refusing(Counting):
    """An encoder that raises if one of the texts has 13 tokens."""

    def encode(self, texts: Sequence[Text]) -> Tensor:
        if any(len(one) == 13 for one in texts):
            raise RuntimeError("a bug of model code")
        return super().encode(texts)


class Spoiling(Counting):
    """An encoder whose vector of a text of 13 tokens is NaN."""

    def encode(self, texts: Sequence[Text]) -> Tensor:
        vectors = super().encode(texts)
        vectors[[len(one) == 13 for one in texts]] = torch.nan
        return vectors


@pytest.mark.parametrize("kind", [Refusing, Spoiling])
def test_a_text_that_cannot_be_computed_ends_its_request_alone(kind: type[Counting]) -> None:
    engine = Engine(EngineConfig(model=FOLDER), cast(Encoder, kind()))
    engine.add("good", [text(length, length) for length in (3, 12, 14)])
    engine.add("bad", [text(2), text(13), *[text(5)] * 40])
    engine.add("other", [text(1, 9)])
    found: dict[object, list[float]] = {}
    errors = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.key, []).extend(float(row[0][0]) for row in output.vectors)
            if output.error is not None:
                errors[output.key] = output.error
    assert (found["good"], found["other"]) == ([3.0, 12.0, 14.0], [9.0])
    assert [(key, type(error)) for key, error in errors.items()] == [("bad", InternalError)]
    is_raised = isinstance(errors["bad"].__cause__, RuntimeError)
    assert is_raised == (kind is Refusing), "its traceback is logged"
    assert engine.stats()["waiting"] == 0
