"""Define the relative weights of conversations about pictures, one mix per training phase."""

from __future__ import annotations

from dataclasses import replace

from recipes.chat.mix import Mix

VIEWING = Mix(
    kinds={"look": 0.9, "drawn": 0.1},
    scene={
        "count": 1.4,
        "colour": 1.2,
        "shape": 0.8,
        "size": 0.8,
        "existence": 1.2,
        "relation-horizontal": 1.6,
        "relation-vertical": 1.6,
        "description": 1.8,
        "where": 1.2,
        "instruction": 0.25,
    },
    talk={"small-talk": 1.0, "arithmetic": 2.0, "refusal": 1.0},
)
LOCATING = replace(  # more of the slowest tasks to learn: positions and orders
    VIEWING,
    scene={
        "count": 1.6,
        "colour": 0.6,
        "shape": 0.4,
        "size": 0.6,
        "existence": 0.8,
        "relation-horizontal": 2.6,
        "relation-vertical": 2.4,
        "description": 2.6,
        "where": 2.0,
        "instruction": 0.25,
    },
)
SCATTERED = replace(  # of both kinds of pictures: many things, and which is left of which
    VIEWING,
    scene={
        "count": 2.2,
        "colour": 1.0,
        "shape": 1.0,
        "size": 0.4,
        "existence": 1.2,
        "relation-horizontal": 1.8,
        "relation-vertical": 1.2,
        "description": 3.0,
        "where": 1.0,
    },
)
SEEING = replace(  # of other styles: what a stranger asks first
    VIEWING,
    scene={
        "count": 1.8,
        "colour": 1.2,
        "shape": 1.0,
        "size": 0.3,
        "existence": 1.2,
        "relation-horizontal": 1.2,
        "relation-vertical": 1.2,
        "description": 3.0,
        "where": 1.0,
    },
)
