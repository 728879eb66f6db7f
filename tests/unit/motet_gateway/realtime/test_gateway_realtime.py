"""`/v1/realtime`: the order of events, what clients may say, and how sockets close."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from openai._models import construct_type
from openai.types.realtime import RealtimeServerEvent
from PIL import Image

from motet_gateway.http.websocket import frame_head
from motet_pipelines.voice.conversation.history import chat_messages, without_oldest
from motet_shared.errors import ContextTooLong, InternalError
from motet_shared.messages import Text, ToolCallDelta
from motet_shared.testing import settle
from motet_shared.wire.epochs import NO_EPOCH
from support.clients.gateway_client import Socket, World, session, world
from support.services.fake_services import MODEL, words

DRAW = {
    "type": "function",
    "name": "draw",
    "description": "Draw.",
    "parameters": {"type": "object"},
}
TURN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
    "rate_limits.updated",
]


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world(patience=0.2) as made:
        yield made


@pytest.fixture
async def socket(here: World) -> AsyncIterator[Socket]:
    async with session(here.app) as opened:
        yield opened


def kinds(events: list[Any]) -> list[str]:
    """Types of events, runs of deltas as one."""
    found: list[str] = []
    for event in events:
        if not (event["type"].endswith(".delta") and found and found[-1] == event["type"]):
            found.append(event["type"])
    return found


async def told(socket: Socket, text: str) -> None:
    socket.say(text)
    assert kinds(await socket.until("conversation.item.done")) == [
        "conversation.item.added",
        "conversation.item.done",
    ]


async def respond(socket: Socket, **response: Any) -> list[Any]:
    socket.send("response.create", response=response)
    return await socket.until("rate_limits.updated", "error")


# ----------------------------------------------------------------------------------------------------------- a turn
async def test_the_order_of_a_turn(here: World, socket: Socket) -> None:
    await told(socket, "hello you")
    events = await respond(socket)
    assert kinds(events) == TURN
    assert [event["delta"] for event in events if "delta" in event] == [
        "You",
        " said:",
        " hello",
        " you",
    ]
    done = events[-2]["response"]
    assert (done["status"], done["output"][0]["content"][0]["text"]) == (
        "completed",
        "You said: hello you",
    )
    assert done["usage"]["total_tokens"] == 11
    assert [limit["name"] for limit in events[-1]["rate_limits"]] == ["requests"]


async def test_every_event_is_one_of_the_official_types(here: World, socket: Socket) -> None:
    await told(socket, "hello")
    for event in await respond(socket):
        parsed: Any = construct_type(type_=RealtimeServerEvent, value=event)
        type(parsed).model_validate(event, strict=True)
        assert parsed.type == event["type"]


async def test_ids_are_consistent_and_events_are_numbered(here: World, socket: Socket) -> None:
    socket.say("hello")
    events = await socket.until("conversation.item.done")
    said = events[0]["item"]["id"]
    events += await respond(socket)
    assert len({event["event_id"] for event in events}) == len(events)
    reply = next(
        event["item"]["id"] for event in events if event["type"] == "response.output_item.added"
    )
    assert {event["item_id"] for event in events if "item_id" in event} == {reply}
    links = [event["previous_item_id"] for event in events if "previous_item_id" in event]
    assert links == [None, None, said, said]


async def test_a_conversation_remembers(here: World, socket: Socket) -> None:
    socket.send("session.update", session={"type": "realtime", "instructions": "be brief"})
    await socket.expect("session.updated")
    await told(socket, "one")
    await respond(socket)
    await told(socket, "two")
    await respond(socket)
    assert here.tokenizer.requests[-1].messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "You said: one"},
        {"role": "user", "content": "two"},
    ]


async def test_a_tool_is_called_and_answered(here: World, socket: Socket) -> None:
    socket.send("session.update", session={"type": "realtime", "tools": [DRAW]})
    await socket.expect("session.updated")
    await told(socket, "draw x")
    pieces = [
        ToolCallDelta(0, "call_9", "draw", ""),
        ToolCallDelta(0, arguments='{"p":'),
        ToolCallDelta(0, arguments="1}"),
    ]
    here.tokenizer.reply = lambda request: [
        Text("Sure.", [1]),
        *(Text("", [2], [piece]) for piece in pieces),
    ]
    events = await respond(socket)
    assert kinds(events) == [
        *TURN[:-2],
        "response.output_item.added",
        "conversation.item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "conversation.item.done",
        "response.output_item.done",
        *TURN[-2:],
    ]
    done = next(
        event for event in events if event["type"] == "response.function_call_arguments.done"
    )
    assert (done["call_id"], done["name"], done["arguments"], done["output_index"]) == (
        "call_9",
        "draw",
        '{"p":1}',
        1,
    )
    item = {"type": "function_call_output", "call_id": "call_9", "output": "drawn"}
    socket.send("conversation.item.create", item=item)
    await socket.until("conversation.item.done")
    here.tokenizer.reply = lambda request: words("Done.")
    await respond(socket)
    request = here.tokenizer.requests[-1]
    assert request.tools == [
        {
            "type": "function",
            "function": {key: value for key, value in DRAW.items() if key != "type"},
        }
    ]
    assert request.messages[1:] == [
        {
            "role": "assistant",
            "content": "Sure.",
            "tool_calls": [
                {
                    "id": "call_9",
                    "type": "function",
                    "function": {"name": "draw", "arguments": '{"p":1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_9", "content": "drawn"},
    ]


async def test_a_call_that_was_interrupted_is_no_part_of_later_prompts(
    here: World, socket: Socket
) -> None:
    socket.send("session.update", session={"type": "realtime", "tools": [DRAW]})
    await socket.expect("session.updated")
    await told(socket, "draw x")
    here.tokenizer.status = "length"
    call = ToolCallDelta(0, "call_9", "draw", '{"p":')
    here.tokenizer.reply = lambda request: [Text("Sure.", [1]), Text("", [2], [call])]
    done = (await respond(socket))[-2]["response"]
    assert [item["status"] for item in done["output"]] == ["completed", "incomplete"]
    item = {"type": "function_call_output", "call_id": "call_9", "output": "none"}
    socket.send("conversation.item.create", item=item)
    await socket.until("conversation.item.done")
    here.tokenizer.status, here.tokenizer.reply = "stop", lambda request: words("Done.")
    assert (await respond(socket))[-2]["response"]["status"] == "completed"
    assert here.tokenizer.requests[-1].messages == [
        {"role": "user", "content": "draw x"},
        {"role": "assistant", "content": "Sure."},
    ]


async def test_a_reply_without_a_word_is_an_empty_message(here: World, socket: Socket) -> None:
    here.tokenizer.reply = lambda request: []
    await told(socket, "hello")
    events = await respond(socket)
    assert kinds(events) == [kind for kind in TURN if not kind.endswith(".delta")]
    assert events[-2]["response"]["output"][0]["content"] == [{"type": "output_text", "text": ""}]


async def test_the_limit_on_tokens_is_incomplete(here: World, socket: Socket) -> None:
    here.tokenizer.status = "length"
    await told(socket, "hello")
    done = (await respond(socket, max_output_tokens=3))[-2]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert done["max_output_tokens"] == 3
    assert here.tokenizer.requests[-1].max_tokens == 3


async def test_an_error_is_a_failed_response(here: World, socket: Socket) -> None:
    here.tokenizer.error, here.tokenizer.fail_after = InternalError("a bug"), 1
    await told(socket, "hello")
    events = await respond(socket)
    assert kinds(events) == TURN
    done = events[-2]["response"]
    assert (done["status"], done["status_details"]["error"]["code"]) == ("failed", "internal")
    assert done["output"][0]["status"] == "incomplete"
    here.tokenizer.error = None
    assert (await respond(socket))[-2]["response"]["status"] == "completed"


async def test_a_conversation_too_long_loses_its_oldest_turns(here: World, socket: Socket) -> None:
    def reply(request: Any) -> list[Text]:
        if len(request.messages) > 3:
            raise ContextTooLong("too long")
        return words("ok")

    here.tokenizer.reply = reply
    for text in ("one", "two", "three", "four"):
        await told(socket, text)
        assert (await respond(socket))[-2]["response"]["status"] == "completed"
    assert [message["content"] for message in here.tokenizer.requests[-1].messages][-1] == "four"
    socket.send("session.update", session={"type": "realtime", "truncation": "disabled"})
    await socket.expect("session.updated")
    done = (await respond(socket))[-2]["response"]
    assert done["status_details"]["error"]["code"] == "context_length_exceeded"


async def test_a_conversation_beyond_its_limit_keeps_a_share_of_it(
    here: World, socket: Socket
) -> None:
    """Each turn has two tokens, the user's and the reply's; more than six are cut to three."""
    here.tokenizer.reply = lambda request: words("ok")
    truncation = {
        "type": "retention_ratio",
        "retention_ratio": 0.5,
        "token_limits": {"post_instructions": 6},
    }
    given = {"type": "realtime", "instructions": "be brief", "truncation": truncation}
    socket.send("session.update", session=given)
    updated = await socket.expect("session.updated")
    assert updated["session"]["truncation"] == truncation
    seen = []
    for text in ("one", "two", "three", "four", "five", "six"):
        await told(socket, text)
        assert (await respond(socket))[-2]["response"]["status"] == "completed"
        messages = here.tokenizer.requests[-1].messages
        assert messages[0]["content"] == "be brief"
        seen.append([message["content"] for message in messages if message["role"] == "user"])
    assert seen == [
        ["one"],
        ["one", "two"],
        ["one", "two", "three"],
        ["three", "four"],
        ["three", "four", "five"],
        ["five", "six"],
    ]


# ------------------------------------------------------------------------------------------------- cancel, overlap
async def test_cancel_closes_everything_and_frees_the_stream(here: World, socket: Socket) -> None:
    here.tokenizer.reply, here.tokenizer.pace = lambda request: words("one two three"), 0.01
    await told(socket, "hello")
    here.tokenizer.reply = lambda request: words("word " * 1000)
    socket.send("response.create")
    await socket.until("response.output_text.delta")
    socket.send("response.cancel")
    events = await socket.until("rate_limits.updated")
    assert kinds(events)[-6:] == TURN[-6:]
    done = events[-2]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
    assert done["output"][0]["status"] == "incomplete"
    await settle(50)
    assert here.tokenizer.cancelled == 1
    assert here.service.limits.active == 0
    socket.send("response.cancel")
    assert "no response is in progress" in (await socket.expect("error"))["error"]["message"]


async def test_a_cancel_right_behind_its_create(here: World, socket: Socket) -> None:
    await told(socket, "hello")
    socket.send("response.create")
    socket.send("response.cancel")
    events = await socket.until("rate_limits.updated")
    assert kinds(events) == ["response.created", "response.done", "rate_limits.updated"]
    assert events[-2]["response"]["status"] == "cancelled"
    assert here.service.limits.active == 0


async def test_a_cancel_while_the_client_does_not_read(here: World, socket: Socket) -> None:
    await told(socket, "hello")
    socket.reading.clear()
    socket.send("response.create")
    await settle()
    socket.send("response.cancel")
    await settle()
    socket.reading.set()
    events = await socket.until("rate_limits.updated")
    assert kinds(events) == ["response.created", "response.done", "rate_limits.updated"]
    assert events[1]["response"]["status"] == "cancelled"


async def test_one_response_at_a_time_writes_the_conversation(here: World, socket: Socket) -> None:
    here.tokenizer.pace = 0.05
    await told(socket, "hello")
    socket.send("response.create")
    await socket.until("response.created")
    socket.send("response.create", event_id="again")
    error = (await socket.until("error"))[-1]["error"]
    assert (error["code"], error["event_id"]) == (
        "conversation_already_has_active_response",
        "again",
    )
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "aside"}]}
    socket.send(
        "response.create",
        response={"conversation": "none", "input": [item], "metadata": {"k": "v"}},
    )
    events = await socket.until("rate_limits.updated") + await socket.until("rate_limits.updated")
    done = [event["response"] for event in events if event["type"] == "response.done"]
    aside = next(response for response in done if response["metadata"])
    assert (aside["conversation_id"], aside["output"][0]["content"][0]["text"]) == (
        None,
        "You said: aside",
    )
    await respond(socket)
    assert len(here.tokenizer.requests[-1].messages) == 2, "what was said aside is not remembered"


async def test_what_writes_the_conversation_has_an_epoch(here: World, socket: Socket) -> None:
    """A newer reply makes the older one out of date, and nothing that is said aside."""
    aside = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "aside"}],
    }
    await told(socket, "hello")
    await respond(socket)
    await respond(socket, conversation="none", input=[aside])
    await respond(socket)
    async with session(here.app) as other:
        await told(other, "hello")
        await respond(other)
    one, beside, two, elsewhere = here.tokenizer.epochs
    assert one.session.startswith("sess_")
    assert [one.number, two.number, elsewhere.number] == [1, 2, 1]
    assert one.session == two.session != elsewhere.session
    assert beside == NO_EPOCH


async def test_input_may_refer_to_items(here: World, socket: Socket) -> None:
    socket.say("first")
    said = (await socket.until("conversation.item.done"))[0]["item"]["id"]
    await told(socket, "second")
    await respond(socket, conversation="none", input=[{"type": "item_reference", "id": said}])
    assert here.tokenizer.requests[-1].messages == [{"role": "user", "content": "first"}]


async def test_who_leaves_cancels(here: World) -> None:
    here.tokenizer.pace = 60
    async with session(here.app) as socket:
        await told(socket, "hello")
        socket.send("response.create")
        await socket.until("response.created")
        await settle(50)
    await settle(50)
    assert here.tokenizer.cancelled == 1
    assert here.service.limits.active == 0
    assert not here.service.sessions


async def test_who_does_not_read_slows_only_himself(here: World, socket: Socket) -> None:
    here.tokenizer.reply = lambda request: [Text(" x", [1])] * 1000
    await told(socket, "hello")
    socket.send("response.create")
    await socket.until("response.created")
    socket.reading.clear()
    await settle(100)
    assert here.tokenizer.sent <= 64 + 64
    assert len((await here.ask(stream=True).done()).text()) == 2000
    socket.reading.set()
    done = (await socket.until("response.done"))[-1]["response"]
    assert done["output"][0]["content"][0]["text"] == " x" * 1000


# ------------------------------------------------------------------------------------------------------------ items
async def test_items_are_kept_in_order(here: World, socket: Socket) -> None:
    def create(item_id: str, after: str | None = None) -> None:
        content = [{"type": "input_text", "text": item_id}]
        item = {"type": "message", "role": "user", "id": item_id, "content": content}
        socket.send(
            "conversation.item.create", item=item, **({"previous_item_id": after} if after else {})
        )

    for item_id, after, before in (
        ("b", None, None),
        ("d", None, "b"),
        ("a", "root", None),
        ("c", "b", "b"),
    ):
        create(item_id, after)
        assert (await socket.until("conversation.item.done"))[0]["previous_item_id"] == before
    create("x", "nowhere")
    assert (await socket.expect("error"))["error"]["param"] == "previous_item_id"
    create("a")
    assert "taken" in (await socket.expect("error"))["error"]["message"]
    socket.send("conversation.item.delete", item_id="b")
    assert (await socket.expect("conversation.item.deleted"))["item_id"] == "b"
    socket.send("conversation.item.retrieve", item_id="c")
    assert (await socket.expect("conversation.item.retrieved"))["item"]["content"][0]["text"] == "c"
    socket.send("conversation.item.retrieve", item_id="b", event_id="e7")
    assert (await socket.expect("error"))["error"]["event_id"] == "e7"
    await respond(socket)
    assert [message["content"] for message in here.tokenizer.requests[-1].messages] == [
        "a",
        "c",
        "d",
    ]


async def test_a_full_conversation_refuses_a_response_before_it_begins(
    here: World, socket: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_pipelines.voice.conversation.history.MAX_ITEMS", 2)
    socket.send("session.update", session={"type": "realtime", "tools": [DRAW]})
    await socket.expect("session.updated")
    await told(socket, "draw x")
    call = ToolCallDelta(0, "call_9", "draw", "{}")
    here.tokenizer.reply = lambda request: [Text("Sure.", [1]), Text("", [2], [call])]
    done = (await respond(socket))[-2]["response"]
    assert (done["status"], len(done["output"])) == ("completed", 2)  # one more than there is room
    error = (await respond(socket))[-1]["error"]
    assert (error["code"], error["param"]) == ("payload_too_large", "response")
    for item in done["output"]:
        socket.send("conversation.item.delete", item_id=item["id"])
        await socket.expect("conversation.item.deleted")
    assert (await respond(socket))[-2]["response"]["status"] == "completed"


async def test_a_conversation_that_fails_closes_its_socket(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: Any) -> list[bytes]:
        raise RuntimeError("a bug")

    socket = Socket(here.app)
    await socket.expect("session.created")
    (failing,) = here.service.sessions
    monkeypatch.setattr(failing._rendering, "render", fail)
    socket.say("hello")
    await asyncio.wait_for(socket.task, 5)
    assert socket.closed == 1011
    assert not len(here.service.sessions)


async def test_conversations_are_bounded() -> None:
    async with world(max_message=2048) as made, session(made.app) as socket:
        for _ in range(40):
            socket.say("x" * 100)
        events = [await socket.receive() for _ in range(20)]
        assert events[-1]["error"]["code"] == "payload_too_large"


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("no.such.event", {}, "type"),
        ("session.update", {}, "session"),
        ("session.update", {"session": {"bogus": 1}}, "session.bogus"),
        ("session.update", {"session": {"model": "other"}}, "session.model"),
        ("session.update", {"session": {"type": "transcription"}}, "session.type"),
        ("session.update", {"session": {"output_modalities": ["audio"]}}, "session.output_modalities"),
        ("session.update", {"session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}},
         "session.audio.input.turn_detection.type"),
        ("session.update", {"session": {"truncation": {"type": "retention_ratio"}}},
         "session.truncation.retention_ratio"),
        ("session.update", {"session": {"truncation": {"type": "retention_ratio", "retention_ratio": 2}}},
         "session.truncation.retention_ratio"),
        ("session.update", {"session": {"truncation": "often"}}, "session.truncation"),
        ("session.update", {"session": {"tool_choice": "perhaps"}}, "session.tool_choice"),
        ("session.update", {"session": {"tool_choice": {"type": "mcp"}}}, "session.tool_choice"),
        ("session.update", {"session": {"tools": [{"type": "mcp"}]}}, "session.tools[0].type"),
        ("session.update", {"session": {"tools": [DRAW, {"server_label": "x", "type": "mcp"}]}},
         "session.tools[1].type"),
        ("response.create", {"response": {"tools": [{"vector_store_ids": [], "type": "file_search"}]}},
         "response.tools[0].type"),
        ("session.update", {"session": {"max_output_tokens": 0}}, "session.max_output_tokens"),
        ("session.update", {"session": {"prompt": {"id": "x"}}}, "session.prompt"),
        ("input_audio_buffer.append", {"audio": ""}, "type"),
        ("input_audio_buffer.commit", {}, "type"),
        ("conversation.item.create", {"item": {"type": "message", "role": "user", "content": [
            {"type": "input_audio", "audio": ""}]}}, "item.content[0]"),
        ("conversation.item.create", {"item": {"type": "message", "role": "user", "content": [
            {"type": "input_image", "image_url": "data:"}]}}, "item.content[0].image_url"),
        ("conversation.item.create", {"item": {"type": "message", "role": "assistant", "content": [
            {"type": "input_text", "text": "x"}]}}, "item.content[0].type"),
        ("conversation.item.create", {"item": {"type": "function_call_output", "call_id": "c", "output": ""}},
         "item.call_id"),
        ("conversation.item.create", {"item": {"type": "strange"}}, "item.type"),
        ("conversation.item.truncate", {"item_id": "none", "content_index": 0, "audio_end_ms": 5}, "item_id"),
        ("conversation.item.delete", {"item_id": "none"}, "item_id"),
        ("response.create", {"response": {"output_modalities": ["audio"]}}, "response.output_modalities"),
        ("response.create", {"response": {"input": [{"type": "item_reference", "id": "none"}]}}, "item_id"),
        ("response.create", {}, "response"),
        ("response.cancel", {"response_id": "resp_none"}, "response_id"),
    ],
)  # fmt: skip
async def test_refused_events_are_named_and_the_socket_lives(
    socket: Socket, kind: str, fields: dict[str, Any], param: str
) -> None:
    socket.send(kind, event_id="mine", **fields)
    error = (await socket.expect("error"))["error"]
    assert (error["type"], error["param"], error["event_id"]) == (
        "invalid_request_error",
        param,
        "mine",
    )
    await told(socket, "still here")


async def test_the_file_of_a_picture_is_no_text_of_the_prompt(here: World, socket: Socket) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (420, 420, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    assert len(url) > 4096 * 128  # the longest text that fits
    parts = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": url},
    ]
    item = {"type": "message", "role": "user", "content": parts}
    socket.send("conversation.item.create", item=item)
    await socket.until("conversation.item.done")
    assert (await respond(socket))[-2]["response"]["status"] == "completed"
    assert len(here.tokenizer.requests[-1].images) == 1
    await here.service.close()


async def test_races_have_codes_that_clients_know(socket: Socket) -> None:
    """Voice frameworks end a session on errors whose code they do not take for a race."""
    await told(socket, "hello")
    item = {
        "id": "mine",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "x"}],
    }
    socket.send("conversation.item.create", item=item)
    await socket.until("conversation.item.done")
    for kind, fields, code in (
        ("response.cancel", {}, "response_cancel_not_active"),
        ("conversation.item.create", {"item": item}, "item_create_duplicate_item_id"),
        ("conversation.item.retrieve", {"item_id": "none"}, "item_retrieve_invalid_item_id"),
        ("conversation.item.delete", {"item_id": "none"}, "item_delete_invalid_item_id"),
        (
            "conversation.item.truncate",
            {"item_id": "none", "content_index": 0, "audio_end_ms": 1},
            "item_truncate_invalid_item_id",
        ),
    ):
        socket.send(kind, **fields)
        error = (await socket.expect("error"))["error"]
        assert error["code"] == code
    socket.send("response.cancel")
    assert (await socket.expect("error"))["error"]["message"].startswith("Cancellation failed")


async def test_a_session_may_insist_on_a_tool(here: World, socket: Socket) -> None:
    named = {"type": "function", "name": "draw"}
    for choice, on_the_wire in (
        ("required", ("required", "")),
        (named, ("required", "draw")),
        ("auto", ("auto", "")),
    ):
        socket.send("session.update", session={"tools": [DRAW], "tool_choice": choice})
        assert (await socket.expect("session.updated"))["session"]["tool_choice"] == choice
        await told(socket, "hello")
        await respond(socket)
        request = here.tokenizer.requests[-1]
        assert (request.tool_choice, request.tool) == on_the_wire


async def test_null_is_as_good_as_no_field(here: World, socket: Socket) -> None:
    nothing = dict.fromkeys(
        ("instructions", "tools", "output_modalities", "temperature", "max_output_tokens")
    )
    socket.send("session.update", session={"instructions": "be brief", "tools": [DRAW]})
    await socket.expect("session.updated")
    socket.send("session.update", session=nothing)
    updated = (await socket.expect("session.updated"))["session"]
    assert (updated["instructions"], updated["tools"], updated["temperature"]) == (
        "be brief",
        [DRAW],
        0.8,
    )
    await told(socket, "hello")
    assert (await respond(socket, **nothing, input=None, conversation=None, metadata=None))[-1][
        "type"
    ] != "error"
    assert here.tokenizer.requests[-1].messages[0] == {"role": "system", "content": "be brief"}


async def test_audio_settings_that_ask_for_nothing_are_fine(socket: Socket) -> None:
    audio = {"input": {"turn_detection": None, "transcription": None}, "output": None}
    socket.send(
        "session.update",
        session={"type": "realtime", "audio": audio, "tools": [DRAW], "temperature": 0},
    )
    updated = (await socket.expect("session.updated"))["session"]
    assert (updated["tools"], updated["temperature"], updated["output_modalities"]) == (
        [DRAW],
        0,
        ["text"],
    )


async def test_an_update_is_all_or_nothing(socket: Socket) -> None:
    socket.send("session.update", session={"instructions": "new", "output_modalities": ["audio"]})
    assert "asr and tts" in (await socket.expect("error"))["error"]["message"]
    socket.send("session.update", session={})
    assert (await socket.expect("session.updated"))["session"]["instructions"] == ""


async def test_truncation_is_for_audio(here: World, socket: Socket) -> None:
    socket.say("hello")
    said = (await socket.until("conversation.item.done"))[0]["item"]["id"]
    reply = (await respond(socket))[-2]["response"]["output"][0]["id"]
    for item_id, ms, word in ((said, 100, "assistant"), (reply, 100, "0 ms"), (reply, 0, "0 ms")):
        socket.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=ms)
        assert word in (await socket.expect("error"))["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"\x00\x01", "{", "[]", "5", '{"type": 5}', "{}", '{"type":"\\ud800"}', "[" * 100_000]
)
async def test_nonsense_is_an_error_and_the_socket_lives(socket: Socket, data: str | bytes) -> None:
    socket.send_raw(data)
    assert (await socket.expect("error"))["error"]["message"]
    await told(socket, "still here")


# -------------------------------------------------------------------------------------------------------- the door
async def closed(socket: Socket) -> tuple[str, int | None]:
    error = (await socket.expect("error"))["error"]
    await asyncio.wait_for(socket.task, 5)
    return error["code"], socket.closed


async def test_what_is_wrong_is_said_before_the_close(here: World) -> None:
    assert await closed(Socket(here.app, {"model": "gpt-99"})) == ("model_not_found", 4000)
    assert await closed(Socket(here.app, {})) == ("invalid_request", 4000)
    assert await closed(Socket(here.app, {"model": MODEL, "intent": "transcription"})) == (
        "unsupported_parameter",
        4000,
    )
    assert await closed(Socket(here.app, {"model": MODEL, "x": "y"})) == (
        "unsupported_parameter",
        4000,
    )
    foreign = Socket(here.app, headers={"origin": "https://elsewhere.example"})
    assert await closed(foreign) == ("forbidden_origin", 3000)
    here.service.limits.draining = True
    assert await closed(Socket(here.app)) == ("draining", 1012)


async def test_keys_at_the_door() -> None:
    async with world(api_key="sesame") as made:
        assert await closed(Socket(made.app)) == ("invalid_api_key", 3000)
        async with session(made.app, headers={"authorization": "Bearer sesame"}):
            pass
        offered = ["realtime", "openai-insecure-api-key.sesame"]
        async with session(made.app, subprotocols=offered) as socket:
            assert socket.accepted is not None
            assert socket.accepted["subprotocol"] == "realtime"


async def test_sockets_are_bounded() -> None:
    async with world(max_sockets=1) as made:
        async with session(made.app):
            assert await closed(Socket(made.app)) == ("overloaded", 1013)
        async with session(made.app):
            pass


async def test_draining_waits_for_the_reply_and_closes_with_1012(here: World) -> None:
    here.tokenizer.pace = 0.02
    busy, idle = Socket(here.app), Socket(here.app)
    for socket in (busy, idle):
        await socket.expect("session.created")
    await told(busy, "hello")
    busy.send("response.create")
    await busy.until("response.created")
    await asyncio.gather(*(session.drain() for session in list(here.service.sessions)))
    assert (await busy.until("response.done"))[-1]["response"]["status"] == "completed"
    for socket in (busy, idle):
        await asyncio.wait_for(socket.task, 5)
        assert socket.closed == 1012


# ----------------------------------------------------------------------------------------------------------- pieces
def test_calls_in_a_row_are_one_message() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    messages = chat_messages("", [call("a"), call("b")])
    assert [entry["id"] for entry in messages[0]["tool_calls"]] == ["a", "b"]
    assert len(messages) == 1


def test_the_oldest_turns_go_first_and_the_last_stays() -> None:
    turns = [{"role": role, "content": str(n)} for n in range(3) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "s"}, *turns]
    assert without_oldest(messages, 1) == [messages[0], *turns[2:]]
    assert without_oldest(messages, 9) == [messages[0], *turns[4:]]
    assert without_oldest([messages[0], turns[4]], 1) is None


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 100_000])
def test_frames_are_those_of_the_reference_implementation(size: int) -> None:
    from websockets.frames import Frame, Opcode

    text = b"x" * size
    assert frame_head(size) + text == Frame(Opcode.TEXT, text).serialize(mask=False)
