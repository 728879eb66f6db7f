"""The gateway on a real port over a real nats-server, with clients that know nothing of us."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import websockets

from motet_shared.messages import Text, ToolCallDelta
from motet_shared.testing import NatsServer, running
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer, words
from support.stages.served_gateway import KEY, Served, served_gateway

HELLO: Any = [{"role": "user", "content": "hello"}]


@dataclass
class Service(Served):
    tokenizer: FakeTokenizer

    def socket(self, model: str = MODEL, key: str = KEY) -> websockets.connect:
        url = self.url.replace("http", "ws") + f"/v1/realtime?model={model}"
        return websockets.connect(
            url, additional_headers={"Authorization": f"Bearer {key}"}, proxy=None
        )


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Service]:
    async with NatsServer() as nats:
        tokenizer, decode = (
            FakeTokenizer(None, await nats.bus("tokenizer")),
            FakeDecode(None, await nats.bus("decode")),
        )
        async with running(tokenizer), running(decode), served_gateway(nats, **settings) as gateway:
            await gateway.bus.directory.wait_for(
                lambda d: d.ready("tokenizer") and d.ready("decode"), 5
            )
            yield Service(gateway, tokenizer)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as made:
        yield made


# ------------------------------------------------------------------------------------------------------ openai, HTTP
async def test_the_official_client(service: Service) -> None:
    async with service.client() as client:
        reply = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert reply.choices[0].message.content == "You said: hello"
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            == "You said: hello"
        )
        assert chunks[-1].usage is not None
        plain = await client.completions.create(model=MODEL, prompt=["a b", "c"])
        assert [choice.text for choice in plain.choices] == ["a b", "c"]
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_the_official_client_gathers_tool_calls(service: Service) -> None:
    service.tokenizer.reply = lambda request: [
        Text("", [1], [ToolCallDelta(0, "call_1", "draw")]),
        Text("", [2], [ToolCallDelta(0, arguments='{"prompt": "x"}')]),
    ]
    tool: Any = {"type": "function", "function": {"name": "draw", "parameters": {"type": "object"}}}
    async with (
        service.client() as client,
        client.chat.completions.stream(model=MODEL, messages=HELLO, tools=[tool]) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls is not None
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"prompt": "x"}


async def test_the_official_client_leaves_a_stream(service: Service) -> None:
    service.tokenizer.pace = 0.05
    service.tokenizer.reply = lambda request: words("x " * 1000)
    async with service.client() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        async with stream:
            await anext(aiter(stream))
    async with asyncio.timeout(20):
        while not service.tokenizer.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    service.gateway.check_integrity()


async def test_the_official_client_raises_what_it_should(service: Service) -> None:
    async with service.client() as client, service.client("wrong") as stranger:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-99", messages=HELLO)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as unsupported:
            await client.chat.completions.create(model=MODEL, messages=HELLO, store=True)
        assert unsupported.value.param == "store"
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model=MODEL, messages=HELLO)
        service.gateway.service.limits.max_streams = 0  # type: ignore[union-attr]
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=HELLO)


async def test_an_error_within_a_stream_raises_in_the_official_client(service: Service) -> None:
    from motet_shared.errors import InternalError

    service.tokenizer.error, service.tokenizer.fail_after = InternalError("a bug"), 2
    async with service.client() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        with pytest.raises(openai.APIError):
            async for _chunk in stream:
                pass


# -------------------------------------------------------------------------------------------------------- realtime
async def test_the_official_realtime_client(service: Service) -> None:
    async with service.client() as client, client.realtime.connect(model=MODEL) as connection:
        assert (await connection.recv()).type == "session.created"
        await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        assert (await connection.recv()).type == "session.updated"
        await connection.conversation.item.create(
            item={
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hello"}],
            }
        )
        await connection.response.create()
        deltas = []
        async for event in connection:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            elif event.type == "response.done":
                assert event.response.status == "completed"
                break
        assert deltas == ["You", " said:", " hello"]


async def test_raw_websockets(service: Service) -> None:
    service.tokenizer.reply = lambda request: words("é" * 70_000 + " end")
    async with service.socket() as socket:
        assert json.loads(await socket.recv())["type"] == "session.created"
        await socket.send(b"\x00")
        assert json.loads(await socket.recv())["type"] == "error"
        content = [{"type": "input_text", "text": "hello"}]
        item = {"type": "message", "role": "user", "content": content}
        await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        await socket.send(json.dumps({"type": "response.create"}))
        text = ""
        while (event := json.loads(await socket.recv()))["type"] != "response.done":
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
        assert text == "é" * 70_000 + " end"
        await (await socket.ping())


@pytest.mark.parametrize(("model", "key", "close"), [(MODEL, "wrong", 3000), ("gpt-99", KEY, 4000)])
async def test_sockets_that_may_not_stay(
    service: Service, model: str, key: str, close: int
) -> None:
    async with service.socket(model, key) as socket:
        assert json.loads(await socket.recv())["type"] == "error"
        with pytest.raises(websockets.ConnectionClosed):
            await socket.recv()
        assert socket.close_code == close


async def test_messages_are_bounded() -> None:
    async with serving(max_message=4096) as service, service.socket() as socket:
        await socket.recv()
        await socket.send("x" * 5000)
        with pytest.raises(websockets.ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1009


# ------------------------------------------------------------------------------------------------- connections, drain
def raw_request(stream: bool = True) -> bytes:
    body = json.dumps({"model": MODEL, "messages": HELLO, "stream": stream}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    )
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_who_hangs_up_cancels(service: Service) -> None:
    service.tokenizer.pace = 0.05
    service.tokenizer.reply = lambda request: words("x " * 1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", service.gateway.port)
    writer.write(raw_request())
    await reader.readuntil(b"data: ")
    writer.close()
    async with asyncio.timeout(20):
        while not service.tokenizer.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    service.gateway.check_integrity()


async def test_one_connection_serves_many_requests(service: Service) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.gateway.port)
    for stream in (True, False, True):
        writer.write(raw_request(stream))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        if stream:
            assert b"data: [DONE]" in await reader.readuntil(b"0\r\n\r\n")
        else:
            length = next(
                line for line in head.split(b"\r\n") if line.startswith(b"content-length")
            )
            await reader.readexactly(int(length.split()[1]))
    writer.close()


async def test_small_packets_leave_at_once(service: Service) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.gateway.port)
    writer.write(raw_request())
    await reader.readuntil(b"0\r\n\r\n")
    server = service.gateway._server  # nobody but the server knows its sockets
    assert server is not None
    for connection in server.server_state.connections:
        assert connection.transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY
        )
    writer.close()


async def test_stopping_finishes_what_runs_and_refuses_the_rest() -> None:
    async with serving() as service, service.client() as client, service.socket() as idle:
        await idle.recv()
        service.tokenizer.pace = 0.1
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        stopping = asyncio.create_task(service.gateway.close())
        with pytest.raises(websockets.ConnectionClosed):
            await idle.recv()
        assert idle.close_code == 1012
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (
            503,
            "1",
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "stop"
        await asyncio.wait_for(stopping, 10)
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()


async def test_a_request_that_has_come_in_part_is_answered_by_the_predecessor() -> None:
    """What another gateway is to serve is what comes later."""
    listener = socket.create_server(("127.0.0.1", 0)).detach()  # the gateway closes it
    async with serving(listen_fd=listener) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.gateway.port)
        request = raw_request(stream=False)
        writer.write(request[:-10])
        await writer.drain()
        stopping = asyncio.create_task(service.gateway.close())
        await asyncio.sleep(1.5)  # beyond its last accepted connection
        assert not stopping.done()
        writer.write(request[-10:])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head.lower()
        await asyncio.wait_for(stopping, 20)
        writer.close()
