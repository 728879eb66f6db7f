"""Test the held-out set by other code: its pictures, requests and marks."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from recipes.heldout import pictures, requests
from recipes.heldout.pictures import Question

RECIPES = Path(__file__).parents[3] / "models" / "recipes"


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(f"{node.module}.{node.names[0].name}")
    return found


def test_it_shares_no_code_with_training_and_training_never_draws_with_its_renderer() -> None:
    for name in ("pictures.py", "requests.py"):
        assert not [one for one in imported(RECIPES / "heldout" / name) if "recipes" in one]
    drawing = [
        path
        for path in RECIPES.rglob("*.py")
        if path.parent.name != "heldout" and "ImageDraw" in path.read_text(encoding="utf-8")
    ]
    assert drawing == []


def test_pictures_are_of_all_sizes_and_show_one_to_six_shapes() -> None:
    examples = [pictures.example(number) for number in range(pictures.PICTURES)]
    assert {len(one.items) for one in examples} == {1, 2, 3, 4, 5, 6}
    sides = [side for one in examples for side in one.image.size]
    assert min(sides) <= 24
    assert max(sides) == 1024
    assert pictures.example(7).image.tobytes() == examples[7].image.tobytes()
    asked = Counter(question.kind for one in examples for question in one.questions)
    assert set(asked) == set(pictures.ASKED)
    assert min(asked.values()) >= 30
    for one in examples:
        shapes = Counter(item.shape for item in one.items)
        for question in one.questions:
            if question.kind == "count":
                shape = question.text.split()[2].removesuffix("s")
                assert question.answer == pictures.WORDS[shapes[shape]]


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        ("two", ["Two.", "two"], ["Three.", "Two red.", ""]),
        ("square", ["A square.", "The square."], ["A circle.", "A square and a star."]),
        (
            Counter({("red", "star"): 2, ("black", "circle"): 1}),
            [
                "Two large red stars and a black circle.",
                "From left to right: a red star, a black circle and a small red star.",
            ],
            [
                "Two red stars.",
                "A red star and a black circle.",
                "Two red stars and an orange circle.",
            ],
        ),
    ],
)
def test_a_reply_about_a_picture_is_right_or_wrong(
    answer: str | Counter[tuple[str, str]], good: list[str], bad: list[str]
) -> None:
    question = Question("any", "?", answer)
    assert all(pictures.right(question, reply) for reply in good)
    assert not any(pictures.right(question, reply) for reply in bad)


def test_there_are_a_hundred_requests_and_their_own_answers_are_right() -> None:
    assert len(requests.REQUESTS) == 100
    assert len({(one.text, len(one.tools)) for one in requests.REQUESTS}) == 100
    for one in requests.REQUESTS:
        if isinstance(one.answer, dict):
            assert one.answer["name"] in [tool["function"]["name"] for tool in one.tools]
            call = f"<tool_call>\n{json.dumps(one.answer)}\n</tool_call>"
            assert requests.right(one, call)
            assert not requests.right(one, call.replace(one.answer["name"], "other"))
            assert not requests.right(one, f"Sorry. {call}")
        else:
            assert requests.right(one, one.answer)
            assert not requests.right(one, "I see.")
