"""Turns around the `draw` tool: declarations as clients send them, requests, calls and what follows a result."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from chat_topics import THINGS
from world import RELATIONS, Scene, counted, inventory, sample_kind, sample_scene, with_article

Message = dict[str, Any]

NO_DRAW = "Sorry, I cannot draw here."
FAILED = "Sorry, the drawing failed."

_ASK = (
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
ASK_SCENE = (
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
    """A declaration of `draw(prompt: string)` in one of the wordings that clients use."""
    note = rng.choice(_PROMPT_DESCRIPTIONS) if rng.random() < 0.6 else ""
    return _function("draw", rng.choice(_DESCRIPTIONS), "prompt", note, rng)


def other_tool(rng: Random) -> dict[str, Any]:
    name, description, field = rng.choice(_OTHER_TOOLS)
    return _function(name, description, field, "", rng)


def drawable(rng: Random, *, least: int = 1) -> str:
    """What a user may want drawn: mostly `least` or more kinds of this world, sometimes anything else."""
    draw = rng.random() if least == 1 else rng.uniform(0.1, 1.0)
    if draw < 0.1:
        return with_article(rng.choice(THINGS))
    if draw < 0.25:
        first, second = (counted(1, sample_kind(rng)) for _ in range(2))
        relation = rng.choice(RELATIONS)
        return f"{first} {rng.choice(('', 'that is '))}{relation} {second}"
    scene = sample_scene(rng, arrangement="scatter", least=least)
    while len(scene.groups()) < least:
        scene = sample_scene(rng, arrangement="scatter", least=least)
    return inventory(scene, digits=rng.random() < 0.08)


def ask_to_draw(what: str, rng: Random) -> str:
    return rng.choice(_ASK).format(what)


def call(what: str) -> Message:
    """The assistant's turn that calls the tool."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "draw", "arguments": {"prompt": what}}}
        ],
    }


def result(rng: Random, what: str) -> tuple[Message, str]:
    """What the tool returned, and the sentence that the assistant says then."""
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


def drawing_of(scene: Scene) -> str:
    """The prompt for "draw it" after a scene was described."""
    return inventory(scene)
