"""/v1/responses and batches of the model that ships, with the official client: streamed, with a tool, with a cancel."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
import pytest_asyncio

from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.testing import NatsServer, running
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.running.until import until
from support.stages.served_gateway import KEY, Served, served_gateway

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

CHAT = "pocket-chat"
PAGES = Path(__file__).parents[3] / "docs"
FOLDER = Path(__file__).parents[3] / "models" / CHAT
DRAW: Any = {
    "type": "function",
    "name": "draw",
    "description": "Draw a picture.",
    "parameters": {
        "type": "object",
        "properties": {"prompt": {"type": "string"}},
        "required": ["prompt"],
    },
    "strict": False,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, Decode]]:
    quiet: dict[str, Any] = {"metrics_port": -1}
    decode = DecodeConfig(
        model=str(FOLDER), name=CHAT, threads=1, num_blocks=400, block_size=16, **quiet
    )
    store = tmp_path_factory.mktemp("responses") / "jetstream"
    async with NatsServer(store=store) as nats, AsyncExitStack() as actors:
        engine = Decode(decode, await nats.bus("decode"))
        tokenizer = TokenizerConfig(model=(f"{CHAT}={FOLDER}",), **quiet)
        for actor in (engine, Tokenizer(tokenizer, await nats.bus("tokenizer"))):
            await actors.enter_async_context(running(actor))
        gateway = await actors.enter_async_context(served_gateway(nats))
        roles = ("decode", "tokenizer")
        await gateway.bus.directory.wait_for(lambda d: all(d.ready(role) for role in roles), 60)
        yield Served(gateway), engine


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: tuple[Served, Decode]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with stack[0].client() as made:
        yield made


async def test_a_conversation_is_streamed(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": CHAT, "temperature": 0, "max_output_tokens": 40}
    async with client.responses.stream(input="What is two plus two?", **options) as stream:
        deltas = [
            event.delta async for event in stream if event.type == "response.output_text.delta"
        ]
        first = await stream.get_final_response()
    assert "".join(deltas) == first.output_text
    assert len(deltas) > 1
    whole = await client.responses.create(input="What is two plus two?", **options)
    chat = await client.chat.completions.create(
        model=CHAT,
        messages=[{"role": "user", "content": "What is two plus two?"}],
        temperature=0,
        max_tokens=40,
    )
    assert whole.output_text == first.output_text == chat.choices[0].message.content
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.total_tokens == chat.usage.total_tokens
    second = await client.responses.create(
        input="And plus one?", previous_response_id=first.id, **options
    )
    both = await client.chat.completions.create(
        model=CHAT,
        messages=[
            {"role": "user", "content": "What is two plus two?"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And plus one?"},
        ],
        temperature=0,
        max_tokens=40,
    )
    assert second.output_text == both.choices[0].message.content


@pytest.mark.parametrize(("page", "lines"), [("responses.md", 1), ("batches.md", 3)])
async def test_the_examples_of_the_pages(
    stack: tuple[Served, Decode], capsys: pytest.CaptureFixture[str], page: str, lines: int
) -> None:
    code = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)[0]
    code = code.replace("http://127.0.0.1:8000", stack[0].url).replace('"none"', f'"{KEY}"')
    await asyncio.to_thread(exec, compile(code, page, "exec", dont_inherit=True), {})
    assert len(capsys.readouterr().out.strip().splitlines()) >= lines


async def test_a_tool_is_called_and_its_output_goes_back(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": CHAT, "temperature": 0, "max_output_tokens": 60, "tools": [DRAW]}
    async with client.responses.stream(input="Draw two red circles.", **options) as stream:
        kinds = [event.type async for event in stream]
        asked = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    (call,) = [item for item in asked.output if item.type == "function_call"]
    assert call.name == "draw"
    assert "circle" in json.loads(call.arguments)["prompt"]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "{}"}
    told = await client.responses.create(input=[output], previous_response_id=asked.id, **options)
    # The same conversation, kept by the client, and not stored.
    question: Any = {"role": "user", "content": "Draw two red circles."}
    items: list[Any] = [item.model_dump(exclude_none=True) for item in asked.output]
    again = await client.responses.create(input=[question, *items, output], store=False, **options)
    assert again.output_text == told.output_text
    assert again.usage is not None
    assert told.usage is not None
    assert again.usage.input_tokens == told.usage.input_tokens


async def test_a_custom_tool_has_its_pattern(client: openai.AsyncOpenAI) -> None:
    pattern: Any = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}-[0-9]{2}"}
    made = await client.responses.create(
        model=CHAT,
        input="Draw two red circles.",
        temperature=0,
        max_output_tokens=80,
        tools=[{"type": "custom", "name": "paint", "format": pattern}],
        tool_choice={"type": "custom", "name": "paint"},
        parallel_tool_calls=False,
    )
    (call,) = made.output
    assert call.type == "custom_tool_call"
    assert call.name == "paint"
    assert len(call.input) == 6
    assert call.input[3] == "-"


async def test_a_file_of_the_client_is_read(client: openai.AsyncOpenAI) -> None:
    text = "What is two plus two?"
    file = await client.files.create(file=("sums.txt", text.encode()), purpose="user_data")
    options: Any = {"model": CHAT, "temperature": 0, "max_output_tokens": 20}
    part: Any = {"type": "input_file", "file_id": file.id}
    made = await client.responses.create(input=[{"role": "user", "content": [part]}], **options)
    plain = await client.responses.create(input=f"File sums.txt:\n\n{text}", **options)
    assert made.output_text == plain.output_text
    assert made.usage is not None
    assert plain.usage is not None
    assert made.usage.input_tokens == plain.usage.input_tokens
    await client.files.delete(file.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(input="And?", previous_response_id=made.id, **options)
    assert caught.value.param == "previous_response_id.content[0].file_id"


class Count(pydantic.BaseModel):
    number: Literal[1, 2, 3]
    thing: Literal["circle", "square"]  # a string of any length may not end within the tokens


async def test_a_text_of_a_given_shape(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.parse(
        model=CHAT, input="Hello!", temperature=0, max_output_tokens=120, text_format=Count
    )
    assert made.status == "completed"
    assert isinstance(made.output_parsed, Count)


async def test_a_cancel_stops_the_model(
    client: openai.AsyncOpenAI, stack: tuple[Served, Decode]
) -> None:
    """Of one in the background, and of a stream whose client leaves."""
    _, decode = stack
    endless: Any = {"model": CHAT, "input": "Hello!", "temperature": 1.5, "tools": []}
    endless |= {"extra_body": {"seed": 3}, "text": {"format": {"type": "text"}}}
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
    endless["text"] = {"format": {"type": "json_schema", "name": "long", "schema": schema}}
    asked = await client.responses.create(background=True, **endless)
    await until(lambda: decode.load()["running"] > 0)
    assert (await client.responses.cancel(asked.id)).status == "cancelled"
    await until(lambda: decode.load()["running"] == 0)
    ended = await client.responses.retrieve(asked.id)
    assert ended.status == "cancelled"
    async with await client.responses.create(stream=True, **endless) as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                break
    await until(lambda: decode.load()["running"] == 0)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_" + "0" * 48)


async def test_a_chat_whose_client_leaves_stops_the_model(
    client: openai.AsyncOpenAI, stack: tuple[Served, Decode]
) -> None:
    _, decode = stack
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "long", "schema": schema}}
    async with await client.chat.completions.create(
        model=CHAT,
        messages=[{"role": "user", "content": "Hello!"}],
        response_format=shape,
        stream=True,
    ) as chunks:
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        assert decode.load()["running"] > 0
    await until(lambda: decode.load()["running"] == 0)
