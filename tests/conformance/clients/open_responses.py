"""The cases of Open Responses' compliance suite: what each asks for, and what it wants of the answer.

Its own program (github.com/openresponses/openresponses, `npm run test:compliance`) needs bun and a
clone; docs/conformance.md says how to run it.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import httpx
from cases import MODEL, V1, case, main

# Fields that a response must have, null or not, by the specification's schema.
REQUIRED = (
    "id object created_at completed_at status incomplete_details model previous_response_id"
    " instructions output error tools tool_choice truncation parallel_tool_calls text top_p"
    " presence_penalty frequency_penalty top_logprobs temperature reasoning user usage"
    " max_output_tokens max_tool_calls store background service_tier metadata safety_identifier"
    " prompt_cache_key"
).split()
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def checked(response: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    """Return a response that has all required fields, this status and an output."""
    missing = [name for name in REQUIRED if name not in response]
    assert not missing, f"{missing} are missing"
    assert response["object"] == "response"
    assert response["status"] == status, response["status"]
    assert response["output"], "there is no output"
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return response


def created(given: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": given, **fields}
    answer = httpx.post(f"{V1}/responses", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(given: list[Any], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a response; their names are those of their data."""
    body = {"model": MODEL, "input": given, "stream": True, **fields}
    events = []
    with httpx.stream("POST", f"{V1}/responses", json=body, timeout=60, trust_env=False) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for block in answer.read().decode().strip().split("\n\n"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def png(width: int, height: int, color: bytes) -> str:
    """Return the data URL of a picture of one color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    rows = (b"\0" + color * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


@case
def basic_response() -> None:
    checked(created([message("user", "Say hello in exactly 3 words.")]))


@case
def streaming_response() -> None:
    events = streamed([message("user", "Count from 1 to 5.")])
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert "response.output_text.delta" in kinds
    assert kinds[-1] == "response.completed"
    final = checked(events[-1]["response"])
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == final["output"][0]["content"][0]["text"]


@case
def system_prompt() -> None:
    given = [message("system", "You are a pirate."), message("user", "Say hello.")]
    checked(created(given))


@case
def tool_calling() -> None:
    given = [message("user", "What's the weather like in San Francisco?")]
    made = checked(created(given, tools=[WEATHER], tool_choice="required"))
    assert "function_call" in [item["type"] for item in made["output"]]


@case
def tool_calling_streaming() -> None:
    given = [message("user", "What's the weather like in San Francisco?")]
    events = streamed(given, tools=[WEATHER], tool_choice="required")
    kinds = [event["type"] for event in events]
    for kind in ("output_item.added", "output_item.done"):
        items = [e["item"]["type"] for e in events if e["type"] == f"response.{kind}"]
        assert "function_call" in items, kind
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    checked(events[-1]["response"])


@case
def image_input() -> None:
    parts = [
        {"type": "input_text", "text": "What do you see in this image?"},
        {"type": "input_image", "image_url": png(32, 32, b"\xff\0\0")},
    ]
    checked(created([message("user", parts)]))


@case
def multi_turn() -> None:
    given = [
        message("user", "My name is Alice."),
        message("assistant", "Hello Alice! How can I help you?"),
        message("user", "What is my name?"),
    ]
    checked(created(given))


main("httpx", version="cases of 0cb939c")
