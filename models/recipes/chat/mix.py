"""Define the relative weights of conversation and turn kinds, one mix per training phase."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Define how often each kind of conversation and of turn occurs (relative weights)."""

    kinds: dict[str, float]
    scene: dict[str, float]
    talk: dict[str, float]


BROAD = Mix(
    kinds={"scene": 0.62, "talk": 0.24, "draw": 0.14},
    scene={
        "count": 1.2,
        "colour": 1.0,
        "shape": 0.8,
        "size": 0.8,
        "existence": 1.2,
        "relation-horizontal": 1.6,
        "relation-vertical": 1.6,
        "description": 0.6,
        "instruction": 1.6,
    },
    talk={
        "small-talk": 1.0,
        "arithmetic": 3.0,
        "too-large": 0.3,
        "counting": 0.4,
        "refusal": 1.4,
        "no-scene": 0.2,
    },
)
EASY = replace(BROAD, kinds={"lesson": 1.0})
FOCUSED = Mix(  # more of the slowest tasks to learn
    kinds={"scene": 0.65, "talk": 0.26, "draw": 0.09},
    scene={
        "count": 1.2,
        "colour": 1.6,
        "shape": 0.4,
        "size": 0.8,
        "existence": 1.4,
        "relation-horizontal": 2.0,
        "relation-vertical": 2.0,
        "description": 0.4,
        "instruction": 2.0,
    },
    talk={
        "small-talk": 0.6,
        "arithmetic": 4.0,
        "too-large": 0.3,
        "counting": 0.8,
        "refusal": 0.8,
        "no-scene": 0.2,
    },
)
FINISHING = Mix(  # mostly the tasks still behind: edits, sums, yes or no
    kinds={"scene": 0.68, "talk": 0.25, "draw": 0.07},
    scene={
        "count": 1.4,
        "colour": 1.2,
        "shape": 0.3,
        "size": 0.7,
        "existence": 1.6,
        "relation-horizontal": 1.8,
        "relation-vertical": 1.6,
        "description": 0.4,
        "instruction": 4.5,
    },
    talk={
        "small-talk": 0.5,
        "arithmetic": 5.0,
        "too-large": 0.2,
        "counting": 0.6,
        "refusal": 0.6,
        "no-scene": 0.2,
    },
)
EDITING = Mix(  # edits are by far the slowest task to learn
    kinds={"scene": 0.8, "talk": 0.14, "draw": 0.06},
    scene={
        "count": 1.4,
        "colour": 1.0,
        "shape": 0.3,
        "size": 0.8,
        "existence": 0.8,
        "relation-horizontal": 2.6,
        "relation-vertical": 2.6,
        "description": 1.6,
        "instruction": 9.0,
    },
    talk={
        "small-talk": 0.7,
        "arithmetic": 4.0,
        "too-large": 0.2,
        "counting": 0.6,
        "refusal": 1.2,
        "no-scene": 0.2,
    },
)
