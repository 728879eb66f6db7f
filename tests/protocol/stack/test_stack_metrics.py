"""/metrics/stack and /metrics/replies of a gateway, and the commands that show them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from motet_cli.main import main
from motet_shared.errors import InternalError
from motet_shared.testing import NatsServer, running
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer
from support.stages.served_gateway import KEY, Served, served_gateway


@pytest.fixture
async def stack() -> AsyncIterator[tuple[Served, FakeTokenizer]]:
    async with NatsServer() as nats:
        tokenizer, decode = (
            FakeTokenizer(None, await nats.bus("tokenizer")),
            FakeDecode(None, await nats.bus("decode")),
        )
        async with running(tokenizer), running(decode), served_gateway(nats) as gateway:
            await gateway.bus.directory.wait_for(
                lambda d: d.ready("tokenizer") and d.ready("decode"), 5
            )
            yield Served(gateway), tokenizer


async def ask(served: Served, request: str) -> None:
    async with served.client() as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "a b c"}],
            extra_headers={"x-request-id": request},
        )


async def test_instances_and_replies_are_told(stack: tuple[Served, FakeTokenizer]) -> None:
    served, tokenizer = stack
    await ask(served, "first-one")
    tokenizer.error = InternalError("broken on purpose")
    with pytest.raises(openai.InternalServerError):
        await ask(served, "second-one")
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as http:
        assert (await http.get("/metrics/stack")).status_code == 401
        http.headers["authorization"] = f"Bearer {KEY}"
        told = (await http.get("/metrics/stack")).json()
        wrong = await http.get("/metrics/stack?window=0")
        replies = (await http.get("/metrics/replies")).json()["replies"]
        one = (await http.get("/metrics/replies?request=first-one")).json()["replies"]
    assert {(i["role"], i["state"]) for i in told["instances"]} == {
        (role, "ready") for role in ("decode", "gateway", "tokenizer")
    }
    assert (told["replies"]["replies"], told["replies"]["failed"], told["replies"]["good"]) == (
        2,
        1,
        0.5,
    )
    assert told["replies"]["first_token_seconds"]["p50"] > 0
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "window"
    assert [(r["request"], r["status"]) for r in replies] == [
        ("second-one", "failed"),
        ("first-one", "stop"),
    ]
    assert [r["tokens"] for r in one] == [5]
    assert one[0]["timing"]["decode.prefill"] == 0.002


async def test_the_commands_show_them(
    stack: tuple[Served, FakeTokenizer], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    served, _ = stack
    key = tmp_path / "key"
    key.write_text(KEY)
    await ask(served, "the-one")

    async def shown(*words: str) -> str:
        command = [words[0], "--url", served.url, "--api-key-file", str(key), *words[1:]]
        assert await asyncio.to_thread(main, command) == 0
        return capsys.readouterr().out

    assert "tokenizer" in await shown("top", "--once", "--every", "0.1")
    document = json.loads(await shown("top", "--once", "--json", "--every", "0.1", "--price", "2"))
    assert document["replies"]["replies"] == 1
    assert document["cost_per_million_tokens"] > 0
    waterfall = await shown("trace", "the-one")
    assert "the-one" in waterfall
    assert "tokenizer.encode" in waterfall
    assert (
        await asyncio.to_thread(
            main, ["trace", "--url", served.url, "--api-key-file", str(key), "another"]
        )
        == 1
    )
    assert "REQUEST: 'another'" in capsys.readouterr().err
