"""Test the micro-world: grammar, geometry, and answers against an independent parse of the text."""

from __future__ import annotations

import itertools
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.chat.edits import instruct
from recipes.training.errors import RecipeError
from recipes.world.questions import QUESTION_MAKERS
from recipes.world.scenes import (
    ARRANGEMENTS,
    COLOURS,
    NUMBERS,
    RELATIONS,
    SHAPES,
    Kind,
    Scene,
    Thing,
    canonical,
    describe,
    inventory,
    questions,
    relation_holds,
    sample_scene,
    with_article,
)

seeds = st.integers(0, 2**32)


def scene_of(*things: tuple[str, str, int, int]) -> Scene:
    return Scene(things=tuple(Thing(colour=c, shape=s, column=x, row=y) for c, s, x, y in things))


def read(phrase: str) -> Kind:
    """Parse a noun phrase such as "the small red circle" into its kind."""
    words = [word.rstrip("?.").removesuffix("s") for word in phrase.split()]
    return Kind(
        shape=next((w for w in words if w in SHAPES), None),
        colour=next((w for w in words if w in COLOURS), None),
        size=next((w for w in words if w in ("small", "large")), None),
    )


def test_words_of_the_world() -> None:
    assert len(NUMBERS) == 21
    assert NUMBERS[20] == "twenty"
    assert len(SHAPES) == 4
    assert len(COLOURS) == 7


def test_inventory_counts_articles_and_plurals() -> None:
    scene = scene_of(("red", "circle", 0, 0), ("red", "circle", 1, 2), ("orange", "star", 3, 1))
    assert inventory(scene) == "two red circles and an orange star"
    assert inventory(scene, digits=True) == "2 red circles and 1 orange star"
    assert canonical(scene) == "Two red circles and an orange star."


def test_rows_and_columns_are_told_in_order() -> None:
    row = scene_of(("red", "circle", 0, 1), ("blue", "star", 2, 1))
    column = scene_of(("red", "circle", 2, 0), ("blue", "star", 2, 3))
    assert canonical(row) == "From left to right: a red circle and a blue star."
    assert canonical(column) == "From top to bottom: a red circle and a blue star."


def test_an_empty_scene_is_nothing() -> None:
    assert canonical(Scene(things=())) == "Nothing."


@pytest.mark.parametrize(
    ("param", "make"),
    [
        ("colour", lambda: Thing(colour="pink", shape="star")),
        ("shape", lambda: Thing(colour="red", shape="cube")),
        ("size", lambda: Thing(colour="red", shape="star", size="huge")),
        ("column", lambda: Thing(colour="red", shape="star", column=4)),
        ("row", lambda: Thing(colour="red", shape="star", row=-1)),
        ("things", lambda: scene_of(("red", "star", 0, 0), ("blue", "star", 0, 0))),
        (
            "things",
            lambda: Scene(things=tuple(Thing(colour="red", shape="star") for _ in range(7))),
        ),
    ],
)
def test_a_wrong_property_is_refused_by_name(param: str, make) -> None:
    with pytest.raises(RecipeError) as refused:
        make()
    assert refused.value.param == param


@given(seeds)
def test_same_seed_same_scene_and_words(seed: int) -> None:
    first, second = Random(seed), Random(seed)
    assert sample_scene(first) == (scene := sample_scene(second))
    assert describe(scene, first) == describe(scene, second)
    assert questions(scene, first) == questions(scene, second)


@given(seeds, st.sampled_from(ARRANGEMENTS))
def test_sampled_scenes_have_the_arrangement_asked_for(seed: int, arrangement) -> None:
    scene = sample_scene(Random(seed), arrangement=arrangement)
    assert 1 <= len(scene.things) <= 4
    assert scene.arrangement == arrangement


@given(seeds)
def test_no_part_of_a_scattered_scene_is_a_row_or_column(seed: int) -> None:
    scene = sample_scene(Random(seed), arrangement="scatter")
    for part in itertools.combinations(scene.things, min(2, len(scene.things))):
        assert Scene(things=part).arrangement == "scatter"


@given(seeds)
def test_relations_are_opposites(seed: int) -> None:
    scene = sample_scene(Random(seed), min_things=2)
    for one, other in itertools.permutations(scene.things, 2):
        for relation, opposite in (RELATIONS[:2], RELATIONS[2:]):
            assert relation_holds(relation, one, other) == relation_holds(opposite, other, one)


@given(seeds)
def test_descriptions_name_every_thing_with_the_right_article(seed: int) -> None:
    rng = Random(seed)
    scene = sample_scene(rng)
    text = describe(scene, rng).lower()
    for _, kind in scene.groups():
        assert kind.phrase() in text
    for article, following in re.findall(r"\b(an?) (\w+)", text):
        assert with_article(following) == f"{article} {following}"


@given(seeds)
def test_answers_agree_with_a_second_reading(seed: int) -> None:
    rng = Random(seed)
    scene = sample_scene(rng)
    for category, text, answer in questions(scene, rng):
        assert category in QUESTION_MAKERS
        assert answer[0].isupper()
        assert answer.endswith(".")
        if category == "count":
            wanted = len(scene.find(read(text)))
            assert answer == (NUMBERS[wanted].capitalize() + "." if wanted else "None.")
        elif category == "existence":
            assert answer == ("Yes." if scene.find(read(text)) else "No.")
        elif category == "colour" and not answer.startswith("There is no"):
            (thing,) = scene.find(read(text.rpartition("the ")[2]))
            assert answer == f"{thing.colour.capitalize()}."


@given(seeds)
def test_yes_or_no_relations_agree_with_the_geometry(seed: int) -> None:
    rng = Random(seed)
    scene = sample_scene(rng, arrangement=rng.choice(("row", "column")))
    for category, text, answer in questions(scene, rng):
        asked = re.search(
            r"[Ii]s (the [\w ]+?) (left of|right of|above|below) (the [\w ]+)\?", text
        )
        if not category.startswith("relation") or not asked or answer not in ("Yes.", "No."):
            continue
        (one,), (other,) = scene.find(read(asked[1])), scene.find(read(asked[3]))
        assert answer == ("Yes." if relation_holds(asked[2], one, other) else "No.")


@given(seeds)
def test_instructions_change_the_scene_as_they_say(seed: int) -> None:
    rng = Random(seed)
    scene = sample_scene(rng, min_things=2)
    edit = instruct(scene, rng)
    if edit is None:
        return
    before, after = len(scene.things), len(edit.scene.things)
    verb = edit.text.split()[0]
    if verb in ("Remove", "Take", "Delete", "Drop"):
        assert after < before
    elif verb in ("Add", "Put", "Also"):
        assert before < after <= 4
    else:
        assert after == before
        assert edit.scene != scene
    if verb in ("Swap", "Exchange"):
        assert {thing.kind for thing in edit.scene.things} == {thing.kind for thing in scene.things}
    if after > 1:
        assert edit.scene.arrangement == scene.arrangement


def test_a_scene_with_twins_has_no_question_that_needs_one_of_them() -> None:
    scene = scene_of(("red", "circle", 0, 0), ("red", "circle", 1, 2))
    for seed in range(200):
        assert all(
            question.category in ("count", "existence", "description")
            or question.answer.startswith("There is no")
            for question in questions(scene, Random(seed))
        )
