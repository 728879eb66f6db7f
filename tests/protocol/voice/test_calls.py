"""Calls over WebRTC of a real gateway: how long they last, what a stop does, and STUN servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aioice import stun

from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer, running
from support.clients.call_client import CallClient, calling
from support.clients.gateway_client import Http, world
from support.clients.offers import AUDIO, candidates, offer
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer, words
from support.stages.served_gateway import KEY, Served, served_gateway

PUBLIC = "198.51.100.7"
LIMIT = 15.0  # seconds until a test that waits for the gateway fails
SILENT = {"input": {"turn_detection": None}}  # the client's sound is not read for turns


@asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[tuple[Gateway, FakeTokenizer]]:
    async with NatsServer() as nats, AsyncExitStack() as actors:
        tokenizer = FakeTokenizer(None, await nats.bus("tokenizer"))
        for actor in (tokenizer, FakeDecode(None, await nats.bus("decode"))):
            await actors.enter_async_context(running(actor))
        made = await actors.enter_async_context(served_gateway(nats, **settings))
        await made.bus.directory.wait_for(
            lambda d: d.ready("tokenizer") and d.ready("decode"), LIMIT
        )
        yield made, tokenizer


def call(made: Gateway) -> AbstractAsyncContextManager[CallClient]:
    session: Any = {"type": "realtime", "model": MODEL, "audio": SILENT}
    return calling(Served(made).url, KEY, output_modalities=["text"], **session)


async def test_a_call_ends_with_its_time_and_says_why() -> None:
    async with gateway(call_time=1.0) as (made, _), call(made) as client:
        last = await client.next()
        assert last["error"]["code"] == "session_expired"
        await client.over()
        assert made.service is not None
        async with asyncio.timeout(LIMIT):
            while made.service.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert len(made.service.sessions) == 0


async def test_a_stop_waits_for_the_reply_of_a_call() -> None:
    async with gateway() as (made, tokenizer), call(made) as client:
        tokenizer.reply = lambda request: words("one two three four five six seven eight")
        tokenizer.pace = 0.05
        content = [{"type": "input_text", "text": "Count."}]
        item = {"type": "message", "role": "user", "content": content}
        client.send("conversation.item.create", item=item)
        client.send("response.create")
        await client.until("response.output_text.delta")
        assert made.service is not None
        (session,) = made.service.sessions
        drained = asyncio.create_task(session.drain())
        done = (await client.until("response.done"))[-1]["response"]
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["text"].endswith("eight")
        await client.over()
        await drained


class StunServer(asyncio.DatagramProtocol):
    """Answer binding requests: the sender is seen at a public address."""

    def __init__(self) -> None:
        self.asked = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.asked += 1
        request = stun.parse_message(data)
        answer = stun.Message(
            message_method=stun.Method.BINDING,
            message_class=stun.Class.RESPONSE,
            transaction_id=request.transaction_id,
        )
        answer.attributes["XOR-MAPPED-ADDRESS"] = (PUBLIC, addr[1])
        self._transport.sendto(bytes(answer), addr)


@asynccontextmanager
async def stun_server() -> AsyncIterator[tuple[StunServer, int]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(StunServer, local_addr=("127.0.0.1", 0))
    try:
        yield server, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


async def answered(sdp: str, **settings: Any) -> list[list[str]]:
    """Return the words of each candidate of the answer to an offer."""
    async with world(**settings) as here:
        headers = {"content-type": "application/sdp"}
        http = Http(
            here.app,
            "/v1/realtime/calls",
            sdp.encode(),
            headers=headers,
            query=f"model={MODEL}",
        )
        reply = await http.done()
        assert reply.status == 201, reply.body
        for call in list(here.service.calls.values()):
            await call.end()
    lines = reply.body.decode().splitlines()
    return [line.split() for line in lines if line.startswith("a=candidate:")]


async def test_an_answer_has_the_address_that_a_stun_server_sees() -> None:
    async with stun_server() as (server, port):
        found = await answered(offer(), ice_servers=(f"stun:127.0.0.1:{port}",))
    assert server.asked
    assert {(one[4], one[7]) for one in found} == {("127.0.0.1", "host"), (PUBLIC, "srflx")}


async def test_no_stun_server_is_asked_unless_one_is_set() -> None:
    public = offer(AUDIO + candidates("udp 1 1.1.1.1 40000 typ host"))
    assert {(one[4], one[7]) for one in await answered(public)} == {("127.0.0.1", "host")}


@pytest.mark.long
async def test_a_stun_server_that_does_not_answer_is_done_without() -> None:
    """Five seconds are waited for it."""
    async with stun_server() as (server, port):
        server.datagram_received = lambda data, addr: None  # type: ignore[method-assign]
        found = await answered(offer(), ice_servers=(f"stun:127.0.0.1:{port}",))
    assert {(one[4], one[7]) for one in found} == {("127.0.0.1", "host")}
