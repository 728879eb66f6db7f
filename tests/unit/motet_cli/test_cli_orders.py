"""Orders to a running stack: what is said over the socket, and who is refused."""

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
from motet_cli.supervision.orders import Order, Restart, Scale, Tell
from motet_shared.errors import ConfigError, MotetError, Unavailable

URL = "http://127.0.0.1:8123"


class Desk:
    """Carries out an order when it may, and says so."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, order: Order, tell: Tell) -> None:
        self.orders.append(order)
        tell("one")
        await self.go_on.wait()
        if isinstance(order, Restart) and "nobody" in order.roles:
            raise ConfigError("ROLE: 'nobody' is none")
        tell("two")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "motet").mkdir(mode=0o700)
    return tmp_path / "motet"


@asynccontextmanager
async def listening() -> AsyncIterator[Desk]:
    desk = Desk()
    async with orders.taken(orders.path_of(8123), desk):
        yield desk


def give(order: Order) -> list[str]:
    return list(orders.give(URL, order))


async def test_an_order_is_carried_out_and_told_of(runtime: Path) -> None:
    async with listening() as desk:
        for order in (Restart(["decode"], 3.0), Scale({"decode": 2}, 3.0)):
            assert await asyncio.to_thread(give, order) == ["one", "two"]
        assert desk.orders == [Restart(["decode"], 3.0), Scale({"decode": 2}, 3.0)]
    assert not os.listdir(runtime)


async def test_what_is_wrong_is_raised_where_it_was_asked() -> None:
    async with listening():
        with pytest.raises(ConfigError, match="'nobody' is none"):
            await asyncio.to_thread(give, Restart(["nobody"], 3.0))
        assert await asyncio.to_thread(give, Restart([], 3.0)) == ["one", "two"]


async def test_one_at_a_time() -> None:
    async with listening() as desk:
        desk.go_on.clear()
        first = asyncio.create_task(asyncio.to_thread(give, Restart([], 3.0)))
        async with asyncio.timeout(20):
            while not desk.orders:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="another order"):
            await asyncio.to_thread(give, Restart([], 3.0))
        desk.go_on.set()
        assert await first == ["one", "two"]


async def test_nonsense_is_refused() -> None:
    async with listening() as desk:
        reader, writer = await asyncio.open_unix_connection(str(orders.path_of(8123)))
        writer.write(b'{"type": "destroy"}\n')
        assert json.loads(await reader.readline())["type"] == "failed"
        writer.close()
        assert not desk.orders


async def test_a_stack_that_ends_meanwhile_is_said() -> None:
    async with listening() as desk:
        desk.go_on.clear()
        asking = asyncio.create_task(asyncio.to_thread(give, Restart([], 3.0)))
        async with asyncio.timeout(20):
            while not desk.orders:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    with pytest.raises(MotetError):
        await asking


@pytest.mark.parametrize("url", [URL, "http://192.0.2.1:8123"])
def test_nobody_listens(url: str) -> None:
    with pytest.raises(ConfigError, match="no `motet up` of this user serves"):
        list(orders.give(url, Restart([], 3.0)))


def test_what_is_no_address_is_said() -> None:
    with pytest.raises(ConfigError, match="is no address"):
        list(orders.give("ftp://x", Restart([], 3.0)))


def test_the_command_line() -> None:
    args = parser().parse_args(["scale", "decode=3", "tts=2", "--drain", "5"])
    assert (scale.counts(args.counts), args.drain) == ({"decode": 3, "tts": 2}, 5.0)
    for word in ("decode", "decode=x", "=3", "decode=-1"):
        with pytest.raises(ConfigError, match="such as decode=3"):
            scale.counts([word])
    assert parser().parse_args(["restart"]).roles == []
