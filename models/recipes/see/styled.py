"""Make pictures of other styles for training: drawn by `recipes.world.styles`, as clients send them.

Everything is a function of (seed, index). A scene is held out as in `recipes.see.data`.
"""

from __future__ import annotations

import io
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recipes.chat.mix import Mix
from recipes.see.data import (
    PictureConversation,
    PictureWriter,
    cell_kinds,
    is_held_out_scene,
    weighted_choice,
)
from recipes.see.questions import in_reading_order
from recipes.training.held_out_seeds import check_training_seed
from recipes.world.pictures import SIZE, Picture, draw
from recipes.world.scenes import Scene
from recipes.world.styles import (
    EVEN,
    Slant,
    in_own_cell,
    sample_pictured_scene,
    styled_picture,
)


class Lesson(NamedTuple):
    """Hold a picture, the same scene as the micro-world draws it, and the kind of each cell."""

    picture: Picture
    plain: Picture
    kinds: NDArray[np.int64]


def sent_picture(picture: Picture, rng: Random) -> Picture:
    """Return a picture as the model gets it: compressed at times, scaled to the model's size."""
    image = Image.fromarray(picture)
    if rng.random() < 0.2:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(50, 95))
        image = Image.open(file).convert("RGB")
    if image.size == (SIZE, SIZE):
        return np.asarray(image)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC))


class StyledScene(NamedTuple):
    """Hold a scene and its picture as the model gets it.

    exact: every thing is in its cell; else two share one, and the scene's positions are not exact.
    """

    scene: Scene
    picture: Picture
    exact: bool


def styled_scene(rng: Random, *, anywhere_share: float = 0.6, slant: Slant = EVEN) -> StyledScene:
    """Return a training scene and its picture in a random style.

    anywhere_share: of the pictures whose things stand anywhere, not each in its cell.
    """
    while True:
        things = sample_pictured_scene(rng, many_share=slant.many).things
        drawing = styled_picture(
            things, rng, anywhere=rng.random() < anywhere_share, small_share=slant.small
        )
        if drawing is None:
            continue
        scene = Scene(things=tuple(figure.thing for figure in drawing.figures))
        if len(things) == 1 or not is_held_out_scene(scene):
            exact = all(in_own_cell(figure) for figure in drawing.figures)
            return StyledScene(scene, sent_picture(drawing.picture, rng), exact)


def lesson(seed: int, index: int, *, slant: Slant = EVEN) -> Lesson:
    """Return lesson `index` of `seed` for the tower."""
    check_training_seed(seed)
    rng = Random(f"styles/{seed}/{index}")
    scene, picture, _ = styled_scene(rng, slant=slant)
    return Lesson(picture, draw(scene, rng), cell_kinds(scene.things))


def styled_conversation(
    rng: Random, mix: Mix, *, slant: Slant = EVEN
) -> PictureConversation | None:
    """Write questions about pictures of one to six things; None if one is held out."""
    writer = PictureWriter(rng, mix)
    writer.system()
    for number in range(rng.choice((1, 1, 2))):
        if writer.picture_pending:
            break
        scene, picture, exact = styled_scene(rng, slant=slant)
        writer.show(in_reading_order(scene), picture)
        writer.scene_edited = not exact  # so that nothing is asked about positions
        if number == 0 and rng.random() < 0.3:
            writer.ask("description")
        for _ in range(rng.choice((3, 5, 7))):
            writer.ask(weighted_choice(rng, mix.scene))
    if writer.picture_pending:
        writer.ask("description")
    return None if writer.has_held_out_scene else writer.finish_with_pictures()
