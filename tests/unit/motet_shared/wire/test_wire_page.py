"""docs/wire.md: every struct of the protocol is there, as it is, and its examples are messages."""

from __future__ import annotations

import json
import re
from typing import Any

import msgpack
import msgspec
import pytest
from msgspec import Struct

from motet_shared import errors, messages
from motet_shared.messages import encode
from motet_shared.wire import subjects
from render_wire import MARKER, PAGE, as_plain, reference

TEXT = PAGE.read_text()
PROSE, _, REFERENCE = TEXT.partition(MARKER)
# The heading of a map, or the beginning of an array's line; the first indented line after it.
EXAMPLE = re.compile(
    r"^(?:### (\w+)|\*\*(\w+)\*\*)(?:(?!^#|^\*\*).)*?^    (\S[^\n]*)$", re.M | re.S
)
EXAMPLES = {found[1] or found[2]: found[3] for found in EXAMPLE.finditer(REFERENCE)}
STRUCTS = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, Struct) and name not in ("Struct", "Request")
}


def _message(document: Any) -> Any:
    """The document with bytes where it says {"bin": hex}."""
    if isinstance(document, list):
        return [_message(part) for part in document]
    if not isinstance(document, dict):
        return document
    if document.keys() == {"bin"}:
        return bytes.fromhex(document["bin"])
    return {name: _message(part) for name, part in document.items()}


def test_the_reference_is_that_of_the_structs() -> None:
    assert reference() == REFERENCE, "run scripts/render_wire.py"
    assert TEXT.count("\n") <= 820


def test_every_struct_is_documented() -> None:
    assert STRUCTS.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("name", STRUCTS)
def test_an_example_is_a_message_of_its_struct(name: str) -> None:
    """Written with another MessagePack library, read as the struct, and written again the same."""
    document = json.loads(EXAMPLES[name])
    read = msgspec.msgpack.decode(msgpack.packb(_message(document)), type=STRUCTS[name])
    assert as_plain(read) == document
    assert msgpack.unpackb(encode(read), strict_map_key=False) == _message(document)


def test_codes_of_errors_are_those_of_the_tree() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (yes|no) \|", PROSE, re.M))
    local = {"error", "config"}  # never sent
    assert rows == {
        code: "yes" if kind.retryable else "no"
        for code, kind in errors.BY_CODE.items()
        if code not in local
    }


def test_subjects_are_those_of_the_page() -> None:
    rows = set(re.findall(r"^\| `(motet\.[^`]+)`", PROSE, re.M))
    made = {
        subjects.operation("asr", "listen"),
        subjects.open_at("asr-1"),
        subjects.control_at("asr-1"),
        subjects.feeds_to("asr-1"),
        subjects.frames_to("asr-1"),
        subjects.open_reply("asr-1", 7),
        subjects.heartbeat("asr-1"),
        subjects.cache_updates("asr-1"),
    }
    names = {"<role>": "asr", "<instance>": "asr-1", "<operation>": "listen", "<stream>": "7"}
    assert {re.sub(r"<\w+>", lambda name: names[name[0]], row) for row in rows} == made
