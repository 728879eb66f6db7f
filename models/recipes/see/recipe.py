"""Define every number that decides pocket-chat's vision weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from recipes.chat.mix import FINISHING, Mix
from recipes.see.mix import LOCATING, VIEWING
from recipes.training.loop import Stage
from recipes.world.pictures import SIZE
from recipes.world.scenes import GRID
from recipes.world.styles import Slant


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define sizes and training stages.

    A picture is 64 pixels wide; a patch of the tower is a cell of the grid: 16 tokens.
    """

    seed: int = 40
    patch: int = SIZE // GRID
    width: int = 128
    intermediate: int = 512
    layers: int = 3
    heads: int = 4
    position_norm: float = (
        1.6  # norm of the column and row vectors; a word embedding's is about 2.3
    )
    crowded_share: float = 0.6  # of the tower's pictures
    text_mix: Mix = FINISHING  # of text-only conversations, which preserve the language model
    prompt_weight: float = 0.1  # loss weight of tokens outside the assistant's replies
    tower: Stage = Stage(steps=700, batch=48, matrix_lr=0.02, other_lr=3e-3, warmup=50, decay=0.6)
    talk: Stage = Stage(steps=4000, batch=16, matrix_lr=6e-3, other_lr=1.8e-3, decay=0.8)
    picture_share: float = 0.6  # of conversations
    viewing_mixes: tuple[tuple[int, Mix], ...] = (
        (0, VIEWING),
        (640, LOCATING),
    )  # of conversations about pictures: (first step, mix)

    def viewing_mix(self, step: int) -> Mix:
        """Return the mix of conversations about pictures in `step` of the second stage."""
        return next(mix for start, mix in reversed(self.viewing_mixes) if start <= step)


HARDER = Slant(many=0.3, small=0.15)


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Define the training that adds other styles of pictures to a complete model."""

    seed: int = 41
    own_share: float = 0.3  # of the tower's pictures, drawn as the micro-world does
    crowded_share: float = 0.5  # of those
    reference_pictures: int = 1500  # that the frozen tower is averaged over
    whole_pictures: int = 24  # that the tower learns from in each step of `whole`
    slant: Slant = HARDER  # of the pictures of `whole`
    stages: dict[str, Stage] = field(
        default_factory=lambda: {
            "tower": Stage(
                steps=2800, batch=48, matrix_lr=8e-3, other_lr=1.2e-3, warmup=50, decay=0.7
            ),
            "words": Stage(
                steps=1200, batch=24, matrix_lr=5e-3, other_lr=1.5e-3, warmup=40, decay=0.75
            ),
            "edges": Stage(
                steps=1100,
                batch=64,
                matrix_lr=4e-3,
                other_lr=6e-4,
                warmup=30,
                decay=0.9,
                first=1_000_000,
            ),
            "talk": Stage(
                steps=410,
                batch=28,
                matrix_lr=3e-3,
                other_lr=9e-4,
                warmup=20,
                decay=0.9,
                first=1_000_000,
            ),
            "settle": Stage(
                steps=300,
                batch=27,
                matrix_lr=2.5e-3,
                other_lr=7.5e-4,
                warmup=15,
                decay=0.95,
                first=2_000_000,
            ),
            "tools": Stage(
                steps=1300,
                batch=20,
                matrix_lr=4e-3,
                other_lr=1.2e-3,
                warmup=40,
                decay=0.9,
                first=3_000_000,
            ),
            "recall": Stage(
                steps=480,
                batch=22,
                matrix_lr=2e-3,
                other_lr=6e-4,
                warmup=15,
                decay=0.95,
                first=4_000_000,
            ),
            "whole": Stage(
                steps=3000,
                batch=36,
                matrix_lr=6e-3,
                other_lr=1.5e-3,
                warmup=60,
                decay=0.85,
                first=5_000_000,
            ),
        }
    )
    lessons: dict[str, dict[str, int]] = field(
        default_factory=lambda: {
            "words": {"styled": 5, "own": 4, "calls": 6, "json": 3, "abilities": 1},
            "talk": {"styled": 7, "own": 9, "calls": 5, "json": 2, "abilities": 1},
            "settle": {"styled": 6, "own": 10, "calls": 3, "json": 3, "abilities": 1},
            "tools": {
                "styled": 2,
                "own": 3,
                "choices": 7,
                "calls": 1,
                "json": 1,
                "repeating": 2,
                "abilities": 1,
            },
            "recall": {
                "styled": 3,
                "own": 4,
                "choices": 6,
                "json": 1,
                "repeating": 1,
                "abilities": 1,
            },
            "whole": {
                "scattered": 9,
                "own": 6,
                "spelled": 6,
                "choices": 3,
                "calls": 2,
                "json": 1,
                "record": 2,
                "repeating": 1,
                "abilities": 1,
            },
        }
    )  # conversations of a step; the others are in words alone
    text_mix: Mix = field(  # with more of what is said about the model itself
        default_factory=lambda: replace(
            FINISHING, talk={**FINISHING.talk, "small-talk": 1.5, "refusal": 1.0}
        )
    )
