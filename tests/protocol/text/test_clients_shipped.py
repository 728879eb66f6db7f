"""What other clients send, to the models that ship: the official client over HTTP and the realtime socket.

pocket-chat with its encoder, and pocket-asr, behind a real gateway and a real nats-server.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
import pytest_asyncio
from PIL import Image

from motet_asr.config import AsrConfig
from motet_asr.service import Asr
from motet_encoder.config import EncoderConfig
from motet_encoder.service import Encoder
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_media.audio import wav_header
from motet_shared.testing import NatsServer, running
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from recipes.world.pictures import draw_things
from recipes.world.scenes import Thing
from support.media.picture_files import encoded
from support.stages.served_gateway import Served, served_gateway

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

MODELS = Path(__file__).parents[3] / "models"
CHAT, ASR_MODEL = "pocket-chat", "pocket-asr"
HELLO: list[Any] = [{"role": "user", "content": "What is two plus two?"}]
SILENCE = wav_header(16000, 32000) + bytes(32000)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Served]:
    chat = str(MODELS / CHAT)
    quiet: dict[str, Any] = {"metrics_port": -1}
    decode = DecodeConfig(model=chat, name=CHAT, threads=1, num_blocks=400, block_size=16, **quiet)
    encoder = EncoderConfig(model=chat, name=CHAT, threads=1, **quiet)
    asr = AsrConfig(model=str(MODELS / ASR_MODEL), name=ASR_MODEL, threads=1, **quiet)
    async with NatsServer() as nats, AsyncExitStack() as actors:
        for actor in (
            Decode(decode, await nats.bus("decode")),
            Tokenizer(
                TokenizerConfig(model=(f"{CHAT}={chat}",), **quiet), await nats.bus("tokenizer")
            ),
            Encoder(encoder, await nats.bus("encoder")),
            Asr(asr, await nats.bus("asr")),
        ):
            await actors.enter_async_context(running(actor))
        gateway = await actors.enter_async_context(served_gateway(nats))
        roles = ("decode", "tokenizer", "encoder", "asr")
        await gateway.bus.directory.wait_for(lambda d: all(d.ready(role) for role in roles), 60)
        yield Served(gateway)


async def raw(stack: Served, **fields: Any) -> Any:
    async with stack.client() as client:
        body: dict[str, Any] = {
            "model": CHAT,
            "messages": HELLO,
            "max_tokens": 4,
            "temperature": 0,
            **fields,
        }
        return await client.chat.completions.with_raw_response.create(**body)


def refused(error: openai.APIStatusError) -> tuple[int, Any, Any]:
    return error.status_code, error.code, error.param


# ------------------------------------------------------------------------------------------------------------- parsing
async def test_hints_change_nothing_and_are_named(
    stack: Served, caplog: pytest.LogCaptureFixture
) -> None:
    plain = (await raw(stack)).parse()
    message = {**HELLO[0], "id": "msg_1", "cache_control": {"type": "ephemeral"}}
    history = [
        *HELLO,
        {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"},
        message,
    ]
    extra = {"chat_id": "c", "session_id": "s\r\nx-evil: 1"}
    with caplog.at_level(logging.INFO):
        answer = await raw(
            stack,
            messages=[message],
            store=False,
            metadata={"a": "b"},
            verbosity="high",
            extra_body=extra,
        )
        assert (await raw(stack, messages=history)).http_response.is_success
    assert answer.parse().choices[0].message.content == plain.choices[0].message.content
    named = set(answer.headers["motet-ignored"].split(", "))
    assert named == {
        "store",
        "metadata",
        "verbosity",
        "chat_id",
        "session_id",
        "messages[].id",
        "messages[].cache_control",
    }
    assert "x-evil" not in answer.headers
    assert any("chat_id" in record.getMessage() for record in caplog.records)


async def test_a_stream_names_them_before_it_begins(stack: Served) -> None:
    async with (
        stack.client() as client,
        client.chat.completions.with_streaming_response.create(
            model=CHAT, messages=HELLO, max_tokens=4, stream=True, store=False
        ) as answer,
    ):
        assert answer.headers["motet-ignored"] == "store"
        assert b"[DONE]" in await answer.read()


async def test_what_would_change_the_answer_is_refused_and_logged(
    stack: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for fields, param in (
        ({"store": True}, "store"),
        ({"extra_body": {"chat_id": "c", "truncate_prompt_tokens": 5}}, "truncate_prompt_tokens"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ):
        with caplog.at_level(logging.INFO), pytest.raises(openai.BadRequestError) as caught:
            await raw(stack, **fields)
        assert refused(caught.value) == (400, "unsupported_parameter", param)
        assert any(getattr(record, "param", None) == param for record in caplog.records)


async def test_hints_of_forms_are_ignored_too(stack: Served) -> None:
    async with stack.client() as client:
        answer = await client.audio.transcriptions.with_raw_response.create(
            model=ASR_MODEL, file=("a.wav", SILENCE), extra_body={"user": "u", "session_id": "s"}
        )
    assert set(answer.headers["motet-ignored"].split(", ")) == {"user", "session_id"}


# --------------------------------------------------------------------------------------------------------------- usage
async def test_every_chunk_tells_the_usage_where_that_is_asked_for(stack: Served) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    async with stack.client() as client:
        stream = await client.chat.completions.create(
            model=CHAT,
            messages=HELLO,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options=options,
        )
        chunks = [chunk async for chunk in stream]
    usages = [chunk.usage for chunk in chunks]
    assert all(usage is not None for usage in usages)
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert counts == sorted(counts)
    last = usages[-1]
    assert last is not None
    assert counts[-1] == last.completion_tokens
    assert {usage.prompt_tokens for usage in usages if usage is not None} == {last.prompt_tokens}


# -------------------------------------------------------------------------------------------------------------- models
async def test_openais_names_are_the_model_that_is_served(stack: Served) -> None:
    for name in ("gpt-4o-mini", "gpt-4o-2024-08-06", "gpt-5.1"):
        assert (await raw(stack, model=name)).parse().model == CHAT
    async with (
        stack.client() as client,
        client.realtime.connect(model="gpt-realtime") as connection,
    ):
        async for event in connection:
            session: Any = getattr(event, "session", None)
            assert (event.type, session.model) == ("session.created", CHAT)
            break


async def test_a_model_of_another_kind_is_said_to_be_one(stack: Served) -> None:
    async with stack.client() as client:
        for name in (ASR_MODEL, "whisper-1"):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model=name, messages=HELLO)
            assert refused(caught.value) == (400, "wrong_model_kind", "model")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.audio.transcriptions.create(model=CHAT, file=("a.wav", SILENCE))
        assert refused(caught.value) == (400, "wrong_model_kind", "model")
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="no-such-model", messages=HELLO)
        assert unknown.value.param == "model"


async def test_a_prompt_is_refused_by_a_recognizer_that_cannot_use_it(stack: Served) -> None:
    async with stack.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.audio.transcriptions.create(
                model=ASR_MODEL, file=("a.wav", SILENCE), prompt="Motet"
            )
        assert refused(caught.value) == (400, "unsupported_parameter", "prompt")
        async with client.realtime.connect(model=CHAT) as connection:
            heard: Any = {"input": {"transcription": {"model": ASR_MODEL, "prompt": "Motet"}}}
            await connection.session.update(session={"type": "realtime", "audio": heard})
            error = await first(connection, "error")
    assert error.error.param == "session.audio.input.transcription.prompt"


# ------------------------------------------------------------------------------------------------------------ realtime
async def first(connection: Any, kind: str) -> Any:
    async for event in connection:
        assert event.type in (kind, "session.created") or event.type != "error", event
        if event.type == kind:
            return event
    raise AssertionError(f"the socket closed without {kind}")


def circle() -> str:
    """Return a picture of the kind that pocket-chat has learned from, as a data URL."""
    one = Thing(shape="circle", colour="red", size="large", column=1, row=1)
    picture = encoded(Image.fromarray(draw_things([one], Random(5))))
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def asked(url: str) -> Any:
    content = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "What do you see?"},
    ]
    return {"type": "message", "role": "user", "content": content}


async def test_a_picture_is_seen_in_a_conversation(stack: Served) -> None:
    async with stack.client() as client, client.realtime.connect(model=CHAT) as connection:
        session: Any = {"type": "realtime", "output_modalities": ["text"], "temperature": 0}
        await connection.session.update(session=session)
        await first(connection, "session.updated")
        await connection.conversation.item.create(item=asked(circle()))
        added = await first(connection, "conversation.item.added")
        assert added.item.content[0].type == "input_image"
        await connection.response.create()
        done = await first(connection, "response.done")
    assert done.response.status == "completed"
    text = done.response.output[0].content[0].text
    assert "red" in text
    assert "circle" in text


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://example.com/a.png", "unsupported_parameter"),
        ("data:image/png;base64,?", "invalid_request"),
        ("data:text/plain;base64,YQ==", "invalid_request"),
    ],
)
async def test_what_is_no_picture_is_refused_by_its_name(
    stack: Served, url: str, code: str
) -> None:
    async with stack.client() as client, client.realtime.connect(model=CHAT) as connection:
        await connection.conversation.item.create(item=asked(url))
        error = (await first(connection, "error")).error
    assert (error.param, error.code) == ("item.content[0].image_url", code)


async def test_hints_of_events_are_ignored(stack: Served, caplog: pytest.LogCaptureFixture) -> None:
    async with stack.client() as client, client.realtime.connect(model=CHAT) as connection:
        heard: Any = {"input": {"noise_reduction": {"type": "near_field"}}}
        session: Any = {
            "type": "realtime",
            "tracing": "auto",
            "audio": heard,
            "model": "gpt-realtime",
        }
        with caplog.at_level(logging.INFO):
            await connection.session.update(session=session)
            await first(connection, "session.updated")
    ignored = [record.ignored for record in caplog.records if hasattr(record, "ignored")]
    assert set(ignored[-1].split(", ")) == {
        "session.tracing",
        "session.audio.input.noise_reduction",
    }


DRAW: Any = {
    "type": "function",
    "name": "draw",
    "description": "Draw a picture.",
    "parameters": {
        "type": "object",
        "properties": {"prompt": {"type": "string"}},
        "required": ["prompt"],
    },
}

_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
COUNT: Any = {
    "type": "function",
    "name": "count",
    "parameters": {
        "type": "object",
        "properties": {"numbers": _NUMBERS},
        "required": ["numbers"],
    },
}


async def say(connection: Any, text: str) -> None:
    content = [{"type": "input_text", "text": text}]
    item = {"type": "message", "role": "user", "content": content}
    await connection.conversation.item.create(item=item)


async def response(connection: Any) -> tuple[list[Any], Any]:
    """Return the events of a response, and the response as it ended."""
    await connection.response.create()
    events = []
    async for event in connection:
        assert event.type != "error", event
        events.append(event)
        if event.type == "response.done":
            return events, event.response
    raise AssertionError("the socket closed within a response")


async def test_a_realtime_conversation_with_a_tool_and_a_cancel(stack: Served) -> None:
    session: Any = {"type": "realtime", "output_modalities": ["text"], "temperature": 0}
    async with stack.client() as client, client.realtime.connect(model=CHAT) as connection:
        await connection.session.update(session=session | {"tools": [DRAW]})
        await first(connection, "session.updated")

        await say(connection, "What is two plus two?")
        events, ended = await response(connection)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        text = ended.output[0].content[0].text
        assert deltas  # one, if the model is faster than the gateway
        assert "".join(deltas) == text

        await say(connection, "Draw two red circles.")
        events, ended = await response(connection)
        (call,) = [item for item in ended.output if item.type == "function_call"]
        parts = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta"
        ]
        assert (call.name, "".join(parts)) == ("draw", call.arguments)
        assert "circle" in call.arguments
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "{}"}
        await connection.conversation.item.create(item=output)
        _, ended = await response(connection)
        assert ended.status == "completed"

        await say(connection, "Count.")
        endless: Any = {"tools": [COUNT], "tool_choice": "required"}
        await connection.response.create(response=endless)
        await first(connection, "response.function_call_arguments.delta")
        await connection.response.cancel()
        ended = (await first(connection, "response.done")).response
        assert ended.status == "cancelled"
