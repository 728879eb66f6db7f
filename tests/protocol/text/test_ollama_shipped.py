"""/api/… with Ollama's own client: the models that ship, and tools and reasoning of a scripted one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest
import pytest_asyncio

from motet_shared.errors import BadRequest
from motet_shared.messages import Chat, Complete, Text
from support.services.fake_services import MODEL, tool_call, words
from support.stages.served_gateway import KEY
from support.stages.shipped_stack import CHAT, EMBED, Stack, red_circle, shipped_stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

GREEDY = {"temperature": 0, "num_predict": 40}
QUESTION: Any = {"role": "user", "content": "What is two plus two?"}
DRAW: Any = {
    "type": "function",
    "function": {
        "name": "draw",
        "description": "Draw a picture.",
        "parameters": {
            "type": "object",
            "properties": {"prompt": {"type": "string"}},
            "required": ["prompt"],
        },
    },
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with shipped_stack(embeds=True) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[ollama.AsyncClient]:
    headers = {"Authorization": f"Bearer {KEY}"}
    made = ollama.AsyncClient(host=stack.served.url, headers=headers, trust_env=False)
    yield made
    await made._client.aclose()


async def test_a_conversation_is_streamed(client: ollama.AsyncClient, stack: Stack) -> None:
    parts = [
        part
        async for part in await client.chat(CHAT, messages=[QUESTION], stream=True, options=GREEDY)
    ]
    text = "".join(part.message.content or "" for part in parts)
    assert len(parts) > 2
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    whole = await client.chat(CHAT, messages=[QUESTION], options=GREEDY)
    assert whole.message.content == text
    last = parts[-1]
    assert (last.done_reason, whole.done_reason) == ("stop", "stop")
    assert last.eval_count == whole.eval_count
    assert last.total_duration is not None
    assert last.prompt_eval_duration is not None
    assert last.total_duration > last.prompt_eval_duration > 0
    async with stack.served.client() as openai:
        chat = await openai.chat.completions.create(
            model=CHAT, messages=[QUESTION], temperature=0, max_tokens=40
        )
    assert chat.choices[0].message.content == text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == last.prompt_eval_count
    more = [QUESTION, {"role": "assistant", "content": text}, QUESTION]
    shorter = await client.chat(f"{CHAT}:latest", messages=more, options={"num_predict": 1})
    assert (shorter.done_reason, shorter.eval_count) == ("length", 1)


async def test_a_prompt_is_answered_as_a_chat_or_raw(client: ollama.AsyncClient) -> None:
    chat = await client.chat(CHAT, messages=[QUESTION], options=GREEDY)
    told = await client.generate(CHAT, QUESTION["content"], options=GREEDY)
    assert told.response == chat.message.content
    raw = [
        part
        async for part in await client.generate(
            CHAT, QUESTION["content"], raw=True, stream=True, options={**GREEDY, "num_predict": 20}
        )
    ]
    assert raw[-1].prompt_eval_count is not None
    assert told.prompt_eval_count is not None
    assert raw[-1].prompt_eval_count < told.prompt_eval_count
    assert raw[-1].eval_count is not None
    assert raw[-1].eval_count > 16 or raw[-1].done_reason == "stop"
    seen = await client.generate(
        CHAT, "What do you see?", images=[red_circle()], options={"temperature": 0}
    )
    assert seen.response is not None
    assert "red" in seen.response


async def test_a_tool_is_called_and_its_result_goes_back(client: ollama.AsyncClient) -> None:
    question: Any = {"role": "user", "content": "Draw two red circles."}
    options = {"temperature": 0, "num_predict": 60}
    parts = [
        part
        async for part in await client.chat(
            CHAT, messages=[question], tools=[DRAW], stream=True, options=options
        )
    ]
    (called,) = [part.message for part in parts if part.message.tool_calls]
    assert called.tool_calls is not None
    (call,) = called.tool_calls
    assert call.function.name == "draw"
    assert "circle" in call.function.arguments["prompt"]
    result = {"role": "tool", "tool_name": "draw", "content": "{}"}
    told = await client.chat(
        CHAT, messages=[question, called, result], tools=[DRAW], options=options
    )
    assert told.eval_count


async def test_reasoning_and_parallel_calls_are_apart(
    client: ollama.AsyncClient, stack: Stack
) -> None:
    def scripted(request: Chat | Complete) -> list[Text]:
        assert isinstance(request, Chat)
        if any(message["role"] == "tool" for message in request.messages):
            return words("All files are read.")
        return [
            Text("", [1], reasoning="Two files."),
            tool_call('{"file":0}', "read", 0),
            tool_call('{"file":1}', "list", 1),
        ]

    stack.scripted.reply = scripted
    messages: list[Any] = [{"role": "user", "content": "Read."}]
    parts = [part async for part in await client.chat(MODEL, messages=messages, stream=True)]
    assert "".join(part.message.thinking or "" for part in parts) == "Two files."
    whole = (await client.chat(MODEL, messages=messages)).message
    calls = whole.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("read", {"file": 0}),
        ("list", {"file": 1}),
    ]
    assert [c for p in parts for c in p.message.tool_calls or []] == calls
    for name in ("list", "read"):
        messages = [*messages, *([whole] if name == "list" else [])]
        messages.append({"role": "tool", "tool_name": name, "content": name})
    told = await client.chat(MODEL, messages=messages)
    assert told.message.content == "All files are read."
    sent = stack.scripted.requests[-1].messages
    ids = {c["function"]["name"]: c["id"] for m in sent for c in m.get("tool_calls") or ()}
    answered = {m["content"]: m["tool_call_id"] for m in sent if m["role"] == "tool"}
    assert answered == ids
    assert [m["reasoning_content"] for m in sent if m["role"] == "assistant"] == ["Two files."]


async def test_a_reply_is_held_to_a_schema(client: ollama.AsyncClient) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    }
    schema |= {"required": ["n"], "additionalProperties": False}
    options = {"num_predict": 60, "seed": 4}
    told = await client.chat(CHAT, messages=[QUESTION], format=schema, options=options)
    assert isinstance(json.loads(told.message.content or "")["n"], int)


async def test_a_client_that_leaves_stops_the_model(
    client: ollama.AsyncClient, stack: Stack
) -> None:
    schema: Any = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
    stream: Any = await client.chat(CHAT, messages=[QUESTION], format=schema, stream=True)
    await anext(stream)
    assert stack.decode.load()["running"] > 0
    await stream.aclose()
    async with asyncio.timeout(30):
        while stack.decode.load()["running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_texts_are_embedded(client: ollama.AsyncClient, stack: Stack) -> None:
    texts = ["a red circle", "a blue square"]
    answer = await client.embed(EMBED, texts)
    assert [round(sum(x * x for x in row), 4) for row in answer.embeddings] == [1.0, 1.0]
    (one,) = (await client.embed(f"{EMBED}:latest", texts[0])).embeddings
    assert one == pytest.approx(answer.embeddings[0], abs=1e-5)
    older = await client.embeddings(EMBED, texts[0])
    async with stack.served.client() as openai:
        due = await openai.embeddings.create(model=EMBED, input=texts[0])
    assert older.embedding == pytest.approx(due.data[0].embedding, abs=1e-6)


async def test_models_are_listed_and_described(client: ollama.AsyncClient) -> None:
    tags = {one.model: one for one in (await client.list()).models}
    assert {CHAT, EMBED, MODEL} == set(tags)
    assert (tags[CHAT].size or 0) > 100_000
    running = {one.model: one for one in (await client.ps()).models}
    assert set(running) == set(tags)
    leaves = running[CHAT].expires_at
    assert leaves is not None
    assert leaves.year > 2300
    shown = await client.show(CHAT)
    assert {"completion", "tools", "vision"} <= set(shown.capabilities or ())
    assert shown.details is not None
    assert shown.modelinfo is not None
    family = shown.details.family
    assert shown.modelinfo[f"{family}.context_length"] == running[CHAT].context_length
    assert (await client.show(EMBED)).capabilities == ["embedding"]


async def test_a_model_is_loaded_without_a_prompt(client: ollama.AsyncClient) -> None:
    assert (await client.generate(CHAT)).done_reason == "load"
    assert (await client.chat(CHAT, keep_alive="5m")).done_reason == "load"


async def test_errors_have_the_status_and_shape_of_the_protocol(
    client: ollama.AsyncClient, stack: Stack
) -> None:
    async def refused(call: Any) -> tuple[int, str]:
        with pytest.raises(ollama.ResponseError) as caught:
            await call
        return caught.value.status_code, caught.value.error

    status, message = await refused(client.chat("none", messages=[QUESTION]))
    assert status == 404
    assert "none" in message
    assert (await refused(client.chat(CHAT, messages=[QUESTION], think=True)))[0] == 400
    assert (await refused(client.delete(CHAT)))[0] == 400
    assert (await refused(client.copy(CHAT, "x")))[0] == 400
    assert (await refused(client.show("none")))[0] == 404
    stack.scripted.reply = lambda _: words("some words")
    stack.scripted.fail_after = 1
    stack.scripted.error = BadRequest("the reply broke", param="messages")
    try:
        with pytest.raises(ollama.ResponseError, match="broke"):
            async for _ in await client.chat(MODEL, messages=[QUESTION], stream=True):
                pass
    finally:
        stack.scripted.error, stack.scripted.fail_after = None, None
    wrong = ollama.AsyncClient(host=stack.served.url, trust_env=False)
    try:
        assert (await refused(wrong.list()))[0] == 401
    finally:
        await wrong._client.aclose()
