"""POST /v1/responses over a bus in memory: events, items, tools, chains, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet_gateway.files.store import FileStore, StoredFile, new_id
from motet_gateway.responses import history
from motet_gateway.responses.reasoning import encoded
from motet_gateway.responses.stored_files import MOST_FILES
from motet_shared.errors import ContextTooLong, InternalError, Overloaded
from motet_shared.messages import Text, TextLogprob, ToolCallDelta
from motet_shared.testing import memory_bus, running, settle
from support.clients.gateway_client import Http
from support.clients.responses_client import (
    WEATHER,
    Responses,
    events_of,
    kinds,
    problem,
    responses,
)
from support.services.drawing_services import BRUSH, FakeDiffusion
from support.services.fake_services import tool_call, words
from support.stages.tenants_stage import OTHER, bearer, document

PIXEL = "data:image/png;base64," + base64.b64encode(b"\x89PNG a pixel").decode()
TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.fixture
async def here() -> AsyncIterator[Responses]:
    async with responses() as made:
        yield made


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == f"response.{kind}"]


# -------------------------------------------------------------------------------------------------------------- events
async def test_a_text_is_streamed_as_openai_streams_it(here: Responses) -> None:
    events = await here.stream("hi there")
    assert kinds(events) == [
        "created",
        "in_progress",
        *TEXT_EVENTS,
        *["output_text.delta"] * 3,
        *TEXT_END,
        "completed",
    ]
    text = "You said: hi there"
    assert "".join(event["delta"] for event in of(events, "output_text.delta")) == text
    (done,) = of(events, "output_text.done")
    (item,) = of(events, "output_item.done")
    last = events[-1]["response"]
    assert done["text"] == item["item"]["content"][0]["text"] == text
    assert last["output"] == [item["item"]]
    assert {event.get("item_id", item["item"]["id"]) for event in events} == {item["item"]["id"]}
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[0]["response"]["usage"]) == ([], None)
    assert last["usage"]["total_tokens"] == 11


async def test_a_whole_response_is_the_last_event_of_the_stream(here: Responses) -> None:
    whole, streamed = await here.create(seed=1), (await here.stream(seed=1))[-1]["response"]
    for response in (whole, streamed):
        for item in [response, *response["output"]]:
            del item["id"]
        del response["created_at"], response["completed_at"]
    assert whole == streamed


async def test_what_was_sent_is_repeated(here: Responses) -> None:
    sent = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low"},
        "safety_identifier": "s",
        "temperature": 0.5,
        "tool_choice": "none",
        "tools": [WEATHER],
        "top_p": 0.5,
        "truncation": "auto",
        "user": "u",
    }
    made = await here.create(**sent)
    sent["reasoning"] = {"effort": "low", "summary": None}
    sent["tools"] = [WEATHER | {"strict": False}]
    assert {name: made[name] for name in sent} == sent
    assert (made["store"], made["background"], made["previous_response_id"]) == (True, False, None)
    chat = here.requests[-1]
    assert chat.messages[0] == {"role": "system", "content": "Be brief."}
    assert (chat.max_tokens, chat.reasoning_effort, chat.tool_choice) == (50, "low", "none")
    assert chat.tenant == "s"


async def test_extensions_of_benchmarks_reach_the_engine(here: Responses) -> None:
    await here.create(
        ignore_eos=True, min_tokens=4, max_output_tokens=8, stop=None, stop_token_ids=[7]
    )
    sampling = here.requests[-1].sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.max_tokens) == (True, 4, 8)
    assert sampling.stop_token_ids == [7]
    await here.create(stop=["."], logit_bias={"5": -3})
    assert (here.requests[-1].stop, here.requests[-1].sampling.logit_bias) == (["."], {5: -3})


async def test_a_reply_that_is_cut_is_incomplete(here: Responses) -> None:
    here.made.tokenizer.status = "length"
    events = await here.stream()
    assert kinds(events)[-1] == "incomplete"
    last = events[-1]["response"]
    assert (last["status"], last["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert last["output"][0]["status"] == "incomplete"


async def test_reasoning_is_an_item_of_its_own(here: Responses) -> None:
    here.says(Text("", [1], reasoning="Two and"), Text("", [2], reasoning=" two."), Text("4", [3]))
    events = await here.stream(include=["reasoning.encrypted_content"])
    assert kinds(events)[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    thought, said = events[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Two and two."}]
    assert (thought["summary"], said["content"][0]["text"]) == ([], "4")
    # It goes back to the model, from either form.
    for kept in ("content", "encrypted_content"):
        item = {name: value for name, value in thought.items() if name in (kept, "type", "summary")}
        await here.create([{"role": "user", "content": "2 + 2?"}, item, said], store=False)
        assert here.requests[-1].messages[1] == {
            "role": "assistant",
            "content": "4",
            "reasoning_content": "Two and two.",
        }
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    assert await here.refused([foreign]) == (
        400,
        "invalid_request",
        "input[0].encrypted_content",
    )


async def test_log_probabilities(here: Responses) -> None:
    here.says(Text("yes", [1], logprobs=[TextLogprob(b"yes", -0.1, [(b"yes", -0.1)])]))
    events = await here.stream(include=["message.output_text.logprobs"], top_logprobs=1)
    assert here.requests[-1].sampling.logprobs == 1
    (delta,) = of(events, "output_text.delta")
    entry = {"token": "yes", "logprob": -0.1, "bytes": [121, 101, 115]}
    assert delta["logprobs"] == [{**entry, "top_logprobs": [entry]}]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == delta["logprobs"]
    assert await here.refused(top_logprobs=1) == (400, "invalid_request", "top_logprobs")


# --------------------------------------------------------------------------------------------------------------- tools
async def test_a_function_is_called(here: Responses) -> None:
    here.says(Text("Let me look.", [1]), tool_call('{"place": "Oslo"}', "weather"))
    events = await here.stream(tools=[WEATHER])
    assert kinds(events)[2:] == [
        *TEXT_EVENTS,
        *TEXT_END,
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    said, call = events[-1]["response"]["output"]
    assert said["content"][0]["text"] == "Let me look."
    assert (call["type"], call["name"], call["call_id"], call["arguments"], call["status"]) == (
        "function_call",
        "weather",
        "call_0",
        '{"place": "Oslo"}',
        "completed",
    )
    (function,) = here.requests[-1].tools
    assert function["function"]["name"] == "weather"


async def test_parallel_calls_and_white_space_before_them(here: Responses) -> None:
    here.says(
        Text("\n\n", [1]),
        tool_call('{"place": "Oslo"}', "weather"),
        tool_call('{"place": "Rome"}', "weather", 1),
    )
    made = await here.create(tools=[WEATHER])
    assert [item["type"] for item in made["output"]] == ["function_call", "function_call"]
    assert [item["call_id"] for item in made["output"]] == ["call_0", "call_1"]
    assert len({item["id"] for item in made["output"]}) == 2


async def test_a_custom_tool_has_free_text(here: Responses) -> None:
    pieces = ['{"inp', 'ut": "SELECT \\"', "\\u00e4", '\\n"}']
    here.says(
        Text("", [1], [ToolCallDelta(0, "call_0", "sql")]),
        *(Text("", [2], [ToolCallDelta(0, arguments=piece)]) for piece in pieces),
    )
    tool = {"type": "custom", "name": "sql", "format": {"type": "grammar", "syntax": "regex"}}
    tool["format"]["definition"] = "SELECT .*"  # type: ignore[index]
    events = await here.stream(tools=[tool])
    text = 'SELECT "ä\n'
    deltas = of(events, "custom_tool_call_input.delta")
    assert "".join(event["delta"] for event in deltas) == text
    assert len(deltas) == 3, "as they come"
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "sql", text)
    (declared,) = here.requests[-1].tools
    parameters = declared["function"]["parameters"]
    assert parameters["properties"]["input"] == {"type": "string", "pattern": "^(?:SELECT .*)$"}
    assert declared["function"]["strict"] is True

    output = {"type": "custom_tool_call_output", "call_id": "call_0", "output": "3 rows"}
    await here.create([{"role": "user", "content": "Ask."}, call, output], tools=[tool])
    _, asked, answered = here.requests[-1].messages
    assert msgspec.json.decode(asked["tool_calls"][0]["function"]["arguments"]) == {"input": text}
    assert answered == {"role": "tool", "content": "3 rows", "tool_call_id": "call_0"}


async def test_pictures_are_drawn(here: Responses) -> None:
    async with running(FakeDiffusion(await memory_bus(here.made.hub, "diffusion"))):
        await settle()
        replies = iter([[tool_call('{"prompt": "a circle"}', "draw")], words("Here it is.")])
        here.made.tokenizer.reply = lambda request: next(replies)
        tool = {"type": "image_generation", "model": BRUSH}
        events = await here.stream("Draw a circle.", tools=[tool])
        assert kinds(events)[2:7] == [
            "output_item.added",
            "image_generation_call.in_progress",
            "image_generation_call.generating",
            "image_generation_call.completed",
            "output_item.done",
        ]
        image, said = events[-1]["response"]["output"]
        assert (image["type"], image["status"], image["revised_prompt"], image["size"]) == (
            "image_generation_call",
            "completed",
            "a circle",
            "8x8",
        )
        assert base64.b64decode(image["result"]) == b"a picture"
        assert said["content"][0]["text"] == "Here it is."
        here.says(*words("A circle."))
        before = events[-1]["response"]["id"]
        await here.create("What is it?", previous_response_id=before)
        shown = [message["content"] for message in here.requests[-1].messages]
        assert [{"type": "image"}] in [content[:1] for content in shown if content]


async def test_choices_among_tools(here: Responses) -> None:
    other = {"type": "custom", "name": "other"}
    tools = {"tools": [WEATHER, other]}
    for choice, expected in (
        ("required", ("required", "", ["weather", "other"])),
        ({"type": "function", "name": "weather"}, ("required", "weather", ["weather", "other"])),
        ({"type": "custom", "name": "other"}, ("required", "other", ["weather", "other"])),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "other"}],
            },
            ("auto", "", ["other"]),
        ),
    ):
        made = await here.create(tool_choice=choice, **tools)
        chat = here.requests[-1]
        names = [tool["function"]["name"] for tool in chat.tools]
        assert (chat.tool_choice, chat.tool, names) == expected
        assert made["tool_choice"] == choice
        assert len(made["tools"]) == 2
    await here.create(parallel_tool_calls=False, **tools)
    assert here.requests[-1].parallel_tools is False
    unknown = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "x"}],
    }
    assert await here.refused(tool_choice=unknown, **tools) == (
        400,
        "invalid_request",
        "tool_choice.tools[0].name",
    )
    assert await here.refused(tool_choice={"type": "function", "name": "x"}, **tools) == (
        400,
        "invalid_request",
        "tool_choice",
    )


async def test_a_text_of_a_given_shape(here: Responses) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    made = await here.create(text={"format": form})
    grammar = here.requests[-1].grammar
    assert (grammar.kind, msgspec.json.decode(grammar.text)) == ("json_schema", schema)
    assert made["text"] == {"format": form, "verbosity": "medium"}
    await here.create(text={"format": {"type": "json_object"}})
    assert here.requests[-1].grammar is not None
    await here.create(text={"format": {"type": "text"}, "verbosity": "medium"})
    assert here.requests[-1].grammar is None


# ---------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"tools": [{"type": "code_interpreter", "container": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_2025_08_26"}]}, "tools[0].type"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
async def test_what_is_hosted_elsewhere_is_refused_by_name(
    here: Responses, fields: dict[str, Any], param: str
) -> None:
    given = fields.pop("input", "hello")
    assert await here.refused(given, **fields) == (400, "unsupported_parameter", param)
    assert not here.requests


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"conversation": "conv_1"}, ("invalid_request", "conversation")),
        ({"prompt": {"id": "p"}}, ("invalid_request", "prompt")),
        ({"colour": "red"}, ("unsupported_parameter", "colour")),
        ({"stop": list("abcde")}, ("invalid_request", "stop")),
        ({"min_tokens": 9, "max_output_tokens": 8}, ("invalid_request", "min_tokens")),
        ({"temperature": 3}, ("invalid_request", "temperature")),
        ({"max_output_tokens": 0}, ("invalid_request", "max_output_tokens")),
        ({"input": [{"role": "nobody", "content": "x"}]}, ("invalid_request", "input[0].role")),
        ({"input": []}, ("invalid_request", "input")),
        ({"stream_options": {"include_obfuscation": False}}, ("invalid_request", "stream_options")),
        ({"background": True, "store": False}, ("invalid_request", "store")),
        ({"tools": [WEATHER, WEATHER]}, ("invalid_request", "tools[1].name")),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "name": "patch",
                        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
                    }
                ]
            },
            ("unsupported_parameter", "tools[0].format.syntax"),
        ),
        (
            {"tools": [{"type": "image_generation"}], "background": True},
            ("unsupported_parameter", "background"),
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            ("invalid_request", "input[0].content[0].file_id"),
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            ("invalid_request", "input[0].content[0].image_url"),
        ),
        (
            {
                "input": [
                    {
                        "role": "assistant",
                        "content": [{"type": "input_image", "image_url": PIXEL}],
                    }
                ]
            },
            ("unsupported_parameter", "input[0].content[0]"),
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            ("invalid_request", "input[0].call_id"),
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
            ("invalid_request", "input"),
        ),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            ("invalid_request", "input[0].id"),
        ),
    ],
)
async def test_errors_name_the_parameter(
    here: Responses, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    given = fields.pop("input", "hello")
    assert await here.refused(given, **fields) == (400, *expected)
    assert not here.requests


async def test_hints_are_ignored_and_named(here: Responses) -> None:
    http = await here.ask(
        [{"role": "user", "content": "hi", "metadata": {}}],
        text={"verbosity": "low"},
        reasoning={"summary": "auto"},
        session_id="s",
    ).done()
    assert http.status == 200
    named = set(http.headers["motet-ignored"].split(", "))
    assert named == {"text.verbosity", "reasoning.summary", "session_id", "input[].metadata"}


async def test_errors_of_the_model_are_errors_of_http_before_the_first_text(
    here: Responses,
) -> None:
    here.made.tokenizer.error = ContextTooLong("`messages`: too long", param="messages")
    for stream in (False, True):
        http = await here.ask(stream=stream).done()
        assert problem(http) == (400, "context_length_exceeded", "input")
        assert "`input`" in http.json()["error"]["message"]
    here.made.tokenizer.error = Overloaded("full")
    assert (await here.ask(stream=True).done()).status == 429


async def test_a_stream_that_breaks_has_failed(here: Responses) -> None:
    here.made.tokenizer.error, here.made.tokenizer.fail_after = InternalError("gone"), 2
    events = await here.stream()
    assert kinds(events)[-1] == "failed"
    last = events[-1]["response"]
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert last["output"][0]["content"][0]["text"] == "You said:"
    stored = (await here.get(last["id"])).json()
    assert stored == last
    assert await here.refused(previous_response_id=last["id"]) == (
        400,
        "invalid_request",
        "previous_response_id",
    )


# ------------------------------------------------------------------------------------------------------ messages, media
async def test_messages_of_a_conversation(here: Responses) -> None:
    await here.create(
        [
            {"type": "message", "role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
            {"role": "assistant", "content": "Still here."},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Bye"},
        ],
        instructions="Be honest.",
    )
    assert here.requests[-1].messages == [
        {"role": "system", "content": "Be honest.\n\nBe kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "assistant", "content": "Still here."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Bye"},
    ]


async def test_pictures_and_files(here: Responses) -> None:
    text = base64.b64encode("Grüße".encode()).decode()
    await here.create(
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": PIXEL, "detail": "low"},
                    {"type": "input_file", "filename": "a.txt", "file_data": text},
                    {"type": "input_file", "file_data": "data:text/csv;base64," + text},
                ],
            }
        ]
    )
    chat = here.requests[-1]
    assert chat.messages[0]["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image"},
        {"type": "text", "text": "File a.txt:\n\nGrüße"},
        {"type": "text", "text": "File without a name:\n\nGrüße"},
    ]
    assert len(chat.images) == 1
    pdf = base64.b64encode(b"%PDF-1.7\x00").decode()
    for data, code in ((pdf, "unsupported_parameter"), ("???", "invalid_request")):
        content = [{"type": "input_file", "file_data": data}]
        assert await here.refused([{"role": "user", "content": content}]) == (
            400,
            code,
            "input[0].content[0].file_data",
        )


async def stored_file(here: Responses, content: bytes, name: str = "a.txt", owner: str = "") -> str:
    """Store a file as POST /v1/files does; return its id."""
    if here.made.service.files is None:
        here.made.service.files = FileStore(here.documents, here.made.service.stored, 3600.0)
    now = int(time.time())
    file = StoredFile(
        id=new_id("file-"),
        bytes=0,
        parts=0,
        created_at=now,
        filename=name,
        purpose="user_data",
        expires_at=now + 3600,
    )

    async def parts() -> AsyncIterator[bytes]:
        yield content[:3]
        yield content[3:]

    return (await here.made.service.files.write(owner, file, parts())).id


def with_file(file_id: str, **fields: Any) -> list[Any]:
    part = {"type": "input_file", "file_id": file_id, **fields}
    return [{"role": "user", "content": [part]}]


async def test_a_stored_file_is_read_and_read_again_in_the_next_response(here: Responses) -> None:
    file_id = await stored_file(here, "Grüße".encode())
    first = await here.create(with_file(file_id))
    text = "File a.txt:\n\nGrüße"
    assert here.requests[-1].messages[0]["content"] == text
    listed = (await here.get(f"{first['id']}/input_items")).json()["data"]
    assert listed[0]["content"][0]["file_id"] == file_id
    here.calls("{}")
    asked = await here.create("And?", tools=[WEATHER], previous_response_id=first["id"])
    assert here.requests[-1].messages[0]["content"] == text
    part = {"type": "input_file", "file_id": file_id, "filename": "b.txt"}
    output = {"type": "function_call_output", "call_id": "call_0", "output": [part]}
    await here.create([output], tools=[WEATHER], previous_response_id=asked["id"])
    assert here.requests[-1].messages[-1]["content"] == "File b.txt:\n\nGrüße"


async def test_stored_files_that_cannot_be_read_are_named(here: Responses) -> None:
    param = "input[0].content[0].file_id"
    assert await here.refused(with_file("file-" + "0" * 24)) == (503, "unavailable", param)
    binary = await stored_file(here, b"%PDF\0")
    assert await here.refused(with_file(binary)) == (400, "unsupported_parameter", param)
    theirs = await stored_file(here, b"secret", owner="other")
    for name in (theirs, "file-" + "0" * 24, "../" + binary):
        assert await here.refused(with_file(name)) == (400, "invalid_request", param)
    both = with_file(binary, file_data="YQ==")
    assert await here.refused(both) == (400, "invalid_request", param)


async def test_all_stored_files_together_are_bounded() -> None:
    async with responses(max_body=4096) as here:
        file_id = await stored_file(here, b"a" * 1500)
        part = {"type": "input_file", "file_id": file_id}
        await here.create([{"role": "user", "content": [part] * 2}])
        refused = await here.refused([{"role": "user", "content": [part] * 3}])
        assert refused == (413, "payload_too_large", "input[0].content[2].file_id")


async def test_so_many_stored_files_are_read(here: Responses) -> None:
    ids = [await stored_file(here, b"a") for _ in range(MOST_FILES + 1)]
    parts = [{"type": "input_file", "file_id": one} for one in ids]
    await here.create([{"role": "user", "content": parts[:-1]}])
    refused = await here.refused([{"role": "user", "content": parts}])
    assert refused == (400, "invalid_request", f"input[0].content[{MOST_FILES}].file_id")


# --------------------------------------------------------------------------------------------------------------- chains
async def test_a_conversation_goes_on_behind_a_tool_call(here: Responses) -> None:
    here.calls('{"place": "Oslo"}')
    first = await here.create("Weather in Oslo?", tools=[WEATHER], instructions="Only once.")
    here.says(*words("It rains."))
    output = {"type": "function_call_output", "call_id": "call_0", "output": "rain"}
    second = await here.create([output], tools=[WEATHER], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    third = await here.create("And tomorrow?", previous_response_id=second["id"])
    messages = here.requests[-1].messages
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ], "instructions are of one response"
    assert messages[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert (messages[2]["content"], messages[3]["content"]) == ("rain", "It rains.")
    # What goes on from the middle does not know what came later.
    await here.create("Why?", previous_response_id=second["id"])
    assert len(here.requests[-1].messages) == 5
    assert third["id"] != second["id"]


async def test_a_call_needs_its_output(here: Responses) -> None:
    here.says(tool_call("{}", "weather"), tool_call("{}", "weather", 1))
    first = await here.create(tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": "call_0", "output": "rain"}
    assert await here.refused([output], previous_response_id=first["id"]) == (
        400,
        "invalid_request",
        "input",
    )
    other = {**output, "call_id": "call_9"}
    assert await here.refused([output, other], previous_response_id=first["id"]) == (
        400,
        "invalid_request",
        "input[1].call_id",
    )


async def test_items_are_referred_to_by_id(here: Responses) -> None:
    first = await here.create("Name a colour.")
    (said,) = first["output"]
    await here.create(
        [{"type": "item_reference", "id": said["id"]}, {"role": "user", "content": "Another."}],
        store=False,
    )
    assert here.requests[-1].messages[0] == {
        "role": "assistant",
        "content": "You said: Name a colour.",
    }
    missing = said["id"].replace("_0", "_7")
    assert await here.refused([{"type": "item_reference", "id": missing}]) == (
        400,
        "invalid_request",
        "input[0].id",
    )


async def test_items_that_are_referred_to_are_bounded(tmp_path: Path) -> None:
    async with responses(max_body=10_000) as here:
        first = await here.create("x" * 2000)
        (said,) = first["output"]
        reference = {"type": "item_reference", "id": said["id"]}
        asked: dict[str, Any] = {"truncation": "auto"}
        await here.create([reference] * 2, **asked)
        refused = await here.refused([reference] * 9, **asked)
        assert refused == (400, "context_length_exceeded", "input[2].id")


async def test_reasoning_of_all_items_is_bounded_before_it_is_joined(here: Responses) -> None:
    """Four items of 4 MiB are 22 KB on the wire."""
    item = {"type": "reasoning", "summary": [], "encrypted_content": encoded("x" * (4 << 20))}
    began = time.process_time()
    refused = await here.refused([item] * 60)
    assert refused[1:] == ("context_length_exceeded", "input[4]")
    assert time.process_time() - began < 5


async def test_a_long_chain_may_begin_behind_a_call(here: Responses, monkeypatch: Any) -> None:
    monkeypatch.setattr(history, "MAX_CHAIN", 1)
    here.calls("{}")
    last = await here.create("Weather?", tools=[WEATHER])
    for _ in range(3):
        output = {"type": "function_call_output", "call_id": "call_0", "output": "rain"}
        last = await here.create([output], tools=[WEATHER], previous_response_id=last["id"])
    roles = [message["role"] for message in here.requests[-1].messages]
    assert roles == ["assistant", "tool"]


async def test_what_is_not_stored_has_no_successor(here: Responses) -> None:
    unstored = await here.create(store=False)
    assert unstored["store"] is False
    assert not here.documents.kept
    expected = (404, "previous_response_not_found", "previous_response_id")
    for name in (unstored["id"], "resp_" + "0" * 48, "x", ""):
        assert await here.refused(previous_response_id=name) == expected
    assert (await here.get(unstored["id"])).status == 404


async def test_the_input_of_a_response_is_listed(here: Responses) -> None:
    texts = [f"message {number}" for number in range(5)]
    items = [{"role": "user", "content": text} for text in texts]
    image = {"type": "input_image", "image_url": PIXEL}
    items.append({"role": "user", "content": [image]})  # type: ignore[dict-item]
    made = await here.create(items)
    path = f"{made['id']}/input_items"
    page = (await here.get(f"{path}?limit=2")).json()
    assert page["has_more"] is True
    assert page["data"][0]["content"] == [
        {"type": "input_image", "image_url": None, "detail": "auto"}
    ]
    assert page["data"][1]["content"] == [{"type": "input_text", "text": "message 4"}]
    rest = (await here.get(f"{path}?after={page['last_id']}")).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == texts[3::-1]
    assert rest["has_more"] is False
    everything = (
        await here.get(f"{path}?order=asc&include[]=message.input_image.image_url")
    ).json()
    assert everything["data"][-1]["content"][0]["image_url"] == PIXEL
    assert [item["id"] for item in everything["data"]] == [
        item["id"] for item in reversed(page["data"] + rest["data"])
    ]
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        assert problem(await here.get(f"{path}?{query}"))[2] == param


async def test_responses_are_read_and_deleted(here: Responses) -> None:
    made = await here.create()
    assert (await here.get(made["id"])).json() == made
    gone = await here.get(made["id"], "DELETE")
    assert (gone.status, gone.json()) == (
        200,
        {"id": made["id"], "object": "response", "deleted": True},
    )
    assert not here.documents.kept
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        http = await here.get(made["id"] + path, method)
        assert (http.status, http.json()["error"]["code"]) == (404, "not_found")
    first = await here.create()
    assert (await here.get(first["id"] + "/cancel", "POST")).status == 400, "it is over"
    assert (await here.get(first["id"] + "?stream=true")).status == 400, "it has no events"
    await here.create()
    gone = await Http(here.made.app, "/v1/responses", b"", "DELETE").done()
    assert gone.json() == {"object": "list", "deleted": True}
    assert not here.documents.kept


async def test_tenants_read_their_own_only(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(document(""))
    async with responses(tenants_file=file) as here:
        made = await here.create(headers=bearer())
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/input_items"),
            ("POST", "/cancel"),
        ):
            http = await here.get(made["id"] + path, method, **bearer(OTHER))
            assert problem(http)[:2] == (404, "not_found")
        chained = await here.refused(previous_response_id=made["id"], headers=bearer(OTHER))
        assert chained[:2] == (404, "previous_response_not_found")
        reference = {"type": "item_reference", "id": made["output"][0]["id"]}
        assert await here.refused([reference], headers=bearer(OTHER)) == (
            400,
            "invalid_request",
            "input[0].id",
        )
        await Http(here.made.app, "/v1/responses", b"", "DELETE", bearer(OTHER)).done()
        assert (await here.get(made["id"], **bearer())).json() == made


async def test_stored_bytes_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(document("stored_bytes = 5000"))
    async with responses(tenants_file=file) as here:
        given = "x" * 2000
        first = await here.create(given, headers=bearer())
        assert await here.refused(given, headers=bearer()) == (429, "insufficient_quota", "store")
        assert (await here.create(given, headers=bearer(), store=False))["store"] is False
        await here.create(given, headers=bearer(OTHER))
        await here.get(first["id"], "DELETE", **bearer())
        await here.create(given, headers=bearer())


async def test_what_a_newer_version_stored_is_not_guessed_at(here: Responses) -> None:
    made = await here.create()
    key = ("", made["id"])
    here.documents.kept[key] = here.documents.kept[key].replace(b"{", b'{"version":99,', 1)
    assert problem(await here.get(made["id"]))[:2] == (503, "unavailable")


@pytest.mark.parametrize("returns", [True, False])
async def test_a_store_that_is_away_is_waited_for(here: Responses, returns: bool) -> None:
    here.made.tokenizer.pace = 0.02
    asked = here.ask("a b c d", stream=True)
    while not any(b"output_text.delta" in chunk for chunk in asked.chunks):
        await settle()
    here.documents.away = True
    while b" d" not in asked.body:
        await settle()
    if returns:
        await asyncio.sleep(0.05)
        here.documents.away = False
    await asked.done()
    last = events_of(asked.body)[-1]["response"]
    assert last["status"] == ("completed" if returns else "failed")
    here.documents.away = False
    assert (await here.get(last["id"])).status == (200 if returns else 404)


async def test_without_a_store_responses_are_answered_but_not_kept() -> None:
    async with responses() as here:
        here.made.service.responses = None
        assert (await here.create())["store"] is False
        assert await here.refused(store=True) == (503, "unavailable", "store")
        assert await here.refused(background=True) == (503, "unavailable", "background")
        assert (await here.get("resp_" + "0" * 48)).status == 503


# ---------------------------------------------------------------------------------------------------------- truncation
async def test_a_conversation_that_is_too_long_loses_its_beginning(here: Responses) -> None:
    def reply(request: Any) -> list[Text]:
        if sum(message["role"] == "user" for message in request.messages) > 2:
            raise ContextTooLong("too long", param="messages")
        return words("fine")

    here.made.tokenizer.reply = reply
    turns: list[dict[str, Any]] = []
    for number in range(6):
        picture = {"type": "input_image", "image_url": PIXEL}
        text = {"type": "input_text", "text": f"question {number}"}
        turns += [
            {"role": "user", "content": [text, picture]},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    turns.append({"role": "user", "content": "the last"})
    assert (await here.refused(turns, instructions="Stay."))[:2] == (400, "context_length_exceeded")
    made = await here.create(turns, instructions="Stay.", truncation="auto")
    assert made["truncation"] == "auto"
    chat = here.requests[-1]
    roles = [message["role"] for message in chat.messages]
    assert roles[0] == "system"
    assert chat.messages[-1]["content"] == "the last"
    assert roles.count("user") <= 2
    shown = sum(message["content"][-1:] == [{"type": "image"}] for message in chat.messages)
    assert len(chat.images) == shown


async def test_one_that_cannot_be_shortened_is_refused(here: Responses) -> None:
    here.made.tokenizer.error = ContextTooLong("too long", param="messages")
    given = [{"role": "user", "content": f"{number}"} for number in range(4)]
    assert await here.refused(given, truncation="auto") == (
        400,
        "context_length_exceeded",
        "input",
    )
    assert 2 <= len(here.requests) <= 4
