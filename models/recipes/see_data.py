"""What the seeing pocket-chat learns from: pictures cell by cell, and conversations about pictures.

Everything is a function of (seed, index). Scenes are held out by what a picture of them shows, whatever the seed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import chat_tools as tools
from chat_data import Conversation, Writer, assistant, casual, user, weighted
from chat_mix import Mix
from chat_stream import HELD_OUT_SEEDS, blocked
from draw_data import is_held_out
from see_mix import LOOKING
from see_questions import VISUAL_ASKERS, as_seen
from world import (
    COLOURS,
    GRID,
    SHAPES,
    SIZES,
    Kind,
    Scene,
    Thing,
    describe,
    inventory,
    place,
    sample_kind,
    sample_scene,
)
from world_pictures import SIZE, Picture, draw, draw_things

PER_CATEGORY = 200
CELLS = GRID * GRID
# Whatever may stand in a cell, by its number; 0 is nothing.
KINDS = (
    None,
    *(
        Kind(shape=shape, colour=colour, size=size)
        for shape in SHAPES
        for colour in COLOURS
        for size in (*SIZES, None)
    ),
)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}

_PLACED = (
    "relation-horizontal",
    "relation-vertical",
    "where",
)  # what an instruction in words leaves open


class Sighted(NamedTuple):
    """A conversation and its pictures, in the order in which they stand in it."""

    made: Conversation
    pictures: tuple[Picture, ...]


# ---------------------------------------------------------------------------------------------------------- pictures
class Cells(NamedTuple):
    """A picture and what stands in each cell, row after row: its number in KINDS."""

    picture: Picture
    kinds: NDArray[np.int64]


def cells(seed: int, index: int, *, crowded: float) -> Cells:
    """A picture for the tower; a share `crowded` of them has things in any number of cells."""
    rng = _training(f"cells/{seed}", seed, index)
    if rng.random() < crowded:
        share = rng.uniform(0.1, 0.8)
        spots = [
            (column, row) for row in range(GRID) for column in range(GRID) if rng.random() < share
        ]
        things = tuple(place(sample_kind(rng, sized=2 / 3), *spot) for spot in spots)
    else:
        things = _scene(rng).things
    return Cells(photograph(things, rng), contents(things))


def contents(things: tuple[Thing, ...]) -> NDArray[np.int64]:
    """The number of what stands in each cell, row after row."""
    found = np.zeros(CELLS, np.int64)
    for thing in things:
        found[thing.row * GRID + thing.column] = _NUMBERS[thing.kind]
    return found


def photograph(things: tuple[Thing, ...], rng: Random) -> Picture:
    """A picture as clients send them: at times from another size, a pixel or two aside, with noise, as a JPEG file."""
    picture = (
        draw_things(things, rng, size=2 * SIZE) if rng.random() < 0.1 else draw_things(things, rng)
    )
    if len(picture) > SIZE:
        picture = np.asarray(
            Image.fromarray(picture).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        )
    if rng.random() < 0.3:
        picture = _moved(picture, rng.randint(-2, 2), rng.randint(-2, 2))
    if rng.random() < 0.3:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(
            0.0, rng.uniform(1.0, 10.0), picture.shape
        )
        picture = np.rint(np.clip(picture + noise, 0, 255)).astype(np.uint8)
    return _squeezed(picture, rng.randint(70, 95)) if rng.random() < 0.1 else picture


def _moved(picture: Picture, right: int, down: int) -> Picture:
    """With the picture's first grey where nothing is known."""
    wide = np.pad(picture, ((2, 2), (2, 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(wide[2 - down : 2 - down + SIZE, 2 - right : 2 - right + SIZE])


def _squeezed(picture: Picture, quality: int) -> Picture:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def _training(name: str, seed: int, index: int) -> Random:
    if seed in HELD_OUT_SEEDS:
        raise ValueError(
            f"seed {seed} is held out for evaluation: train with one below {HELD_OUT_SEEDS.start}"
        )
    return Random(f"see/{name}/{index}")


def held_back(scene: Scene) -> bool:
    """Whether pictures of this scene are kept from training."""
    return is_held_out(as_seen(scene))


def _scene(rng: Random) -> Scene:
    """A scene to learn from; one in fifty is empty."""
    if rng.random() < 0.02:
        return Scene(things=())
    while held_back(scene := sample_scene(rng)):
        pass
    return scene


# ----------------------------------------------------------------------------------------------------- conversations
class Viewer(Writer):
    """Writes a conversation in which scenes are shown instead of told."""

    def __init__(self, rng: Random, mix: Mix, *, plain: bool = False) -> None:
        super().__init__(rng, mix, plain=plain)
        self.pictures: list[Picture] = []
        self.coming = False  # whether the next user turn begins or ends with a picture
        self.changed = False  # whether words have changed the scene since
        self.held = False  # whether a scene of it is kept from training

    def set_scene(self, scene: Scene) -> None:
        super().set_scene(scene)
        self.held = self.held or held_back(scene)

    def show(self, scene: Scene, picture: Picture) -> None:
        """The next user turn has this picture."""
        self.set_scene(as_seen(scene))
        self.pictures.append(picture)
        self.coming, self.changed = True, False

    def exchange(self, text: str, answer: str) -> None:
        super().exchange(text, answer)
        if self.coming:
            self.messages[-2]["content"] = with_picture(self.messages[-2]["content"], self.rng)
            self.coming = False

    def ask(self, category: str) -> bool:
        assert self.scene is not None
        if category == "instruction":
            self.changed = super().ask(category) or self.changed
            return self.changed
        if self.changed and category in _PLACED:
            return False
        question = VISUAL_ASKERS[category](self.scene, self.rng)
        if question is None:
            return False
        self.exchange(question.text, question.answer)
        return True

    def sighted(
        self, category: str = "mixed", declared: tuple[dict[str, Any], ...] = ()
    ) -> Sighted:
        return Sighted(self.done(category, declared), tuple(self.pictures))


def with_picture(text: str, rng: Random) -> list[dict[str, str]]:
    """A user's content of a picture and a text, mostly in this order."""
    parts = [{"type": "image"}, {"type": "text", "text": text}]
    return parts if rng.random() < 0.75 else parts[::-1]


def look_talk(rng: Random, mix: Mix) -> Sighted | None:
    """Questions about a picture, other turns between them, now and then another picture."""
    viewer = Viewer(rng, mix)
    viewer.system()
    scene = _scene(rng)
    viewer.show(scene, photograph(scene.things, rng))
    if rng.random() < 0.05:
        viewer.exchange("Look at this.", "I see.")
    for _ in range(rng.choice((4, 6, 8, 10))):
        viewer.ask(weighted(rng, mix.scene))
        draw = rng.random()
        if draw < 0.04 and not viewer.coming:
            viewer.talk(weighted(rng, mix.talk))
        elif draw < 0.16 and not viewer.coming:
            scene = _scene(rng)
            viewer.show(scene, photograph(scene.things, rng))
        elif draw < 0.18 and not viewer.coming:  # told, after something was shown
            told = sample_scene(rng)
            viewer.set_scene(told)
            viewer.exchange(describe(told, rng), "I see.")
            viewer.changed = True
    if viewer.coming:
        viewer.ask("description")
    return None if viewer.held else viewer.sighted()


def drawn_talk(rng: Random, mix: Mix) -> Sighted | None:
    """The tool draws; its answer has the picture, or the user's next turn; questions about it follow."""
    viewer = Viewer(rng, mix)
    viewer.system()
    scene = _scene(rng)
    if not scene.things:
        return None
    what = inventory(scene)
    viewer.messages += [user(casual(tools.ask_to_draw(what, rng), rng))]
    if what not in viewer.messages[-1]["content"]:
        what = what.replace(",", "")
    viewer.messages += [tools.call(what)]
    content: str | list[dict[str, str]] = rng.choice(
        ("ok", "done", "Image created.", "The image is shown to the user.")
    )
    picture = photograph(scene.things, rng)
    if shown := rng.random() < 0.6:
        content = rng.choice(([{"type": "image"}], with_picture(str(content), rng)))
        viewer.set_scene(as_seen(scene))
        viewer.pictures.append(picture)
    viewer.messages += [
        {"role": "tool", "name": "draw", "content": content},
        assistant(f"Here is {what}."),
    ]
    if not shown:
        viewer.show(scene, picture)
    viewer.ask("description")
    for _ in range(rng.randint(1, 6)):
        viewer.ask(weighted(rng, mix.scene))
    return None if viewer.held else viewer.sighted(declared=(tools.draw_tool(rng),))


_MAKERS: dict[str, Callable[[Random, Mix], Sighted | None]] = {
    "look": look_talk,
    "drawn": drawn_talk,
}


def sighted(seed: int, index: int, *, mix: Mix = LOOKING) -> Sighted:
    """The training conversation number `index` of `seed`; ValueError for a held-out seed."""
    rng = _training(f"talk/{seed}", seed, index)
    while True:
        found = _MAKERS[weighted(rng, mix.kinds)](rng, mix)
        if (
            found
            and not found.made.keys & blocked()
            and any(m["role"] == "assistant" for m in found.made.messages)
        ):
            return found


# ---------------------------------------------------------------------------------------------------------- held out
class Glance(NamedTuple):
    """One question about a picture that no training has seen; the last message is the right answer."""

    scene: Scene
    sighted: Sighted


def _candidate(category: str, rng: Random) -> Glance | None:
    scene = sample_scene(rng, least=2)
    if not held_back(scene):
        return None
    viewer = Viewer(rng, LOOKING)
    viewer.system()
    viewer.show(scene, draw(scene, rng))
    return Glance(as_seen(scene), viewer.sighted(category)) if viewer.ask(category) else None


def _held_out(category: str, count: int) -> Iterator[Glance]:
    for seed in HELD_OUT_SEEDS:
        if made := _candidate(category, Random(f"see/{seed}/{category}")):
            yield made
            count -= 1
        if not count:
            return


@cache
def glances(count: int = PER_CATEGORY) -> dict[str, tuple[Glance, ...]]:
    """Held-out questions by category, `count` of each."""
    return {category: tuple(_held_out(category, count)) for category in VISUAL_ASKERS}
