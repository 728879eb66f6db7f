"""Make pocket_see.py's examples: pictures with their cells, and conversations about pictures.

Everything is a function of (seed, index). A scene is held out by what a picture of it shows,
whatever the seed.
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

from recipes.chat import tools
from recipes.chat.data import (
    Conversation,
    ConversationWriter,
    assistant,
    casual,
    user,
    weighted_choice,
)
from recipes.chat.mix import Mix
from recipes.chat.stream import held_out_digests
from recipes.draw.data import is_held_out
from recipes.see.mix import VIEWING
from recipes.see.questions import VISUAL_QUESTION_MAKERS, in_reading_order
from recipes.training.held_out_seeds import HELD_OUT_SEEDS, check_training_seed
from recipes.world.pictures import SIZE, Picture, draw, draw_things
from recipes.world.scenes import (
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

PER_CATEGORY = 200
CELLS = GRID * GRID
# All kinds that a cell may have; number 0 is an empty cell.
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

_POSITION_CATEGORIES = (
    "relation-horizontal",
    "relation-vertical",
    "where",
)  # categories that need positions, which an edit in words does not define


class PictureConversation(NamedTuple):
    """Hold a conversation and its pictures, in the order of their image tokens."""

    conversation: Conversation
    pictures: tuple[Picture, ...]


# ---------------------------------------------------------------------------------------------------------- pictures
class CellPicture(NamedTuple):
    """Hold a picture and the number in KINDS of each cell, row by row."""

    picture: Picture
    kinds: NDArray[np.int64]


def cell_picture(seed: int, index: int, *, crowded_share: float) -> CellPicture:
    """Return a picture for the tower; `crowded_share` of them have things in any number of cells."""
    rng = _training_rng(f"cells/{seed}", seed, index)
    if rng.random() < crowded_share:
        share = rng.uniform(0.1, 0.8)
        cells = [
            (column, row) for row in range(GRID) for column in range(GRID) if rng.random() < share
        ]
        things = tuple(place(sample_kind(rng, sized=2 / 3), *cell) for cell in cells)
    else:
        things = _scene(rng).things
    return CellPicture(augmented_picture(things, rng), cell_kinds(things))


def cell_kinds(things: tuple[Thing, ...]) -> NDArray[np.int64]:
    """Return the number in KINDS of each cell, row by row; 0 is empty."""
    found = np.zeros(CELLS, np.int64)
    for thing in things:
        found[thing.row * GRID + thing.column] = _NUMBERS[thing.kind]
    return found


def augmented_picture(things: tuple[Thing, ...], rng: Random) -> Picture:
    """Draw a picture as clients send it: resized, shifted, noisy or JPEG-compressed at times."""
    picture = (
        draw_things(things, rng, size=2 * SIZE) if rng.random() < 0.1 else draw_things(things, rng)
    )
    if len(picture) > SIZE:
        picture = np.asarray(
            Image.fromarray(picture).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        )
    if rng.random() < 0.3:
        picture = _shifted(picture, rng.randint(-2, 2), rng.randint(-2, 2))
    if rng.random() < 0.3:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(
            0.0, rng.uniform(1.0, 10.0), picture.shape
        )
        picture = np.rint(np.clip(picture + noise, 0, 255)).astype(np.uint8)
    return _jpeg_compressed(picture, rng.randint(70, 95)) if rng.random() < 0.1 else picture


def _shifted(picture: Picture, right: int, down: int) -> Picture:
    """Shift a picture by up to two pixels; the edge repeats."""
    wide = np.pad(picture, ((2, 2), (2, 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(wide[2 - down : 2 - down + SIZE, 2 - right : 2 - right + SIZE])


def _jpeg_compressed(picture: Picture, quality: int) -> Picture:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def _training_rng(name: str, seed: int, index: int) -> Random:
    check_training_seed(seed)
    return Random(f"see/{name}/{index}")


def is_held_out_scene(scene: Scene) -> bool:
    """Return True if training excludes pictures of this scene."""
    return is_held_out(in_reading_order(scene))


def _scene(rng: Random) -> Scene:
    """Return a training scene; one in fifty is empty."""
    if rng.random() < 0.02:
        return Scene(things=())
    while is_held_out_scene(scene := sample_scene(rng)):
        pass
    return scene


# ----------------------------------------------------------------------------------------------------- conversations
class PictureWriter(ConversationWriter):
    """Write a conversation in which scenes are shown in pictures."""

    def __init__(self, rng: Random, mix: Mix, *, plain: bool = False) -> None:
        super().__init__(rng, mix, plain=plain)
        self.pictures: list[Picture] = []
        self.picture_pending = False  # the next user turn gets the last picture
        self.scene_edited = False  # by an instruction, after the last picture
        self.has_held_out_scene = False  # training excludes this conversation

    def set_scene(self, scene: Scene) -> None:
        """Set the scene, and note whether training excludes it."""
        super().set_scene(scene)
        self.has_held_out_scene = self.has_held_out_scene or is_held_out_scene(scene)

    def show(self, scene: Scene, picture: Picture) -> None:
        """Attach a picture to the next user turn."""
        self.set_scene(in_reading_order(scene))
        self.pictures.append(picture)
        self.picture_pending, self.scene_edited = True, False

    def exchange(self, text: str, answer: str) -> None:
        """Add a user turn, with the pending picture, and its answer."""
        super().exchange(text, answer)
        if self.picture_pending:
            self.messages[-2]["content"] = picture_content(self.messages[-2]["content"], self.rng)
            self.picture_pending = False

    def ask(self, category: str) -> bool:
        """Add one exchange about the scene; return False if the scene does not allow the category."""
        assert self.scene is not None
        if category == "instruction":
            self.scene_edited = super().ask(category) or self.scene_edited
            return self.scene_edited
        if self.scene_edited and category in _POSITION_CATEGORIES:
            return False
        question = VISUAL_QUESTION_MAKERS[category](self.scene, self.rng)
        if question is None:
            return False
        self.exchange(question.text, question.answer)
        return True

    def finish_with_pictures(
        self, category: str = "mixed", declared: tuple[dict[str, Any], ...] = ()
    ) -> PictureConversation:
        """Return the conversation and its pictures."""
        return PictureConversation(self.finish(category, declared), tuple(self.pictures))


def picture_content(text: str, rng: Random) -> list[dict[str, str]]:
    """Return user content of a picture and a text, mostly in this order."""
    parts = [{"type": "image"}, {"type": "text", "text": text}]
    return parts if rng.random() < 0.75 else parts[::-1]


def viewing_conversation(rng: Random, mix: Mix) -> PictureConversation | None:
    """Write questions about a picture, among other turns and further pictures.

    Returns None if a scene is held out.
    """
    writer = PictureWriter(rng, mix)
    writer.system()
    scene = _scene(rng)
    writer.show(scene, augmented_picture(scene.things, rng))
    if rng.random() < 0.05:
        writer.exchange("Look at this.", "I see.")
    for _ in range(rng.choice((4, 6, 8, 10))):
        writer.ask(weighted_choice(rng, mix.scene))
        draw = rng.random()
        if draw < 0.04 and not writer.picture_pending:
            writer.talk(weighted_choice(rng, mix.talk))
        elif draw < 0.16 and not writer.picture_pending:
            scene = _scene(rng)
            writer.show(scene, augmented_picture(scene.things, rng))
        elif (
            draw < 0.18 and not writer.picture_pending
        ):  # a scene described in words after a picture
            described = sample_scene(rng)
            writer.set_scene(described)
            writer.exchange(describe(described, rng), "I see.")
            writer.scene_edited = True
    if writer.picture_pending:
        writer.ask("description")
    return None if writer.has_held_out_scene else writer.finish_with_pictures()


def drawn_picture_conversation(rng: Random, mix: Mix) -> PictureConversation | None:
    """Write a tool call that draws, its picture, and questions about it.

    The picture is in the tool message or in the next user turn. Returns None if the scene is empty
    or held out.
    """
    writer = PictureWriter(rng, mix)
    writer.system()
    scene = _scene(rng)
    if not scene.things:
        return None
    what = inventory(scene)
    writer.messages += [user(casual(tools.drawing_request(what, rng), rng))]
    if what not in writer.messages[-1]["content"]:
        what = what.replace(",", "")
    writer.messages += [tools.draw_call(what)]
    content: str | list[dict[str, str]] = rng.choice(
        ("ok", "done", "Image created.", "The image is shown to the user.")
    )
    picture = augmented_picture(scene.things, rng)
    if in_tool_result := rng.random() < 0.6:
        content = rng.choice(([{"type": "image"}], picture_content(str(content), rng)))
        writer.set_scene(in_reading_order(scene))
        writer.pictures.append(picture)
    writer.messages += [
        {"role": "tool", "name": "draw", "content": content},
        assistant(f"Here is {what}."),
    ]
    if not in_tool_result:
        writer.show(scene, picture)
    writer.ask("description")
    for _ in range(rng.randint(1, 6)):
        writer.ask(weighted_choice(rng, mix.scene))
    return (
        None
        if writer.has_held_out_scene
        else writer.finish_with_pictures(declared=(tools.draw_tool(rng),))
    )


_MAKERS: dict[str, Callable[[Random, Mix], PictureConversation | None]] = {
    "look": viewing_conversation,
    "drawn": drawn_picture_conversation,
}


def picture_conversation(seed: int, index: int, *, mix: Mix = VIEWING) -> PictureConversation:
    """Return training conversation `index` of `seed`. Raises RecipeError for a held-out seed."""
    rng = _training_rng(f"talk/{seed}", seed, index)
    while True:
        found = _MAKERS[weighted_choice(rng, mix.kinds)](rng, mix)
        if (
            found
            and not found.conversation.keys & held_out_digests()
            and any(m["role"] == "assistant" for m in found.conversation.messages)
        ):
            return found


# ---------------------------------------------------------------------------------------------------------- held out
class HeldOutQuestion(NamedTuple):
    """Hold one question about a held-out picture; the last message is the expected answer."""

    scene: Scene
    example: PictureConversation


def _candidate(category: str, rng: Random) -> HeldOutQuestion | None:
    scene = sample_scene(rng, min_things=2)
    if not is_held_out_scene(scene):
        return None
    writer = PictureWriter(rng, VIEWING)
    writer.system()
    writer.show(scene, draw(scene, rng))
    return (
        HeldOutQuestion(in_reading_order(scene), writer.finish_with_pictures(category))
        if writer.ask(category)
        else None
    )


def _held_out(category: str, count: int) -> Iterator[HeldOutQuestion]:
    for seed in HELD_OUT_SEEDS:
        if question := _candidate(category, Random(f"see/{seed}/{category}")):
            yield question
            count -= 1
        if not count:
            return


@cache
def held_out_questions(count: int = PER_CATEGORY) -> dict[str, tuple[HeldOutQuestion, ...]]:
    """Return `count` held-out questions of each category."""
    return {category: tuple(_held_out(category, count)) for category in VISUAL_QUESTION_MAKERS}
