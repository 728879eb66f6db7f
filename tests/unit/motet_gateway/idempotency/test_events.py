"""Test that the ids of a stream's events say the same however the stream is cut, and go on anywhere."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_gateway.http.problems import Problem
from motet_gateway.idempotency.events import EventsBehind, NumberedEvents, parse_id
from motet_gateway.openai.render import DONE, ChatChunks, CompletionChunks, error_event, event
from motet_shared.errors import BadRequest, Unavailable
from motet_shared.messages import End, Text, ToolCallDelta, Usage


def numbered(data: bytes) -> list[tuple[str, bytes]]:
    """Return each event with its id, "" for one without."""
    found = []
    for text in NumberedEvents().feed(data).split(b"\n\n")[:-1]:
        head, _, rest = text.rpartition(b"\n")
        found.append((head.removeprefix(b"id: ").decode() if head else "", rest + b"\n\n"))
    return found


def behind(name: str, data: bytes, seed: int) -> bytes:
    """Return what comes behind an event of a stream, which arrives in pieces."""
    pieces, cut, at = [], random.Random(seed), 0
    while at < len(data):
        size = cut.randint(1, 200)
        pieces.append(data[at : at + size])
        at += size
    numbers, rest = NumberedEvents(), EventsBehind(parse_id(name))
    return b"".join(rest.feed(numbers.feed(piece)) for piece in pieces)


def cut(text: str, seed: int) -> list[str]:
    """Return a text in pieces of one to five characters."""
    pieces, numbers = [], random.Random(seed)
    while text:
        size = numbers.randint(1, 5)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def chat(text: str, reasoning: str, arguments: str, seed: int) -> bytes:
    """Render a reply of two choices with reasoning, a text and tool calls, cut by the seed."""
    chunks = ChatChunks("chatcmpl-1", 1, "m", include_usage=True)
    choices = [chunks.choice(index) for index in range(2)]
    said = b""
    for index, choice in enumerate(choices):
        said += choice.start()
        items = [Text("", [1], reasoning=part) for part in cut(reasoning, seed + index)]
        items += [Text(part, [1]) for part in cut(text, seed + index + 10)]
        items.append(Text("", [1], [ToolCallDelta(0, f"call_{index}", "draw")]))
        items += [Text("", [1], [ToolCallDelta(0, arguments=one)]) for one in cut(arguments, seed)]
        said += choice.batch(items) + choice.finish(End(1, 1, "stop", Usage()))
    return said + chunks.usage(Usage(3, 4), {}) + DONE


def completion(text: str, seed: int) -> bytes:
    chunks = CompletionChunks("cmpl-1", 1, "m")
    choice = chunks.choice(0)
    items = [Text(part, [1]) for part in cut(text, seed)]
    return choice.start() + choice.batch(items) + choice.finish(End(1, 1, "length", Usage())) + DONE


def said(data: bytes) -> dict[str, Any]:
    """Return what a stream says, joined by choice and field."""
    found: dict[str, Any] = {"done": data.count(b"[DONE]"), "usage": 0, "finish": []}
    for line in data.decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        found["usage"] += not chunk["choices"]
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta", choice)
            for name in ("role", "content", "reasoning_content", "text"):
                found[f"{index}{name}"] = found.get(f"{index}{name}", "") + (delta.get(name) or "")
            for tool in delta.get("tool_calls") or ():
                for name in ("id", "type"):
                    found[f"{index}{name}"] = found.get(f"{index}{name}", "") + tool.get(name, "")
                for name, value in tool["function"].items():
                    found[f"{index}{name}"] = found.get(f"{index}{name}", "") + value
            found["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


def together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {
        name: first.get(name, type(second[name])()) + second[name]
        for name in {**first, **second}
        if name in second
    } | {name: value for name, value in first.items() if name not in second}


def streams(text: str, seed: int) -> tuple[bytes, bytes]:
    """Return the same chat, cut in two ways."""
    return chat(text, "hmm " + text, '{"a": "' + text + '"}', seed), chat(
        text, "hmm " + text, '{"a": "' + text + '"}', seed + 1
    )


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_a_stream_goes_on_behind_each_event_however_it_is_cut(text: str, seed: int) -> None:
    first, second = streams(text, seed)
    whole = said(first)
    assert said(second) == whole
    had = b""
    for name, one in numbered(first):
        assert name
        had += one
        rest = behind(name, second, seed)
        assert together(said(had), said(rest)) == whole, name
    assert rest == b""


def test_completions_go_on_too() -> None:
    first, second = (
        completion("one two three data: {four", 1),
        completion("one two three data: {four", 2),
    )
    had = b""
    for name, one in numbered(first):
        had += one
        assert together(said(had), said(behind(name, second, 3))) == said(first)


def test_logprobs_go_on_entry_by_entry() -> None:
    def reply(*counts: int) -> bytes:
        at, events = 0, b""
        for count in counts:
            entries = [{"token": str(n), "logprob": -n} for n in range(at, at + count)]
            choice = {
                "index": 0,
                "delta": {"content": "x" * count},
                "logprobs": {"content": entries},
                "finish_reason": None,
            }
            events += event({"object": "chat.completion.chunk", "choices": [choice]})
            at += count
        return events

    name, _ = numbered(reply(2, 1))[0]
    (rest,) = behind(name, reply(3), 1).split(b"\n\n")[:-1]
    found = json.loads(rest.rpartition(b"data: ")[2])["choices"][0]
    assert found["delta"]["content"] == "x"
    assert [entry["token"] for entry in found["logprobs"]["content"]] == ["2"]


def test_other_events_are_unchanged() -> None:
    comment, failed = b": served-by one\n\n", error_event(Problem.of(Unavailable("gone")))
    anthropic = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    numbers = NumberedEvents()
    assert numbers.feed(comment + anthropic) == comment + anthropic
    assert not numbers.has_failed
    assert numbers.feed(failed) == failed
    assert numbers.has_failed


def test_an_event_is_rendered_once_it_is_whole() -> None:
    numbers, data = NumberedEvents(), completion("word", 1)
    parts = [numbers.feed(data[at : at + 7]) for at in range(0, len(data), 7)]
    assert b"".join(parts) == NumberedEvents().feed(data)


@pytest.mark.parametrize(
    "name", ["", "12", "0c=", "0c=-1", "0c=1,", "0C=1", "0c=1;0r=1", "x" * 9000, "0c=9999999999"]
)
def test_other_ids_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="`Last-Event-ID`"):
        parse_id(name)
