"""Test orders to a running stack: messages over the socket, and refusals."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from motet_cli.commands import scale
from motet_cli.main import parser
from motet_cli.supervision import orders
from motet_cli.supervision.orders import Order, Report, Restart, Scale
from motet_shared.errors import ConfigError, MotetError, Unavailable

URL = "http://127.0.0.1:8123"


class RecordingServer:
    """Carry out orders once `released` is set, with two progress messages."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.released = asyncio.Event()
        self.released.set()

    async def __call__(self, order: Order, report: Report) -> None:
        self.orders.append(order)
        report("one")
        await self.released.wait()
        if isinstance(order, Restart) and "unknown" in order.roles:
            raise ConfigError("ROLE: 'unknown' is not in this stack", param="ROLE")
        report("two")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "motet").mkdir(mode=0o700)
    return tmp_path / "motet"


@asynccontextmanager
async def serving() -> AsyncIterator[RecordingServer]:
    server = RecordingServer()
    async with orders.serving_orders(orders.path_of(8123), server):
        yield server


def send(order: Order) -> list[str]:
    return list(orders.send_order(URL, order))


async def test_orders_are_carried_out_with_progress(runtime: Path) -> None:
    async with serving() as server:
        for order in (Restart(["decode"], 3.0), Scale({"decode": 2}, 3.0)):
            assert await asyncio.to_thread(send, order) == ["one", "two"]
        assert server.orders == [Restart(["decode"], 3.0), Scale({"decode": 2}, 3.0)]
    assert not os.listdir(runtime)


async def test_errors_are_raised_at_the_sender() -> None:
    async with serving():
        with pytest.raises(ConfigError) as caught:
            await asyncio.to_thread(send, Restart(["unknown"], 3.0))
        assert caught.value.param == "ROLE"
        assert await asyncio.to_thread(send, Restart([], 3.0)) == ["one", "two"]


async def test_one_order_at_a_time() -> None:
    async with serving() as server:
        server.released.clear()
        first = asyncio.create_task(asyncio.to_thread(send, Restart([], 3.0)))
        async with asyncio.timeout(20):
            while not server.orders:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable):
            await asyncio.to_thread(send, Restart([], 3.0))
        server.released.set()
        assert await first == ["one", "two"]


async def test_unknown_orders_are_rejected() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_unix_connection(str(orders.path_of(8123)))
        writer.write(b'{"type": "destroy"}\n')
        assert json.loads(await reader.readline())["type"] == "failed"
        writer.close()
        assert not server.orders


async def test_a_stack_that_ends_meanwhile_is_an_error() -> None:
    async with serving() as server:
        server.released.clear()
        sender = asyncio.create_task(asyncio.to_thread(send, Restart([], 3.0)))
        async with asyncio.timeout(20):
            while not server.orders:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    with pytest.raises(MotetError):
        await sender


@pytest.mark.parametrize("url", [URL, "http://192.0.2.1:8123"])
def test_a_missing_stack_is_reported(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(orders.send_order(url, Restart([], 3.0)))
    assert caught.value.param == "--url"


def test_invalid_urls_are_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        list(orders.send_order("ftp://x", Restart([], 3.0)))
    assert caught.value.param == "--url"


def test_the_command_line() -> None:
    args = parser().parse_args(["scale", "decode=3", "tts=2", "--drain", "5"])
    assert (scale.counts(args.counts), args.drain) == ({"decode": 3, "tts": 2}, 5.0)
    for word in ("decode", "decode=x", "=3", "decode=-1"):
        with pytest.raises(ConfigError) as caught:
            scale.counts([word])
        assert caught.value.param == "ROLE=N"
    assert parser().parse_args(["restart"]).roles == []
