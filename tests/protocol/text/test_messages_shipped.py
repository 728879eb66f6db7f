"""/v1/messages with Anthropic's client: the model that ships, and an agent's loop on a scripted one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from motet_shared.messages import Chat, Complete, Text
from support.services.fake_services import MODEL, tool_call, words
from support.stages.served_gateway import KEY
from support.stages.shipped_stack import CHAT, Stack, red_circle, shipped_stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

CALLS = 20
GREEDY = {"temperature": 0}  # the client has no argument for it
QUESTION: Any = {"role": "user", "content": "What is two plus two?"}
DRAW: Any = {
    "name": "draw",
    "description": "Draw a picture.",
    "input_schema": {
        "type": "object",
        "properties": {"prompt": {"type": "string"}},
        "required": ["prompt"],
    },
    "cache_control": {"type": "ephemeral"},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with shipped_stack() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=stack.served.url, api_key=KEY, max_retries=0
    ) as made:
        yield made


async def test_a_conversation_is_streamed(client: anthropic.AsyncAnthropic, stack: Stack) -> None:
    options: Any = {"model": CHAT, "max_tokens": 40, "messages": [QUESTION]}
    options["extra_body"] = GREEDY
    async with client.messages.stream(**options) as stream:
        deltas = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert len(deltas) > 1
    whole = await client.messages.create(**options)
    assert [block.type for block in whole.content] == ["text"]
    assert [block.to_dict() for block in whole.content] == [
        {"type": "text", "text": "".join(deltas)}
    ]
    assert whole.stop_reason == message.stop_reason == "end_turn"
    async with stack.served.client() as openai:
        chat = await openai.chat.completions.create(**options)
    assert "".join(deltas) == chat.choices[0].message.content
    assert chat.usage is not None
    usage = message.usage
    assert chat.usage.completion_tokens == usage.output_tokens
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert chat.usage.prompt_tokens == prompt
    counted = await client.messages.count_tokens(model=CHAT, messages=[QUESTION])
    assert counted.input_tokens == prompt


async def test_the_last_message_is_continued_up_to_a_stop_sequence(
    client: anthropic.AsyncAnthropic,
) -> None:
    options: Any = {"model": "claude-opus-4", "max_tokens": 20, "extra_body": GREEDY}
    whole = await client.messages.create(messages=[QUESTION], **options)
    assert whole.content[0].type == "text"
    begun: Any = {"role": "assistant", "content": whole.content[0].text[:3]}
    rest = await client.messages.create(messages=[QUESTION, begun], **options)
    assert rest.content[0].type == "text"
    stop = rest.content[0].text[-1]
    more = await client.messages.create(
        messages=[QUESTION, begun], stop_sequences=[stop], **options
    )
    assert more.stop_reason == "stop_sequence"
    assert more.stop_sequence == stop


async def test_a_tool_is_called_and_its_result_goes_back(
    client: anthropic.AsyncAnthropic,
) -> None:
    question: Any = {"role": "user", "content": "Draw two red circles."}
    options: Any = {"model": CHAT, "extra_body": GREEDY, "max_tokens": 60, "tools": [DRAW]}
    async with client.messages.stream(messages=[question], **options) as stream:
        asked = await stream.get_final_message()
    assert asked.stop_reason == "tool_use"
    (call,) = [block for block in asked.content if block.type == "tool_use"]
    assert call.name == "draw"
    assert "circle" in str(call.input["prompt"])
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "{}"}
    told = await client.messages.create(
        messages=[
            question,
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": [result]},
        ],
        **options,
    )
    assert told.usage.output_tokens > 0


async def test_a_picture_is_seen(client: anthropic.AsyncAnthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": red_circle()}
    content: Any = [
        {"type": "image", "source": source},
        {"type": "text", "text": "What do you see?"},
    ]
    seen = await client.messages.create(
        model=CHAT,
        max_tokens=30,
        messages=[{"role": "user", "content": content}],
        extra_body=GREEDY,
    )
    assert seen.content[0].type == "text"
    assert "red" in seen.content[0].text


async def test_a_client_that_leaves_stops_the_model(
    client: anthropic.AsyncAnthropic, stack: Stack
) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    async with client.messages.stream(
        model=CHAT, max_tokens=4000, messages=[QUESTION], output_config=output
    ) as stream:
        async for _ in stream.text_stream:
            break
        assert stack.decode.load()["running"] > 0
    async with asyncio.timeout(30):
        while stack.decode.load()["running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_agent_calls_twenty_tools(client: anthropic.AsyncAnthropic, stack: Stack) -> None:
    def scripted(request: Chat | Complete) -> list[Text]:
        assert isinstance(request, Chat)
        done = sum(message["role"] == "tool" for message in request.messages)
        if done == CALLS:
            return words("All files are read.")
        return [Text("", [1], reasoning=f"File {done}."), tool_call(f'{{"file":{done}}}', "read")]

    stack.scripted.reply = scripted
    tool: Any = {"name": "read", "input_schema": {"type": "object"}}
    messages: list[Any] = [{"role": "user", "content": "Read all files."}]
    read = []
    while True:
        async with client.messages.stream(
            model=MODEL,
            max_tokens=1000,
            system=[{"type": "text", "text": "Work.", "cache_control": {"type": "ephemeral"}}],
            messages=messages,
            tools=[tool],
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream:
            message = await stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        call = message.content[1]
        assert call.type == "tool_use"
        read.append(call.input["file"])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "text"}
        messages.append({"role": "user", "content": [result]})
    assert read == list(range(CALLS))
    last = stack.scripted.requests[-1].messages
    assert [
        json.loads(m["tool_calls"][0]["function"]["arguments"]) for m in last if "tool_calls" in m
    ] == [{"file": number} for number in range(CALLS)]
    assert [m["reasoning_content"] for m in last if m["role"] == "assistant"][:1] == ["File 0."]


async def test_models_are_listed_in_the_clients_form(
    client: anthropic.AsyncAnthropic, stack: Stack
) -> None:
    found = {model.id: model async for model in client.models.list(limit=1)}
    assert set(found) == {CHAT, MODEL}
    one = await client.models.retrieve(CHAT)
    assert one == found[CHAT]
    async with stack.served.client() as openai:
        known: Any = await openai.models.retrieve(CHAT)
    assert one.max_input_tokens == known.context_length
    assert one.created_at.timestamp() == known.created
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("none")


async def test_errors_have_the_types_and_names_of_the_protocol(
    client: anthropic.AsyncAnthropic, stack: Stack
) -> None:
    async def refused(**fields: Any) -> tuple[int, str, str | None]:
        options: Any = {"model": CHAT, "max_tokens": 4, "messages": [QUESTION], **fields}
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**options)
        error: Any = caught.value.body
        assert error["type"] == "error"
        return caught.value.status_code, error["error"]["type"], error["error"]["param"]

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "?"}}
    content = [{"type": "text", "text": "See?"}, image]
    picture = {"role": "user", "content": content}
    wrong, missing = "invalid_request_error", "not_found_error"
    assert await refused(model="no-such-model") == (404, missing, "model")
    assert await refused(max_tokens=0) == (400, wrong, "max_tokens")
    where = "messages[1].content[1].source"
    assert await refused(system="s", messages=[QUESTION, picture]) == (400, wrong, where)
    schema = {"name": "f", "input_schema": {"type": "object"}}
    assert await refused(tools=[schema], tool_choice={"type": "tool", "name": "g"}) == (
        400,
        wrong,
        "tool_choice",
    )
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(
            model=CHAT, max_tokens=4, messages=[QUESTION]
        )
