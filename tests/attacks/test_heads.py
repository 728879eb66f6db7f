"""Clients that are not known yet: endless, dripped and idle connections, and too many. Others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from motet_gateway.http.connections.addresses import TrustedProxies, counted, parse
from motet_gateway.http.connections.closing import ClosingTimer
from motet_gateway.service import Gateway
from motet_shared.errors import ConfigError
from motet_shared.testing import NatsServer, running
from support.peers.certificates import self_signed
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer
from support.stages.served_gateway import KEY, served_gateway

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
SHORT = {"head_timeout": 0.5, "idle_timeout": 1.0, "body_timeout": 0.5, "body_rate": 1000}
LIMIT = 15.0  # seconds until a test that waits for the gateway fails
GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Gateway]:
    async with NatsServer() as nats:
        tokenizer, decode = (
            FakeTokenizer(None, await nats.bus("tokenizer")),
            FakeDecode(None, await nats.bus("decode")),
        )
        async with running(tokenizer), running(decode), served_gateway(nats, **settings) as gateway:
            await gateway.bus.directory.wait_for(
                lambda d: d.ready("tokenizer") and d.ready("decode"), 15
            )
            yield gateway


@asynccontextmanager
async def connected(gateway: Gateway, address: str = "127.0.0.1") -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", gateway.port, local_addr=(address, 0)
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the gateway closes; what came before a reset counts."""
    got = b""
    async with asyncio.timeout(LIMIT):
        with suppress(ConnectionError):
            while part := await reader.read(65536):
                got += part
    return got


def refusal(reply: bytes) -> tuple[int, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def another_is_served(gateway: Gateway, **options: Any) -> None:
    """A chat of another client, over a connection of its own."""
    transport = httpx.AsyncHTTPTransport(**options)
    async with httpx.AsyncClient(trust_env=False, transport=transport) as http:
        url, key = (
            f"http://127.0.0.1:{gateway.port}/v1/chat/completions",
            {"authorization": f"Bearer {KEY}"},
        )
        answer = await http.post(url, json=CHAT, headers=key, timeout=LIMIT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "You said: hello"


async def pour(writer: asyncio.StreamWriter, part: bytes, most: int = 64 << 20) -> None:
    """Send `part` again and again until the gateway closes; fail if it takes `most` bytes."""
    async with asyncio.timeout(LIMIT):
        with suppress(ConnectionError):
            for _ in range(most // len(part)):
                writer.write(part)
                await writer.drain()
            pytest.fail(f"the gateway has taken {most} bytes")


async def drip(writer: asyncio.StreamWriter, part: bytes, pause: float = 0.05) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)


def refused(gateway: Gateway, reason: str) -> float:
    assert gateway.service is not None
    text = gateway.service.metrics.registry.render().decode()
    found = re.search(
        rf'^motet_connection_refusals_total{{[^}}]*reason="{reason}"[^}}]*}} (\S+)', text, re.M
    )
    return float(found[1]) if found else 0.0


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with serving(**SHORT) as made:
        yield made


# -------------------------------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (GET, b"X-Filler: " + b"x" * 1000 + b"\r\n"),
        (GET + b"X-Endless: ", b"x" * 65536),
        (GET, b"x" * 65536),
        (b"GET /", b"x" * 65536),
    ],
    ids=["fields", "value", "name", "url"],
)
async def test_endless_heads_end(gateway: Gateway, begin: bytes, part: bytes) -> None:
    async with connected(gateway) as (reader, writer):
        writer.write(begin)
        pouring = asyncio.create_task(pour(writer, part))
        await another_is_served(gateway)
        reply = await rest(reader)
        await pouring
        assert not reply or refusal(reply)[0] in (400, 431)  # a reset may overtake it
    async with asyncio.timeout(LIMIT):
        while not refused(gateway, "head") + refused(gateway, "malformed"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def one(gateway: Gateway, request: bytes) -> bytes:
    async with connected(gateway) as (reader, writer):
        writer.write(request)
        return await rest(reader)


async def test_a_hundred_fields_are_taken_and_one_more_is_not(gateway: Gateway) -> None:
    def fields(count: int) -> bytes:  # with Host and Connection
        return (
            b"".join(b"X-%d: x\r\n" % index for index in range(count - 2))
            + b"Connection: close\r\n\r\n"
        )

    assert (await one(gateway, GET + fields(100))).split()[1] == b"200"
    assert refusal(await one(gateway, GET + fields(101))) == (
        431,
        "request_header_fields_too_large",
    )
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    many = b"GET /v1/realtime?model=x HTTP/1.1\r\nHost: localhost\r\n" + upgrade + key + fields(99)
    assert refusal(await one(gateway, many))[0] == 431
    assert refused(gateway, "head") == 2


async def test_an_upgrade_with_a_long_field_is_not_left_open(gateway: Gateway) -> None:
    """The library of WebSockets takes lines of 8 KiB."""
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    head = (
        b"GET /v1/realtime?model=x HTTP/1.1\r\nHost: localhost\r\n"
        + upgrade
        + b"Cookie: "
        + b"x" * 9000
    )
    assert refusal(await one(gateway, head + b"\r\n\r\n"))[0] == 431
    assert refused(gateway, "head") == 1


@pytest.mark.parametrize("pieces", [1, 16])
async def test_sixty_four_kibibytes_are_taken_and_more_are_not(
    gateway: Gateway, pieces: int
) -> None:
    async def sent(size: int) -> bytes:
        head = GET + b"Connection: close\r\nX: "
        head += b"x" * (size - len(head) - 4) + b"\r\n\r\n"
        async with connected(gateway) as (reader, writer):
            for start in range(0, len(head), -(-len(head) // pieces)):
                writer.write(head[start : start - (-len(head) // pieces)])
                await asyncio.sleep(0.005 if pieces > 1 else 0)
            return await rest(reader)

    assert (await sent(2**16 - 100)).split()[1] == b"200"
    reply = await sent(65 * 2**10)
    assert not reply or refusal(reply) == (431, "request_header_fields_too_large")
    assert refused(gateway, "head") == 1


async def test_a_large_body_behind_a_small_head_is_no_large_head(gateway: Gateway) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        body = {**CHAT, "messages": [{"role": "user", "content": "x" * 2**20}]}
        url, key = (
            f"http://127.0.0.1:{gateway.port}/v1/chat/completions",
            {"authorization": f"Bearer {KEY}"},
        )
        reply = await http.post(url, json=body, headers=key, timeout=LIMIT)
        assert reply.json()["error"]["code"] == "context_length_exceeded"  # all of it was read


async def test_endless_trailers_end(gateway: Gateway) -> None:
    begin = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        + KEY.encode()
    )
    begin += b"\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Endless: "
    async with connected(gateway) as (reader, writer):
        writer.write(begin)
        pouring = asyncio.create_task(pour(writer, b"x" * 65536))
        await another_is_served(gateway)
        await rest(reader)
        await pouring
    assert refused(gateway, "head") == 1


# --------------------------------------------------------------------------------------------------------------- times
async def closed_within(
    gateway: Gateway, least: float, most: float, attack: Callable[..., Awaitable[Any]]
) -> bytes:
    """Run an attack on a connection while another client is served; return the reply."""
    loop = asyncio.get_running_loop()
    async with connected(gateway) as (reader, writer):
        began = loop.time()
        attacking = asyncio.ensure_future(attack(reader, writer))
        await another_is_served(gateway)
        reply = await rest(reader)
        took = loop.time() - began
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
    assert least <= took <= most, took
    return reply


async def test_a_dripped_head_ends(gateway: Gateway) -> None:
    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET + b"X-Slow: ")
        await drip(writer, b"x")

    reply = await closed_within(gateway, 0.4, 5.0, attack)
    assert refusal(reply) == (408, "request_timeout")
    assert refused(gateway, "slow_head") == 1


async def test_a_dripped_head_on_a_connection_in_use_ends(gateway: Gateway) -> None:
    async with connected(gateway) as (reader, writer):
        writer.write(GET + b"\r\n")
        await asyncio.wait_for(reader.readuntil(b'"live"}'), LIMIT)
        writer.write(GET + b"X-Slow: ")
        dripping = asyncio.create_task(drip(writer, b"x"))
        await another_is_served(gateway)
        assert refusal(await rest(reader)) == (408, "request_timeout")
        dripping.cancel()


async def test_idle_connections_end(gateway: Gateway) -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...

    assert await closed_within(gateway, 0.9, 5.0, nothing) == b""

    async with connected(gateway) as (reader, writer):
        writer.write(GET + b"\r\n")
        reply = await rest(reader)  # it is kept for the next request, and closed when none comes
        assert reply.split()[1] == b"200"
        assert reply.endswith(b'"live"}')


def post(length: int, key: str = KEY) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    )
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("dripped", [False, True], ids=["stopped", "dripped"])
async def test_slow_bodies_end(gateway: Gateway, dripped: bool) -> None:
    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(post(100_000) + b"{")
        if dripped:
            await drip(writer, b" ")

    assert refusal(await closed_within(gateway, 0.4, 5.0, attack)) == (408, "request_timeout")
    assert refused(gateway, "slow_body") == 1


async def test_a_body_nobody_wants_ends(gateway: Gateway) -> None:
    """Who has no key is answered before the body has come, and does not hold the connection with it."""

    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(post(2**30, "wrong"))
        await drip(writer, b" " * 10_000, 0.01)

    reply = await closed_within(gateway, 0.4, 5.0, attack)
    assert reply.split()[1] == b"401"
    assert reply.count(b"HTTP/1.1") == 1


async def test_a_body_at_the_least_rate_is_taken(gateway: Gateway) -> None:
    body = json.dumps(CHAT).encode()
    body += b" " * (3000 - len(body))
    async with connected(gateway) as (reader, writer):
        writer.write(post(len(body)))
        for start in range(0, len(body), 200):
            writer.write(body[start : start + 200])
            await asyncio.sleep(0.08)  # 2,500 bytes per second, for longer than `body_timeout`
        reply = await asyncio.wait_for(reader.readuntil(b"}}"), LIMIT)
        assert reply.split()[1] == b"200"


async def test_a_reply_that_takes_longer_than_these_times_is_given() -> None:
    async with NatsServer() as nats:
        tokenizer, decode = (
            FakeTokenizer(None, await nats.bus("tokenizer")),
            FakeDecode(None, await nats.bus("decode")),
        )
        tokenizer.pace = 0.6  # seconds per word
        async with running(tokenizer), running(decode), served_gateway(nats, **SHORT) as gateway:
            await gateway.bus.directory.wait_for(
                lambda d: d.ready("tokenizer") and d.ready("decode"), 15
            )
            await another_is_served(gateway)


# ------------------------------------------------------------------------------------------------- how many there are
async def is_refused(gateway: Gateway, address: str) -> bool:
    async with connected(gateway, address) as (reader, writer):
        writer.write(GET + b"Connection: close\r\n\r\n")
        reply = await rest(reader)
        if reply.split()[1:2] == [b"200"]:
            return False
        assert not reply or refusal(reply) == (503, "too_many_connections")
        return True


async def test_an_address_has_so_many_connections() -> None:
    async with serving(max_connections_per_address=20) as gateway, AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(connected(gateway, "127.0.0.2"))
        assert await is_refused(gateway, "127.0.0.2")
        assert refused(gateway, "address") == 1
        assert not await is_refused(gateway, "127.0.0.3")
        await another_is_served(gateway, local_address="127.0.0.3")
        await stack.aclose()
        async with asyncio.timeout(LIMIT):
            while await is_refused(gateway, "127.0.0.2"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_there_are_so_many_connections_in_all() -> None:
    async with serving(max_connections=20) as gateway, AsyncExitStack() as stack:
        for index in range(20):
            await stack.enter_async_context(connected(gateway, f"127.0.1.{index + 1}"))
        assert await is_refused(gateway, "127.0.0.3")
        assert refused(gateway, "total") == 1
        await stack.aclose()
        async with asyncio.timeout(LIMIT):
            while await is_refused(gateway, "127.0.0.3"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert gateway.service is not None
        async with asyncio.timeout(LIMIT):
            while gateway.service.connections.total:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not gateway.service.connections.by_address


async def test_a_websocket_is_one_connection() -> None:
    async with serving(max_connections_per_address=1) as gateway:
        url, headers = (
            f"ws://127.0.0.1:{gateway.port}/v1/realtime?model={MODEL}",
            {"Authorization": f"Bearer {KEY}"},
        )
        options: Any = {
            "additional_headers": headers,
            "proxy": None,
            "local_addr": ("127.0.0.2", 0),
        }
        async with websockets.connect(url, **options) as held:
            assert json.loads(await held.recv())["type"] == "session.created"
            assert await is_refused(gateway, "127.0.0.2")
        async with asyncio.timeout(LIMIT):
            while await is_refused(gateway, "127.0.0.2"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_handshakes_that_do_not_begin_end(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    async with serving(
        tls_cert=cert, tls_key=key, max_connections_per_address=2, **SHORT
    ) as gateway:
        async with (
            connected(gateway, "127.0.0.2") as (first, _),
            connected(gateway, "127.0.0.2") as (second, writer),
        ):
            writer.write(b"\x16\x03\x01")
            async with connected(gateway, "127.0.0.2") as (third, _):
                assert await rest(third) == b"", "before its handshake"
            async with httpx.AsyncClient(trust_env=False, verify=trust) as http:
                where = f"https://127.0.0.1:{gateway.port}/health/live"
                assert (await http.get(where, timeout=LIMIT)).status_code == 200
            assert await rest(first) == b""
            await rest(second)
        assert refused(gateway, "address") == 1


async def test_a_client_that_takes_nothing_does_not_keep_a_closing_connection() -> None:
    made: list[asyncio.Transport] = []
    lost = asyncio.Event()

    class Talker(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            made.append(transport)
            transport.write(b"x" * (32 << 20))
            transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            lost.set()

    server = await asyncio.get_running_loop().create_server(Talker, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname(), timeout=LIMIT):
        async with asyncio.timeout(LIMIT):
            while not made:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            timer = ClosingTimer()
            assert timer.check(made[0], 100.0, 1.0)
            assert timer.check(made[0], 100.9, 1.0)
            await asyncio.sleep(0.1)
            assert not lost.is_set()
            assert timer.check(made[0], 101.1, 1.0)
            await lost.wait()
    server.close()
    await server.wait_closed()


def test_room_is_made_among_open_files() -> None:
    script = """
import resource
from motet_gateway.http.connections.open_files import room_for
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1300))
print(room_for(40), room_for(1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0], room_for(8192))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["40", "1000", "1256", "1044"]


# -------------------------------------------------------------------------------------------------------------- proxies
async def forwarded(gateway: Gateway, hops: str, address: str) -> tuple[Streams, AsyncExitStack]:
    """A chat request over a proxy at `address`, whose body does not come yet."""
    stack = AsyncExitStack()
    reader, writer = await stack.enter_async_context(connected(gateway, address))
    body = json.dumps(CHAT).encode()
    writer.write(
        post(len(body)).replace(b"\r\n\r\n", f"\r\nX-Forwarded-For: {hops}\r\n\r\n".encode())
    )
    await writer.drain()
    return (reader, writer), stack


async def held(gateway: Gateway, count: int) -> None:
    assert gateway.service is not None
    async with asyncio.timeout(LIMIT):
        while gateway.service.connections.by_address["203.0.113.9"] < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def status(gateway: Gateway, hops: str, address: str) -> int:
    async with httpx.AsyncClient(
        trust_env=False, transport=httpx.AsyncHTTPTransport(local_address=address)
    ) as http:
        url = f"http://127.0.0.1:{gateway.port}/health/live"
        return (await http.get(url, headers={"x-forwarded-for": hops}, timeout=LIMIT)).status_code


async def test_clients_of_a_proxy_are_told_apart_and_spoofing_does_not_help() -> None:
    proxy = "127.0.0.5"
    async with serving(
        max_connections_per_address=2, trusted_proxies=(f"{proxy}/32", "192.0.2.0/24")
    ) as gateway:
        async with AsyncExitStack() as stack:
            for spoofed in (
                "198.51.100.1",
                "198.51.100.2",
            ):  # what the client itself wrote comes first
                _, kept = await forwarded(gateway, f"{spoofed}, 203.0.113.9, 192.0.2.1", proxy)
                stack.push_async_callback(kept.aclose)
            await held(gateway, 2)
            assert await status(gateway, "198.51.100.3, 203.0.113.9", proxy) == 503
            assert refused(gateway, "address") == 1
            assert await status(gateway, "203.0.113.9, 198.51.100.7", proxy) == 200
            assert await status(gateway, "198.51.100.3", "127.0.0.6") == 200
        # A peer that is no proxy has its own address, whatever it says.
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(connected(gateway, "127.0.0.7"))
            async with connected(gateway, "127.0.0.7") as (reader, writer):
                writer.write(GET + b"X-Forwarded-For: 198.51.100.9\r\nConnection: close\r\n\r\n")
                reply = await rest(reader)
                assert not reply or refusal(reply)[0] == 503
            assert refused(gateway, "address") == 2


@pytest.mark.parametrize(
    ("peer", "hops", "client"),
    [
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "1.2.3.4, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("10.0.0.1", "1.2.3.4, nonsense, 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "10.0.0.3,10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "203.0.113.9:4711", "203.0.113.9"),
        ("10.0.0.1", "[2001:db8::7]:4711", "2001:db8::7"),
        ("10.0.0.1", "2001:db8::7", "2001:db8::7"),
        ("::ffff:10.0.0.1", "::ffff:203.0.113.9", "203.0.113.9"),
        ("203.0.113.1", "1.2.3.4", "203.0.113.1"),
    ],
)
def test_whose_request_it_is(peer: str, hops: str, client: str) -> None:
    address = parse(peer)
    assert address is not None
    assert str(TrustedProxies(["10.0.0.0/8"]).client(address, hops)) == client


def test_one_subscriber_is_one_address() -> None:
    names = ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1", "::ffff:192.0.2.1", "192.0.2.1")
    addresses = [address for name in names if (address := parse(name)) is not None]
    first, same, other, mapped, plain = map(counted, addresses)
    assert first == same != other
    assert mapped == plain


@pytest.mark.parametrize("network", ["proxy.example", "10.0.0.1/8", "10.0.0.0/33", ""])
def test_what_is_no_network_is_refused(network: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrustedProxies([network])
    assert caught.value.param == "trusted_proxies"


async def test_requests_that_are_no_http_are_refused(gateway: Gateway) -> None:
    for nonsense in (
        b"\x00\x01\x02\x03\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        GET + b"Bad Name: x\r\n\r\n",
    ):
        assert refusal(await one(gateway, nonsense))[0] == 400
    assert refused(gateway, "malformed") == 3
