"""Everything that decides what pocket-chat's eyes see, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass

from chat_mix import FINISHING, Mix
from see_mix import LOOKING, PLACING
from training import Stage
from world import GRID
from world_pictures import SIZE


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and stages. A picture is 64 pixels wide; the tower sees a patch of it per cell of the grid: 16 tokens."""

    seed: int = 40
    patch: int = SIZE // GRID
    width: int = 128
    intermediate: int = 512
    layers: int = 3
    heads: int = 4
    place: float = (
        1.6  # length of the vectors that tell an embedding's column and row; a word's is about 2.3
    )
    crowded: float = 0.6  # share of pictures with many things, from which the tower learns
    words: Mix = (
        FINISHING  # of the conversations without pictures, which keep the model's words as they are
    )
    prompt_weight: float = 0.1  # loss weight of tokens that the assistant does not say
    tower: Stage = Stage(steps=700, batch=48, matrix_lr=0.02, other_lr=3e-3, warmup=50, decay=0.6)
    talk: Stage = Stage(steps=4000, batch=16, matrix_lr=6e-3, other_lr=1.8e-3, decay=0.8)
    shown: float = 0.6  # share of the conversations that are about pictures
    looks: tuple[tuple[int, Mix], ...] = (
        (0, LOOKING),
        (640, PLACING),
    )  # of these, from which step on

    def looking(self, step: int) -> Mix:
        """The mix of the conversations about pictures in `step` of the talk."""
        return next(mix for start, mix in reversed(self.looks) if start <= step)
