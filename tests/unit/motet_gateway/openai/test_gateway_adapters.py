"""Adapters that are loaded and unloaded over HTTP: the folder, the answers and the refusals.

A fake decode worker announces what is in the folder, as a real one does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from motet_gateway.operations import adapters
from motet_shared.messages import ModelCard
from motet_shared.testing import memory_buses, settle
from support.clients.gateway_client import Http, World, world
from support.services.fake_services import MODEL, FakeDecode

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class WatchingDecode(FakeDecode):
    """Announce the model, and each entry of a folder as an adapter; `bad` ones with a problem."""

    folder: Path

    def models(self) -> list[ModelCard]:
        names = sorted(unquote(path.name) for path in self.folder.iterdir())
        cards = [
            ModelCard(name=name, context=4096, parent=MODEL, problem="rank 64" * ("bad" in name))
            for name in names
        ]
        return [*super().models(), *cards]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[World]:
    folder.mkdir()  # noqa: ASYNC240  # a test's own folder
    async with (
        world(adapter_folder=folder) as here,
        memory_buses("decode", hub=here.hub) as (bus,),
    ):
        decode = WatchingDecode(None, bus)
        decode.folder = folder
        await decode.start()
        await here.buses[2].close()  # the fake one that watches nothing
        await settle()
        yield here


def adapter(path: Path) -> str:
    path.mkdir()
    for name in adapters.FILES:
        (path / name).write_bytes(b"{}")
    return str(path)


async def send(here: World, path: str, **body: Any) -> Http:
    return await Http(here.app, path, json.dumps(body).encode()).done()


async def names(here: World) -> set[str]:
    reply = await here.get("/v1/models").done()
    return {model["id"] for model in reply.json()["data"]}


@pytest.mark.parametrize("name", ["team/polite ä", ".."])
async def test_an_adapter_is_loaded_replaced_and_unloaded(tmp_path: Path, name: str) -> None:
    first, second = adapter(tmp_path / "first"), adapter(tmp_path / "second")
    async with serving(tmp_path / "served") as here:
        reply = await send(here, LOAD, lora_name=name, lora_path=first)
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/plain")
        assert await names(here) == {MODEL, name}
        (entry,) = (tmp_path / "served").iterdir()
        assert str(entry.resolve()) == first
        reply = await send(here, LOAD, lora_name=name, lora_path=second)
        assert (reply.status, reply.json()["error"]["param"]) == (400, "lora_name")
        reply = await send(here, LOAD, lora_name=name, lora_path=second, load_inplace=True)
        assert reply.status == 200
        assert str(entry.resolve()) == second
        assert (await send(here, UNLOAD, lora_name=name, lora_int_id=1)).status == 200
        assert await names(here) == {MODEL}
        reply = await send(here, UNLOAD, lora_name=name)
        assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")


async def test_refusals_name_their_field_and_leave_no_link(tmp_path: Path) -> None:
    good = adapter(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    refused: list[tuple[int, str, dict[str, Any]]] = [
        (400, "lora_name", {"lora_name": MODEL, "lora_path": good}),
        (400, "lora_name", {"lora_name": "", "lora_path": good}),
        (400, "lora_name", {"lora_name": "ä" * 150, "lora_path": good}),
        (400, "lora_name", {"lora_name": "a\n", "lora_path": good}),
        (400, "lora_path", {"lora_name": "new", "lora_path": "good"}),
        (400, "lora_path", {"lora_name": "new", "lora_path": good + "\x00"}),
        (404, "lora_path", {"lora_name": "new", "lora_path": str(tmp_path / "none")}),
        (400, "lora_path", {"lora_name": "new", "lora_path": str(tmp_path / "empty")}),
        (400, "lora_path", {"lora_name": "bad", "lora_path": good}),  # no worker can use it
        (400, "more", {"lora_name": "new", "lora_path": good, "more": 1}),
    ]
    async with serving(tmp_path / "served") as here:
        for status, param, body in refused:
            reply = await send(here, LOAD, **body)
            assert (reply.status, reply.json()["error"]["param"]) == (status, param), body
            assert not list((tmp_path / "served").iterdir())
        adapter(tmp_path / "served" / "own")  # a folder, which the user put there
        reply = await send(here, UNLOAD, lora_name="own")
        assert (reply.status, reply.json()["error"]["param"]) == (400, "lora_name")


async def test_two_loads_of_one_name_leave_one(tmp_path: Path) -> None:
    paths = [adapter(tmp_path / name) for name in ("first", "second")]
    async with serving(tmp_path / "served") as here:
        replies = await asyncio.gather(
            *(send(here, LOAD, lora_name="polite", lora_path=path) for path in paths)
        )
        assert sorted(reply.status for reply in replies) == [200, 400]
        loaded = next(
            path for path, reply in zip(paths, replies, strict=True) if reply.status == 200
        )
        assert str((tmp_path / "served" / "polite").resolve()) == loaded


async def test_workers_that_do_not_watch_the_folder_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "TIMEOUT", 0.2)
    async with world(adapter_folder=tmp_path) as here:
        reply = await send(here, LOAD, lora_name="new", lora_path=adapter(tmp_path / "x"))
        assert (reply.status, reply.json()["error"]["code"]) == (503, "unavailable")
        assert not (tmp_path / "new").is_symlink()


async def test_without_a_folder_it_is_not_there(tmp_path: Path) -> None:
    async with world() as here:
        for path, body in (
            (LOAD, {"lora_name": "a", "lora_path": "/"}),
            (UNLOAD, {"lora_name": "a"}),
        ):
            reply = await send(here, path, **body)
            assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")
