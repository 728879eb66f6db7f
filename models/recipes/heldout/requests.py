"""List a hundred held-out requests, written by hand: tools to call, questions, sums and talk."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(\{.*\})\s*</tool_call>\s*", re.DOTALL)


@dataclass(frozen=True)
class Request:
    """Hold a request, the tools that it declares, and the expected text or call."""

    kind: str
    text: str
    answer: str | dict[str, Any]
    tools: tuple[dict[str, Any], ...] = ()


def _tool(name: str, description: str, **fields: str) -> dict[str, Any]:
    properties = {field: {"type": kind} for field, kind in fields.items()}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_DRAW = _tool("draw", "Draw a picture of what is described.", prompt="string")
_FORECAST = _tool("forecast", "Weather forecast of a town.", town="string")
_ALARM = _tool("set_alarm", "Set an alarm clock.", hour="integer")
_MESSAGE = _tool("message", "Send a message to a person.", person="string")
_VOLUME = _tool("set_volume", "Set the volume of the speaker.", level="integer")
_BUY = _tool("buy", "Buy some pieces of an article.", article="string", pieces="integer")
_TRAIN = _tool("train", "Find a train.", origin="string", destination="string")
_LIBRARY = _tool("find_book", "Find a book in the library.", title="string")
_INVOICE = _tool("show_invoice", "Show an invoice.", number="integer")
_DEVICE = _tool("switch", "Switch a device on.", device="string")


def _drawings() -> list[Request]:
    what = (
        "a red star", "two blue circles", "a green square and a black triangle", "three small orange stars",
        "a large purple circle", "a yellow triangle and two red squares", "four black circles",
        "a small green star and a large blue square", "an orange triangle", "two purple stars and a yellow circle",
    )  # fmt: skip
    asks = ("Draw {}.", "Please draw {}.", "Can you draw {}?", "Make an image of {}.")
    return [
        Request(
            "draw",
            asks[n % 4].format(one),
            {"name": "draw", "arguments": {"prompt": one}},
            (_DRAW,) if n % 2 else (_DRAW, _FORECAST),
        )
        for n, one in enumerate(what * 2)
    ]


def _calls() -> list[Request]:
    towns, people = (
        ("Lisbon", "Zurich", "Nairobi", "Toronto"),
        ("Frida", "George", "Hannah", "Igor"),
    )
    rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    for town in towns:
        rows.append((f"What is the forecast for {town}?", _FORECAST, {"town": town}))
    for hour in (5, 6, 8, 11):
        rows.append((f"Set the alarm to {hour}.", _ALARM, {"hour": hour}))
    for person in people:
        rows.append((f"Send a message to {person}.", _MESSAGE, {"person": person}))
    for level in (3, 7, 20, 55):
        rows.append((f"Set the volume to {level}.", _VOLUME, {"level": level}))
    for pieces, article in ((2, "pears"), (6, "eggs"), (12, "pencils"), (3, "lemons")):
        text = f"Buy {pieces} {article}."
        rows.append((text, _BUY, {"article": article, "pieces": pieces}))
    for start, end in (
        ("Lisbon", "Porto"),
        ("Basel", "Zurich"),
        ("Turin", "Milan"),
        ("Ghent", "Bruges"),
    ):
        text = f"Find a train from {start} to {end}."
        rows.append((text, _TRAIN, {"origin": start, "destination": end}))
    for title in ("Emma", "Dune", "Ulysses", "Beloved"):
        rows.append((f"Find the book {title}.", _LIBRARY, {"title": title}))
    for number in (14, 207, 3315, 8):
        rows.append((f"Show invoice {number}.", _INVOICE, {"number": number}))
    for device in ("toaster", "printer", "projector", "kettle"):
        rows.append((f"Switch on the {device}.", _DEVICE, {"device": device}))
    others = (_ALARM, _FORECAST, _MESSAGE)
    found = []
    for n, (text, tool, arguments) in enumerate(rows):
        declared = (tool,) if n % 2 or tool in others else (others[n % 3], tool)
        call = {"name": tool["function"]["name"], "arguments": arguments}
        found.append(Request("other tools", text, call, declared))
    return found


def _words() -> list[Request]:
    scene = "There are two red circles, a blue square and a small green star."
    rows = (
        ("How many circles are there?", "Two."), ("How many stars are there?", "One."),
        ("What colour is the square?", "Blue."), ("What colour is the star?", "Green."),
        ("Is there a black triangle?", "No."), ("Is there a blue square?", "Yes."),
        ("What shape is the blue thing?", "A square."), ("How big is the star?", "Small."),
        ("How many triangles are there?", "None."), ("Is there a red circle?", "Yes."),
    )  # fmt: skip
    sums = ((2, 5), (9, 4), (7, 7), (12, 3), (1, 8), (6, 11), (10, 5), (0, 4))
    return [
        *(Request("scene in words", f"{scene} {text}", answer) for text, answer in rows),
        *(Request("sum", f"What is {a} + {b}?", f"{a + b}.") for a, b in sums),
        *(Request("difference", f"What is {a + b} minus {b}?", f"{a}.") for a, b in sums),
    ]


def _talk() -> list[Request]:
    abilities = ("see", "count", "sum", "draw", "tool")
    return [
        Request("abilities", text, " ".join(abilities))
        for text in ("What can you do?", "what can you do", "How can you help me?", "Help!")
    ] + [
        Request("declined", text, "Sorry, I don't know that.")
        for text in (
            "Who painted the Mona Lisa?", "What is the capital of Hungary?", "How old is the universe?",
            "When does the shop open?", "Who is the president of Iceland?", "What is the best phone?",
            "Where is Lisbon?", "Who invented the piano?", "How far is it to Zurich?", "What is love?",
            "Who wrote Hamlet?", "When was the radio invented?", "What is the weather in Oslo?",
            "Why is the sky so dark?",
        )
    ]  # fmt: skip


REQUESTS: tuple[Request, ...] = (*_drawings(), *_calls(), *_words(), *_talk())


def right(request: Request, reply: str) -> bool:
    """Return True for the expected call alone, or the expected text.

    A reply about abilities has to name each of them.
    """
    if isinstance(request.answer, dict):
        found = _CALL.fullmatch(reply.strip())
        try:
            return found is not None and json.loads(found[1]) == request.answer
        except ValueError:
            return False
    if request.kind == "abilities":
        return all(word in reply for word in request.answer.split())
    return reply.strip().startswith(request.answer)
