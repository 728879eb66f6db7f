"""Test pictures of scenes, and the checker on correct and on wrong pictures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from recipes.draw.check import check, connected_components, detect_things
from recipes.training.errors import RecipeError
from recipes.world.pictures import GROUND, PALETTE, SIZE, Picture, area, coverage, draw
from recipes.world.scenes import COLOURS, SHAPES, SIZES, Scene, Thing, relation_holds, sample_scene

COUNT = 60  # scenes


def scenes(count: int, *, min_things: int = 1) -> list[tuple[Scene, Random]]:
    made = []
    for seed in range(count):
        rng = Random(f"pictures/{seed}")
        made.append((sample_scene(rng, min_things=min_things), rng))
    return made


def kinds(things: object) -> Counter[tuple[str, str, str | None]]:
    return Counter((one.shape, one.colour, one.size) for one in things)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Scene, Picture]]:
    return [(scene, draw(scene, rng)) for scene, rng in scenes(COUNT)]


def test_drawn_things_are_detected(drawn: list[tuple[Scene, Picture]]) -> None:
    results = [check(picture, scene) for scene, picture in drawn]
    assert [result.reason for result in results if not result.correct] == []
    assert all(
        kinds(detect_things(picture).things) == kinds(scene.things) for scene, picture in drawn
    )


def test_things_are_detected_at_their_positions() -> None:
    for scene, rng in scenes(8, min_things=2):
        found = {one.kind: one for one in detect_things(draw(scene, rng)).things}
        for thing in scene.things:
            for other in scene.things:
                if len(scene.find(thing.kind)) == len(scene.find(other.kind)) == 1:
                    one, two = found[thing.kind], found[other.kind]
                    assert relation_holds("left of", thing, other) == (one.x < two.x - 8)
                    assert relation_holds("above", thing, other) == (one.y < two.y - 8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [None, *SIZES])
def test_every_thing_is_recognized_in_every_colour(shape: str, size: str | None) -> None:
    for column, colour in enumerate(COLOURS):
        thing = Thing(shape=shape, colour=colour, size=size, column=column % 4, row=column % 3)
        [found] = detect_things(draw(Scene(things=(thing,)), Random(column))).things
        assert (found.shape, found.colour, found.size) == (shape, colour, size)


@pytest.mark.parametrize("size", [48, 128])
def test_other_sizes_of_pictures(size: int) -> None:
    for scene, rng in scenes(4):
        assert check(draw(scene, rng, size=size), scene).correct


def _altered(scene: Scene, place: int, **change: object) -> Scene:
    things = list(scene.things)
    things[place] = replace(things[place], **change)  # type: ignore[arg-type]
    return Scene(things=tuple(things))


def test_a_picture_of_another_scene_is_wrong() -> None:
    for scene, rng in scenes(12, min_things=2):
        place, thing = 0, scene.things[0]
        others = {
            "colour": _altered(scene, place, colour=next(c for c in COLOURS if c != thing.colour)),
            "shape": _altered(scene, place, shape=next(s for s in SHAPES if s != thing.shape)),
            "fewer": Scene(things=scene.things[1:]),
        }
        if thing.size is not None:
            others["size"] = _altered(
                scene, place, size="small" if thing.size == "large" else "large"
            )
        for what, other in others.items():
            if kinds(other.things) != kinds(scene.things):
                assert not check(draw(other, rng), scene).correct, what


def test_rows_and_columns_in_another_order_are_wrong_and_scattered_things_have_none() -> None:
    red, blue = Thing(shape="circle", colour="red"), Thing(shape="star", colour="blue")
    for column, row in ((3, 0), (0, 3)):
        right = Scene(things=(red, replace(blue, column=column, row=row)))
        wrong = Scene(things=(replace(red, column=column, row=row), blue))
        assert check(draw(right, Random(1)), right).correct
        assert not check(draw(wrong, Random(1)), right).correct
        assert "in this order" in check(draw(wrong, Random(1)), right).reason
    upright = Scene(things=(red, replace(blue, row=3)))
    flat = Scene(things=(red, replace(blue, column=3)))
    assert not check(draw(upright, Random(1)), flat).correct
    scattered = Scene(things=(red, replace(blue, column=2, row=1)))
    elsewhere = Scene(things=(replace(blue, column=0, row=3), replace(red, column=2, row=1)))
    assert check(draw(elsewhere, Random(1)), scattered).correct


def test_pictures_that_are_spoilt_are_wrong(drawn: list[tuple[Scene, Picture]]) -> None:
    scene, picture = next(one for one in drawn if len(one[0].things) == 3)
    noise = np.random.default_rng(3)
    assert check(
        np.clip(picture + noise.normal(0, 6, picture.shape), 0, 255).astype(np.uint8), scene
    ).correct
    blank = np.full_like(picture, 250)
    smeared = np.round(
        (picture.astype(float) + np.roll(picture, 9, axis=1) + np.roll(picture, 9, axis=0)) / 3
    )
    speckled = picture.copy()
    speckled[::6, ::6] = PALETTE["green"]
    rotated = np.ascontiguousarray(np.rot90(picture, 2))
    for spoilt in (
        blank,
        smeared.astype(np.uint8),
        speckled,
        noise.integers(0, 256, picture.shape, dtype=np.uint8),
    ):
        assert not check(spoilt, scene).correct
    if any(thing.shape == "triangle" for thing in scene.things):
        assert not check(rotated, scene).correct
    with pytest.raises(RecipeError) as refused:
        detect_things(picture[..., 0])
    assert refused.value.param == "picture"


def test_equal_seeds_draw_equal_pictures() -> None:
    [(scene, _)] = scenes(1)
    assert np.array_equal(draw(scene, Random(4)), draw(scene, Random(4)))
    assert not np.array_equal(draw(scene, Random(4)), draw(scene, Random(5)))
    empty = draw(Scene(things=()), Random(1))
    assert GROUND[0] <= empty.min() == empty.max() <= GROUND[1]
    assert check(empty, Scene(things=())).correct


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_adds_up_to_the_area(shape: str) -> None:
    covered = coverage(shape, SIZE / 2, SIZE / 2, 12.0)
    assert covered.sum() == pytest.approx(area(shape) * 144, rel=0.01)
    assert (covered.min(), covered.max()) == (0.0, 1.0)
    assert not coverage(shape, -40.0, 5.0, 3.0).any(), "what is outside is not drawn"


def test_components_are_4_connected() -> None:
    mask = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 1, 1]], bool)
    assert sorted(int(part.sum()) for part in connected_components(mask)) == [1, 2, 3]
    assert connected_components(np.zeros((3, 3), bool)) == []
