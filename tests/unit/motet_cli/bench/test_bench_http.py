"""Test the load generator's HTTP client and event parser for any split of the received bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_cli.bench.events import EventParser, decode_chunk, error_kind
from motet_cli.bench.http import BadResponse, ChunkedBody, Client
from motet_shared.errors import ConfigError


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges)]


PLACES = st.lists(st.integers(0, 10_000), max_size=8)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    PLACES,
    st.sampled_from([b"", b"x: y\r\n"]),
)
def test_chunked_bodies_decode_for_any_split(
    parts: list[bytes], places: list[int], trailer: bytes
) -> None:
    sent = (
        b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in parts)
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )
    decoder, found = ChunkedBody(), b""
    for piece in cut(sent, places):
        assert not decoder.done or not piece
        found += decoder.feed(piece)
    assert found == b"".join(parts)
    assert decoder.done


def test_a_chunk_without_a_size_is_rejected() -> None:
    with pytest.raises(BadResponse) as caught:
        ChunkedBody().feed(b"hello\r\n")
    assert caught.value.part == "chunk"


@given(
    st.lists(st.text("ab é\\", min_size=1, max_size=9), max_size=6),
    PLACES,
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_parse_for_any_split(texts: list[str], places: list[int], end: str) -> None:
    sent = "".join(f": comment{end}event: x{end}data: {text}{end}{end}" for text in texts).encode()
    parser, found = EventParser(), []
    for piece in cut(sent, places):
        found += parser.feed(piece)
    assert found == [text.encode() for text in texts]


def test_data_may_span_lines_and_omit_the_space() -> None:
    assert EventParser().feed(b"data:{\ndata: }\n\n: ping\n\ndata: x\n\n") == [b"{\n}", b"x"]


@pytest.mark.parametrize(
    ("data", "has_tokens"),
    [
        ('{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        ('{"choices":[{"delta":{"content":"a"}}],"usage":null}', True),
        ('{"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}', True),
        ('{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', True),
        ('{"choices":[{"delta":{"tool_calls":null}}]}', False),
        ('{"choices":[{"delta":{"tool_calls":[]}}]}', False),
        ('{"choices":[{"text":"a","index":0}]}', True),
        ('{"choices":[{"text":"","finish_reason":"stop"}]}', False),
        (
            '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}}',
            False,
        ),
    ],
)
def test_chunks_with_tokens_are_recognized(data: str, has_tokens: bool) -> None:
    assert decode_chunk(data.encode()).has_tokens is has_tokens


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"error": {"code": "overloaded", "message": "full"}}', ("overloaded", "full")),
        (
            b'{"error": {"type": "server_error", "code": null, "message": "oops"}}',
            ("server_error", "oops"),
        ),
        (b'{"message": "oops", "code": 400}', ("400", "oops")),
        (b'{"error": "no such model"}', ("error", "no such model")),
        (b"<html>502</html>", ("error", "<html>502</html>")),
    ],
)
def test_errors_are_parsed_in_all_shapes(raw: bytes, expected: tuple[str, str]) -> None:
    assert error_kind(raw) == expected


# ------------------------------------------------------------------------------------------------------ connections
Answer = Callable[
    [int, int], bytes
]  # (connection, request on it) → what is sent; empty: the connection is closed


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Client]:
    tasks: list[asyncio.Task[None]] = []

    async def converse(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mine: int
    ) -> None:
        for number in itertools.count():
            if not (head := await reader.readline()):
                return
            length = 0
            while (line := await reader.readline()) != b"\r\n":
                if line.startswith(b"Content-Length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            assert head.startswith(b"POST /v1/x HTTP/1.1")
            data = answer(mine, number)
            writer.write(data)
            if b"content-length" not in data or b"half" in data:
                return

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await converse(reader, writer, len(tasks) - 1)
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "key")
    try:
        yield client
    finally:
        client.close()
        server.close()
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)


def whole(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%b\r\n%b" % (len(body), extra, body)


async def ask(client: Client) -> bytes:
    reply = await client.request("POST", "/x", b"{}")
    try:
        return await reply.read()
    finally:
        reply.close()


async def test_connections_are_reused() -> None:
    async with serving(lambda connection, number: whole(b"%d/%d" % (connection, number))) as client:
        assert [await ask(client) for _ in range(3)] == [b"0/0", b"0/1", b"0/2"]
        assert sorted(await asyncio.gather(ask(client), ask(client))) == [b"0/3", b"1/0"]


async def test_connection_close_is_honoured() -> None:
    async with serving(
        lambda connection, number: whole(b"%d" % connection, b"Connection: close\r\n")
    ) as client:
        assert [await ask(client), await ask(client)] == [b"0", b"1"]
    async with serving(lambda connection, number: b"HTTP/1.1 200 OK\r\n\r\nto the end") as client:
        assert [await ask(client), await ask(client)] == [b"to the end"] * 2


async def test_a_closed_idle_connection_is_replaced() -> None:
    async with serving(
        lambda connection, number: b"" if (connection, number) == (0, 1) else whole(b"ok")
    ) as client:
        assert [await ask(client), await ask(client)] == [b"ok", b"ok"]


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "status"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "status"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "body"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", "head"),
    ],
)
async def test_malformed_replies_are_reported(data: bytes, part: str) -> None:
    async with serving(lambda connection, number: data) as client:
        with pytest.raises(BadResponse) as caught:
            await ask(client)
        assert caught.value.part == part


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://host:99999", ""])
def test_invalid_urls_are_rejected(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert caught.value.param == "URL"
