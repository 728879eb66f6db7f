"""Write turns around the `draw` tool: declarations, requests, calls and results."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from recipes.chat.topics import THINGS
from recipes.world.scenes import (
    RELATIONS,
    Scene,
    counted,
    inventory,
    sample_kind,
    sample_scene,
    with_article,
)

Message = dict[str, Any]

CANNOT_DRAW = "Sorry, I cannot draw here."
FAILED = "Sorry, the drawing failed."

_REQUESTS = (
    *(
        "Draw {0}.",
        "Draw {0}.",
        "Draw {0}",
        "Please draw {0}.",
        "Can you draw {0}?",
        "Draw me {0}.",
        "Paint a picture of {0}.",
    ),
    *(
        "Could you draw {0} for me?",
        "I want a picture of {0}.",
        "Show me a picture of {0}.",
        "Make an image of {0}.",
    ),
    *(
        "Create a picture of {0}.",
        "Generate an image of {0}.",
        "Sketch {0}, please.",
        "I would like to see a drawing of {0}.",
    ),
)
SCENE_REQUESTS = (
    "Draw it.",
    "Draw the scene.",
    "Please draw it.",
    "Can you draw it?",
    "Draw that.",
    "Draw this scene, please.",
)

_DESCRIPTIONS = (
    *(
        "Draw a picture.",
        "Draws a picture from a description.",
        "Generate an image from a text prompt.",
        "",
    ),
    *(
        "Create an image.",
        "Draw coloured shapes.",
        "Makes a picture of what the user describes.",
        "Image generation",
    ),
)
_PROMPT_DESCRIPTIONS = (
    "What to draw.",
    "The scene to draw",
    "A description of the picture.",
    "Text prompt",
    "prompt",
)
_OTHER_TOOLS = (
    ("get_weather", "Get the weather of a city.", "city"),
    ("search", "Search the web.", "query"),
    ("speak", "Say a text aloud.", "text"),
    ("get_time", "Current time of a place.", "place"),
    ("calculate", "Evaluate an expression.", "expression"),
    ("send_email", "Send an email.", "to"),
)


def _function(name: str, description: str, field: str, note: str, rng: Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if note:
        schema["description"] = note
    parameters: dict[str, Any] = {"type": "object", "properties": {field: schema}}
    if rng.random() < 0.8:
        parameters["required"] = [field]
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters
    if rng.random() < 0.15:
        function["strict"] = rng.random() < 0.5
    return {"type": "function", "function": function}


def draw_tool(rng: Random) -> dict[str, Any]:
    """Declare `draw(prompt: string)` in one of several wordings."""
    note = rng.choice(_PROMPT_DESCRIPTIONS) if rng.random() < 0.6 else ""
    return _function("draw", rng.choice(_DESCRIPTIONS), "prompt", note, rng)


def other_tool(rng: Random) -> dict[str, Any]:
    """Declare a tool that no conversation calls."""
    name, description, field = rng.choice(_OTHER_TOOLS)
    return _function(name, description, field, "", rng)


def drawing_prompt(rng: Random, *, min_things: int = 1) -> str:
    """Return a drawing prompt: mostly `min_things` or more kinds, sometimes another subject."""
    draw = rng.random() if min_things == 1 else rng.uniform(0.1, 1.0)
    if draw < 0.1:
        return with_article(rng.choice(THINGS))
    if draw < 0.25:
        first, second = (counted(1, sample_kind(rng)) for _ in range(2))
        relation = rng.choice(RELATIONS)
        return f"{first} {rng.choice(('', 'that is '))}{relation} {second}"
    scene = sample_scene(rng, arrangement="scatter", min_things=min_things)
    while len(scene.groups()) < min_things:
        scene = sample_scene(rng, arrangement="scatter", min_things=min_things)
    return inventory(scene, digits=rng.random() < 0.08)


def drawing_request(what: str, rng: Random) -> str:
    """Return a user's request to draw `what`."""
    return rng.choice(_REQUESTS).format(what)


def draw_call(what: str) -> Message:
    """Return the assistant message that calls the tool."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "draw", "arguments": {"prompt": what}}}
        ],
    }


def draw_result(rng: Random, what: str) -> tuple[Message, str]:
    """Return a tool message and the assistant's sentence after it."""
    if rng.random() < 0.12:
        reason = rng.choice(("timeout", "overloaded", "failed", "no free worker", "cancelled"))
        content = rng.choice(
            (json.dumps({"error": reason}), f"error: {reason}", json.dumps({"status": "error"}))
        )
        return {"role": "tool", "name": "draw", "content": content}, FAILED
    key = f"{rng.randrange(16**6):06x}"
    good = (
        *(
            "ok",
            "done",
            "The image is shown to the user.",
            "Image created.",
            json.dumps({"status": "ok"}),
        ),
        *(
            json.dumps({"image": f"{key}.png"}),
            json.dumps({"url": f"/images/{key}.png"}),
            "success",
            "drawn",
        ),
        *(
            json.dumps({"status": "ok", "id": key}),
            json.dumps({"images": [key], "prompt": what}),
            f"{key}.png",
            "",
        ),
    )
    return {"role": "tool", "name": "draw", "content": rng.choice(good)}, f"Here is {what}."


def scene_prompt(scene: Scene) -> str:
    """Return the prompt for "draw it" after a scene was described."""
    return inventory(scene)
