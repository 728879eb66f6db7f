"""Write the reference part of docs/wire.md, below its marker, from the structs of `messages`.

.venv/bin/python scripts/render_wire.py
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import wire_examples as examples
from motet_shared.messages import ANSWERS, encode

PAGE = Path(__file__).resolve().parents[1] / "docs" / "wire.md"
MARKER = "<!-- Everything below is written by scripts/render_wire.py. -->\n"
_FIELD = re.compile(
    r"^    (\w+): ?(?P<type>[^#=]*?)(?: = (?P<default>[^#]*?))?\s*(?:# (?P<note>.*))?$"
)


def as_plain(message: object) -> Any:
    """Return a message as a MessagePack library decodes it, with bytes as {"bin": hex}."""
    return json.loads(json.dumps(msgspec.msgpack.decode(encode(message)), default=_binary))


def _binary(value: object) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"bin": value.hex()}
    raise TypeError(f"{type(value).__name__} cannot be in a message")


def _json(message: object) -> str:
    return json.dumps(as_plain(message), ensure_ascii=False)


def _summary(struct: type[Struct]) -> str:
    """Return a struct's docstring on one line."""
    return " ".join((inspect.getdoc(struct) or "").split())


def _notes(struct: type[Struct]) -> dict[str, str]:
    """Return the comments of a struct's fields: those above a field and that on its line."""
    notes, above = {}, ""
    for line in inspect.getsource(struct).splitlines():
        if line.startswith("    # "):
            above += line[6:] + " "
        elif (found := _FIELD.match(line)) and found[1] in struct.__struct_fields__:
            notes[found[1]] = (above + (found["note"] or "")).strip()
            above = ""
    return notes


def _type(struct: type[Struct], name: str) -> str:
    """Return a field's type as it is annotated."""
    for base in struct.__mro__:
        if (text := inspect.get_annotations(base).get(name)) is not None:
            text = " ".join(text.split())
            return "any request" if text.startswith(("(", "Chat |")) else text
    raise KeyError(name)


def _default(value: object) -> str:
    if value is msgspec.NODEFAULT:
        return ""
    text = value if isinstance(value, str) else _json(value)
    return f" = {json.dumps(text) if isinstance(value, str) else text}"


def _fields(struct: type[Struct]) -> Iterator[str]:
    """Yield a line per field that has a comment; fields without one share lines."""
    notes = _notes(struct)
    bare: list[str] = []
    for field in msgspec.structs.fields(struct):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        text = f"`{field.encode_name}: {_type(struct, field.name)}{_default(default)}`"
        if note := notes.get(field.name):
            if bare:
                yield f"- {', '.join(bare)}"
            bare = []
            yield f"- {text}: {note}"
        else:
            bare.append(text)
    if bare:
        yield f"- {', '.join(bare)}"


def _map(example: Struct) -> Iterator[str]:
    """Yield the section of a struct that is encoded as a map."""
    struct = type(example)
    tag, summary = struct.__struct_config__.tag, _summary(struct)
    answers = [
        f"`{kind.__name__}`"
        for request, kinds in ANSWERS.items()
        if request is struct
        for kind in kinds
    ]
    yield f"### {struct.__name__}" + (f', `"type": "{tag}"`' if tag else "")
    if any(answer not in summary for answer in answers):
        summary += f" Items: {' or '.join(answers)}."
    yield f"{summary}\n\n    {_json(example)}\n"
    yield from _fields(struct)
    yield ""


def _array(example: Struct) -> Iterator[str]:
    """Yield the entry of a struct that is encoded as an array: its elements in order."""
    struct = type(example)
    tag, notes = struct.__struct_config__.tag, _notes(struct)
    elements = [json.dumps(tag)] if tag else []
    elements += [f"{name}: {_type(struct, name)}" for name in struct.__struct_fields__]
    remarks = "; ".join(f"`{name}`: {note}" for name, note in notes.items() if note)
    remarks = f" ({remarks})" if remarks else ""
    yield f"**{struct.__name__}** `[{', '.join(elements)}]`: {_summary(struct)}{remarks}"
    yield f"\n    {_json(example)}\n"


def _section(title: str, messages: Sequence[Struct]) -> Iterator[str]:
    yield f"## {title}\n"
    for message in messages:
        as_array = type(message).__struct_config__.array_like
        yield from _array(message) if as_array else _map(message)


def reference() -> str:
    """Return everything below the marker."""
    lines = [
        *_section("Opens and heartbeats", examples.EVENTS),
        *_section("Frames, controls and feeds", [*examples.ENVELOPES, *examples.FRAMES]),
        *_section("Requests", examples.REQUESTS),
        *_section("Items", examples.ITEMS),
        *_section("Parts of messages", [*examples.PARTS, *examples.SMALL_ARRAYS]),
    ]
    return "\n" + "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARKER)[0] + MARKER + reference())
