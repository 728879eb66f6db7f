"""Responses that are kept: documents in a real JetStream, chains behind the death of every process, background."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from motet_gateway.http.problems import NotFound
from motet_gateway.service import Gateway
from motet_gateway.storage.documents import NEVER, SMALL, JetStreamDocuments
from motet_gateway.storage.jetstream import connect
from motet_shared.errors import Unavailable
from motet_shared.messages import TargetText, Text
from motet_shared.testing import NATS_CONF, NatsServer, free_port
from support.clients.responses_client import WEATHER, kinds
from support.running.fork_server import ForkServer
from support.services.fake_services import MODEL, FakeTokenizer, fake_services, tool_call, words
from support.stages.served_gateway import Served, served_gateway
from support.stages.tenants_stage import ACME, OTHER, document

LONG = " ".join(f"w{number}" for number in range(60))
PAGE = Path(__file__).parents[3] / "docs/responses.md"


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(store=tmp_path / "jetstream") as server:
        yield server


@asynccontextmanager
async def documents(nats: NatsServer, ttl: float = 60.0) -> AsyncIterator[JetStreamDocuments]:
    bus = await nats.bus("gateway")
    try:
        client = await connect(bus)
        assert client is not None
        yield JetStreamDocuments(client, "motet_responses", ttl)
    finally:
        await bus.close()


@asynccontextmanager
async def model(nats: NatsServer) -> AsyncIterator[FakeTokenizer]:
    """A tokenizer that says what a test wants, behind the real NATS."""
    buses = await nats.bus("tokenizer"), await nats.bus("decode")
    async with fake_services(*buses) as tokenizer:
        yield tokenizer
    for bus in buses:
        await bus.close()


@asynccontextmanager
async def served(
    nats: NatsServer, **settings: Any
) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    async with served_gateway(nats, **settings) as gateway, Served(gateway).client() as client:
        await gateway.bus.directory.wait_for(lambda d: d.ready("tokenizer"), 10)
        yield gateway, client


# ----------------------------------------------------------------------------------------------------------- documents
async def test_documents_of_any_size(nats: NatsServer) -> None:
    small, large = b"small", os.urandom(SMALL * 5)
    async with documents(nats) as kept:
        assert await kept.used("acme") == 0
        for owner in ("", "acme"):
            for name, data in (("a", small), ("b.input", large)):
                await kept.put(owner, name, data + owner.encode())
        for owner in ("", "acme"):
            assert await kept.get(owner, "a") == small + owner.encode()
            assert await kept.get(owner, "b.input") == large + owner.encode()
        await asyncio.sleep(1.1)  # READ_EVERY
        assert len(large) < await kept.used("acme") < len(large) * 1.1
        for owner, name in (("acme", "c"), ("other", "a"), ("acme", "no key")):
            with pytest.raises(NotFound):
                await kept.get(owner, name)
            await kept.delete(owner, name)
        await kept.delete("acme", "b.input")
        with pytest.raises(NotFound):
            await kept.get("acme", "b.input")
        assert await kept.used("acme") < 10_000
        await kept.delete_all("acme")
        with pytest.raises(NotFound):
            await kept.get("acme", "a")
        assert await kept.get("", "a") == small
    await nats.kill()
    await nats.start()
    async with documents(nats) as kept:
        assert await kept.get("", "b.input") == large


async def test_a_document_that_vanishes_while_it_is_read(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record was read before its chunks expired: the read ends, and leaves no subscription."""
    monkeypatch.setattr("motet_gateway.storage.jetstream.TIMEOUT", 0.5)
    async with documents(nats) as kept:
        await kept.put("acme", "a", os.urandom(SMALL * 5))
        before = len(kept._js._nc._subs)
        bucket = kept._bucket("acme")
        await kept._js.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.C.>")
        with pytest.raises(Unavailable):
            await asyncio.wait_for(kept.get("acme", "a"), 10)
        assert len(kept._js._nc._subs) == before


async def test_documents_expire(nats: NatsServer) -> None:
    async with documents(nats, ttl=1.0) as kept:
        await kept.put("acme", "a", b"x")
        assert await kept.get("acme", "a") == b"x"
        await asyncio.sleep(1.6)
        with pytest.raises(NotFound):
            await kept.get("acme", "a")


async def test_documents_stay_without_a_ttl(nats: NatsServer) -> None:
    async with documents(nats, ttl=NEVER) as kept:
        for name, data in (("a", b"small"), ("b", bytes(SMALL + 1))):
            await kept.put("acme", name, data)
            assert await kept.get("acme", name) == data
        for stream in ("KV_motet_responses_acme", "OBJ_motet_responses_acme"):
            info = await kept._js.stream_info(stream)
            assert not info.config.max_age


async def test_a_server_that_does_not_answer_is_named_and_comes_back(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_gateway.storage.documents.TIMEOUT", 0.3)
    async with documents(nats) as kept:
        await kept.put("acme", "a", b"x")
        await nats.kill()
        for asked in (kept.get("acme", "a"), kept.put("acme", "a", b"y"), kept.used("acme")):
            with pytest.raises(Unavailable):
                await asked
        await nats.start()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(Unavailable):
                    assert await kept.get("acme", "a") in (b"x", b"y")
                    break


async def test_nats_encrypts_what_is_kept(tmp_path: Path) -> None:
    """With the configuration of docs/responses.md."""
    config = tmp_path / "nats-encrypted.conf"
    (tmp_path / "nats.conf").write_text(NATS_CONF.read_text())
    (written,) = re.findall(r"```text\n(include .*?)```", PAGE.read_text(), re.DOTALL)
    config.write_text(written)
    secret = b"the password is swordfish"
    for key, found in (("a-key-of-32-characters-or-so-12345", False), ("", True)):
        store = tmp_path / f"store{found}"
        conf, env = (NATS_CONF, {}) if found else (config, {"STORE_KEY": key})
        async with NatsServer(conf, store, env=env) as server, documents(server) as kept:
            await kept.put("acme", "a", secret)
            await kept.put("acme", "b", secret * 20_000)
            assert await kept.get("acme", "a") == secret
        data = [path.read_bytes() for path in store.rglob("*") if path.is_file()]
        assert any(secret in one for one in data) == found


# -------------------------------------------------------------------------------------------------------------- chains
def client_of(port: int) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=http
    )


async def serves(client: openai.AsyncOpenAI) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(openai.APIError):
                if MODEL in [one.id for one in (await client.models.list()).data]:
                    return
            await asyncio.sleep(0.1)


@pytest.mark.timeout(180)
async def test_a_chain_with_tool_calls_goes_on_behind_the_death_of_every_process(
    nats: NatsServer,
) -> None:
    """The gateway and NATS are killed between a call and its output, and again behind the answer."""
    port = free_port()
    function: Any = {**WEATHER, "strict": False}
    async with ForkServer("motet_gateway.service") as forks, client_of(port) as client:
        async with model(nats) as tokenizer:
            gateway = await forks.start(nats, "motet_gateway", "--port", str(port))
            await serves(client)
            tokenizer.reply = lambda request: [tool_call('{"place": "Oslo"}', "weather")]
            asked = await client.responses.create(
                model=MODEL, input="Weather in Oslo?", tools=[function]
            )
        os.kill(gateway, signal.SIGKILL)
        await nats.kill()
        await nats.start()
        async with model(nats) as tokenizer:
            gateway = await forks.start(nats, "motet_gateway", "--port", str(port))
            await serves(client)
            tokenizer.reply = lambda request: words("It rains.")
            (call,) = asked.output
            assert call.type == "function_call"
            answer: Any = {
                "type": "function_call_output",
                "output": "rain",
                "call_id": call.call_id,
            }
            async with client.responses.stream(
                model=MODEL,
                input=[answer],
                previous_response_id=asked.id,
                tools=[function],
            ) as stream:
                told = await stream.get_final_response()
            assert told.output_text == "It rains."
            os.kill(gateway, signal.SIGKILL)
            gateway = await forks.start(nats, "motet_gateway", "--port", str(port))
            await serves(client)
            tokenizer.reply = lambda request: words("Because.")
            why = await client.responses.create(
                model=MODEL, input="Why?", previous_response_id=told.id
            )
            assert why.output_text == "Because."
            roles = [message["role"] for message in tokenizer.requests[-1].messages]
            assert roles == ["user", "assistant", "tool", "assistant", "user"]
            assert (await client.responses.retrieve(told.id)).output_text == "It rains."


async def test_tenants_have_stores_of_their_own(nats: NatsServer, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(document("stored_bytes = 40000"))
    async with model(nats), served(nats, tenants_file=file) as (gateway, _):
        acme, other = (Served(gateway).client(key) for key in (ACME, OTHER))
        async with acme, other:
            given = "x" * 8000
            first = await acme.responses.create(model=MODEL, input=given)
            with pytest.raises(openai.NotFoundError) as missing:
                await other.responses.retrieve(first.id)
            assert missing.value.code == "not_found"
            with pytest.raises(openai.NotFoundError) as missing:
                await other.responses.create(model=MODEL, input="x", previous_response_id=first.id)
            assert missing.value.code == "previous_response_not_found"
            await acme.responses.create(model=MODEL, input=given)
            with pytest.raises(openai.RateLimitError) as refusal:
                await acme.responses.create(model=MODEL, input=given)
            assert (refusal.value.code, refusal.value.param) == ("insufficient_quota", "store")
            await other.responses.create(model=MODEL, input=given)
            await acme.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await acme.responses.retrieve(first.id)
            await acme.delete("/responses", cast_to=object)
            await asyncio.sleep(1.1)  # READ_EVERY
            await acme.responses.create(model=MODEL, input=given)


# ---------------------------------------------------------------------------------------------------------- background
async def over(client: openai.AsyncOpenAI, name: str, seconds: float = 60) -> Any:
    async with asyncio.timeout(seconds):
        while True:
            found = await client.responses.retrieve(name)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.05)


async def test_a_response_in_the_background(nats: NatsServer) -> None:
    async with model(nats) as tokenizer, served(nats) as (_, client):
        tokenizer.pace = 0.02
        asked = await client.responses.create(model=MODEL, input=LONG, background=True)
        assert (asked.status, asked.background, asked.output) == ("queued", True, [])
        with pytest.raises(openai.BadRequestError) as early:
            await client.responses.create(model=MODEL, input="x", previous_response_id=asked.id)
        assert early.value.param == "previous_response_id"
        done = await over(client, asked.id)
        assert (done.status, done.output_text) == ("completed", f"You said: {LONG}")
        assert done.usage is not None
        assert done.usage.output_tokens == 62
        with pytest.raises(openai.BadRequestError) as unstreamed:
            await client.responses.retrieve(asked.id, stream=True)
        assert unstreamed.value.param == "stream"
        after = await client.responses.create(
            model=MODEL, input="go on", previous_response_id=asked.id
        )
        assert after.output_text == "You said: go on"


async def test_responses_in_the_background_that_others_wait_behind(nats: NatsServer) -> None:
    """Keys of numbers, a model behind targets, a predecessor that is deleted, a record of no known form."""

    def of_a_target(request: Any) -> list[Text]:
        first, *more = words("You said: x")
        return [TargetText(**msgspec.structs.asdict(first), target="vllm"), *more]

    async with model(nats) as tokenizer, served(nats, background_responses=1) as (gateway, client):
        before = await client.responses.create(model=MODEL, input="a")
        tokenizer.pace = 0.05
        fields: Any = {"model": MODEL, "background": True}
        first = await client.responses.create(
            input=LONG, extra_body={"logit_bias": {"50": -100}}, **fields
        )
        orphan = await client.responses.create(input="b", previous_response_id=before.id, **fields)
        await client.responses.delete(before.id)
        broken = await client.responses.create(input="c", **fields)
        stored = gateway.service.responses if gateway.service is not None else None
        assert stored is not None
        record = await stored.get("", broken.id)
        await stored.save("", msgspec.structs.replace(record, body={"top_p": "x"}))
        assert (await over(client, first.id)).status == "completed"
        failed = await over(client, orphan.id)
        assert failed.error is not None
        assert failed.status == "failed"
        assert (await over(client, broken.id)).status == "failed"
        tokenizer.reply = of_a_target
        whole = await client.responses.create(input="x", **fields)
        assert (await over(client, whole.id)).output_text == "You said: x"
        stream = await client.responses.create(input="x", stream=True, **fields)
        assert [event.type async for event in stream][-1] == "response.completed"


async def test_a_response_in_the_background_is_cancelled(nats: NatsServer) -> None:
    async with model(nats) as tokenizer, served(nats, background_responses=1) as (gateway, client):
        tokenizer.pace = 0.05
        runs, waits = [
            await client.responses.create(model=MODEL, input=LONG, background=True)
            for _ in range(2)
        ]
        async with asyncio.timeout(20):
            while tokenizer.sent < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for asked in (runs, waits):
            assert (await client.responses.cancel(asked.id)).status == "cancelled"
        async with asyncio.timeout(10):
            while not tokenizer.cancelled:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        tokenizer.pace = 0.0
        last = await client.responses.create(model=MODEL, input="short", background=True)
        assert (await over(client, last.id)).status == "completed"
        ended = await client.responses.retrieve(runs.id)
        assert ended.status == "cancelled"
        assert ended.output_text.startswith("You said: w0"), "as far as it came"
        assert (await client.responses.retrieve(waits.id)).output == []
        assert len(tokenizer.requests) == 2, "the one that waited was never begun"
        # What is over stays as it is; what is deleted while it runs does not come back.
        assert (await client.responses.cancel(last.id)).status == "completed"
        tokenizer.pace = 0.05
        deleted = await client.responses.create(model=MODEL, input=LONG, background=True)
        async with asyncio.timeout(20):
            while len(tokenizer.requests) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.responses.delete(deleted.id)
        async with asyncio.timeout(10):
            while tokenizer.cancelled < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(deleted.id)
        stored = gateway.service.responses if gateway.service is not None else None
        assert stored is not None
        assert await stored.documents.names("", f"{deleted.id}.log") == []


async def test_events_of_the_background_are_followed_from_anywhere(nats: NatsServer) -> None:
    async with model(nats) as tokenizer, served(nats) as (_, client):
        tokenizer.pace = 0.02
        events: list[Any] = []
        stream = await client.responses.create(
            model=MODEL, input=LONG, background=True, stream=True
        )
        async with stream:
            async for event in stream:
                events.append(event.to_dict())
                if event.type == "response.output_text.delta" and len(events) > 20:
                    break  # this client leaves; the response goes on
        name = events[0]["response"]["id"]
        rest = await client.responses.retrieve(
            name, stream=True, starting_after=events[-1]["sequence_number"]
        )
        events += [event.to_dict() async for event in rest]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert kinds(events)[:3] == ["created", "queued", "in_progress"]
        assert kinds(events)[-1] == "completed"
        text = "".join(event.get("delta", "") for event in events)
        assert text == events[-1]["response"]["output"][0]["content"][0]["text"]
        again = [
            event.to_dict() async for event in await client.responses.retrieve(name, stream=True)
        ]
        assert again == events


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_a_response_in_the_background_survives_its_gateway(nats: NatsServer) -> None:
    """It goes on at another gateway, behind the last token that was stored; its events are the same."""
    first, second = free_port(), free_port()
    flags = ("--job-patience", "1")
    async with (
        model(nats) as tokenizer,
        ForkServer("motet_gateway.service") as forks,
        client_of(first) as one,
        client_of(second) as other,
    ):
        tokenizer.pace = 0.05
        gateway = await forks.start(nats, "motet_gateway", "--port", str(first), *flags)
        await serves(one)
        events: list[Any] = []
        stream = await one.responses.create(model=MODEL, input=LONG, background=True, stream=True)
        with contextlib.suppress(openai.APIError):
            async for event in stream:
                events.append(event.to_dict())
                if len(events) == 15:
                    os.kill(gateway, signal.SIGKILL)
        assert len(events) >= 15
        assert kinds(events)[-1] != "completed"
        await forks.start(nats, "motet_gateway", "--port", str(second), *flags)
        await serves(other)
        name = events[0]["response"]["id"]
        rest = await other.responses.retrieve(
            name, stream=True, starting_after=events[-1]["sequence_number"]
        )
        events += [event.to_dict() async for event in rest]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        text = "".join(event.get("delta", "") for event in events)
        assert text == f"You said: {LONG}"
        ended = await other.responses.retrieve(name)
        assert (ended.status, ended.output_text) == ("completed", text)
        resumed = tokenizer.requests[-1].resume
        assert resumed is not None, "what was stored is not computed again"
        assert len(resumed.ids) > 5
