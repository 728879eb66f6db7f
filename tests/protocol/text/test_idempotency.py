"""Requests with an `Idempotency-Key`: two gateways that share only NATS, official clients, real JetStream.

A proxy stands between the client and the gateways, as a balancer does between hosts: it can drop
connections and send new ones to the other gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from motet_gateway.context import GatewayContext
from motet_gateway.idempotency import run
from motet_gateway.service import Gateway
from motet_shared.messages import Text
from motet_shared.testing import NatsServer, free_port, running
from support.running.fork_server import ForkServer
from support.running.node import node
from support.running.until import until
from support.services.fake_services import MODEL, FakeTokenizer, fake_services
from support.services.voice_services import VOICE, ScriptedTts
from support.stages.served_gateway import KEY, served_gateway
from support.stages.tenants_stage import ACME, OTHER, document

ROOT = Path(__file__).resolve().parents[3]
OPENAI_NODE = "6.49.0"
WORDS = 60
ASKED: Any = [{"role": "user", "content": "Tell me."}]


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(store=tmp_path / "jetstream") as server:
        yield server


@pytest.fixture
async def tokenizer(nats: NatsServer) -> AsyncIterator[FakeTokenizer]:
    """A tokenizer whose text follows from the seed, and which cuts it differently each time."""
    buses = await nats.bus("tokenizer"), await nats.bus("decode")
    async with fake_services(*buses) as tokenizer:
        cuts = random.Random(7)

        def reply(request: Any) -> list[Text]:
            said = random.Random(request.sampling.seed)
            text = " ".join(f"w{said.randrange(1000)}" for _ in range(WORDS))
            items, token = [], 0
            while text:
                size = cuts.randint(1, 9)
                items.append(Text(text[:size], [token]))
                text, token = text[size:], token + 1
            return items

        tokenizer.reply = reply
        yield tokenizer
    for bus in buses:
        await bus.close()


@asynccontextmanager
async def gateways(nats: NatsServer, **settings: Any) -> AsyncIterator[tuple[Gateway, Gateway]]:
    async with served_gateway(nats, **settings) as one, served_gateway(nats, **settings) as other:
        for gateway in (one, other):
            await gateway.bus.directory.wait_for(lambda d: d.ready("tokenizer"), 10)
        yield one, other


class Proxy:
    """Forward connections to `port`; `switch` drops all and forwards new ones elsewhere."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.close()
            return
        both = {writer, upstream[1]}
        self._writers |= both
        try:
            await asyncio.gather(copy(reader, upstream[1]), copy(upstream[0], writer))
        finally:
            self._writers -= both
            for one in both:
                one.close()

    def switch(self, port: int) -> None:
        self.port = port
        for writer in self._writers:
            writer.transport.abort()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def proxied(port: int, **client: Any) -> AsyncIterator[tuple[Proxy, openai.AsyncOpenAI]]:
    """Run a proxy and OpenAI's client behind it."""
    proxy = Proxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, http_client=http, **client) as made:
        try:
            yield proxy, made
        finally:
            proxy.switch(port)
            server.close()


def keyed(key: str, last: str = "") -> dict[str, str]:
    return {"Idempotency-Key": key} | ({"Last-Event-ID": last} if last else {})


def text_of(seed: int) -> str:
    said = random.Random(seed)
    return " ".join(f"w{said.randrange(1000)}" for _ in range(WORDS))


def context(gateway: Gateway) -> GatewayContext:
    assert gateway.service is not None
    return gateway.service


def tokens(*gateways: Gateway, tenant: str = "default") -> float:
    """Return the tokens that all gateways have charged."""
    counters = [context(one).metrics.tenants.tokens.labels(tenant) for one in gateways]
    return sum(counter._value.get() for counter in counters)


async def charged(count: float, *gateways: Gateway) -> None:
    """Wait until the gateways have charged so many tokens, and see that it stays so."""
    async with asyncio.timeout(10):
        while tokens(*gateways) != count:  # noqa: ASYNC110 - nothing reports a change
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.5)
    assert tokens(*gateways) == count


# ---------------------------------------------------------------------------------------- between gateways
async def test_openai_gets_one_whole_reply_through_a_switch(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    """OpenAI's client sends a request again, under the same key, when its connection breaks."""
    tokenizer.pace = 0.02
    async with gateways(nats) as (one, other), proxied(one.port, max_retries=2) as (proxy, client):
        asked = asyncio.create_task(
            client.chat.completions.create(
                model=MODEL, messages=ASKED, extra_headers=keyed("first")
            )
        )
        while tokenizer.sent < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        proxy.switch(other.port)
        reply = await asked
        assert len(tokenizer.requests) == 2
        first, second = tokenizer.requests
        assert first.sampling.seed == second.sampling.seed
        assert reply.choices[0].message.content == text_of(first.sampling.seed)
        assert reply.usage is not None
        await charged(reply.usage.total_tokens, one, other)


async def with_openai_for_node(folder: Path, port: int) -> asyncio.subprocess.Process:
    """Install OpenAI's package for Node.js in `folder`, and start a chat of it."""
    script = folder / "openai_chat.mjs"
    script.write_bytes((ROOT / "tests/support/javascript/openai_chat.mjs").read_bytes())
    install = ("npm", "install", "--no-audit", "--no-fund", f"openai@{OPENAI_NODE}")
    installing = await asyncio.create_subprocess_exec(*install, cwd=folder)
    assert await asyncio.wait_for(installing.wait(), 200) == 0
    url, pipe = f"http://127.0.0.1:{port}/v1", asyncio.subprocess.PIPE
    argv = (node(), str(script), url, KEY, MODEL)
    return await asyncio.create_subprocess_exec(*argv, cwd=folder, stdout=pipe)


@pytest.mark.extended("conformance")
async def test_openai_for_node_gets_one_whole_reply_through_a_switch(
    nats: NatsServer, tokenizer: FakeTokenizer, tmp_path: Path
) -> None:
    tokenizer.pace = 0.02
    async with gateways(nats) as (one, other), proxied(one.port) as (proxy, client):
        asking = await with_openai_for_node(tmp_path, client.base_url.port or 0)
        await until(lambda: tokenizer.sent >= 10)
        proxy.switch(other.port)
        told, _ = await asyncio.wait_for(asking.communicate(), 60)
        reply = json.loads(told)
        first, second = tokenizer.requests
        assert first.sampling.seed == second.sampling.seed
        assert reply["text"] == text_of(first.sampling.seed)
        await charged(reply["tokens"], one, other)


async def test_a_response_is_whole_through_a_switch_and_stored_once(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    tokenizer.pace = 0.02
    async with gateways(nats) as (one, other), proxied(one.port, max_retries=2) as (proxy, client):
        asked = asyncio.create_task(
            client.responses.create(model=MODEL, input="Tell me.", extra_headers=keyed("response"))
        )
        await until(lambda: tokenizer.sent >= 10)
        proxy.switch(other.port)
        reply = await asked
        first, second = tokenizer.requests
        assert first.sampling.seed == second.sampling.seed
        assert reply.output_text == text_of(first.sampling.seed)
        assert (await client.responses.retrieve(reply.id)).output_text == reply.output_text
        assert reply.usage is not None
        await charged(reply.usage.total_tokens, one, other)


async def test_a_response_in_the_background_is_queued_once(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    async with gateways(nats) as (one, other), proxied(one.port) as (proxy, client):
        ids = set()
        for port in (one.port, other.port):
            proxy.switch(port)
            made = await client.responses.create(
                model=MODEL, input="Tell me.", background=True, extra_headers=keyed("queued")
            )
            ids.add(made.id)
        (name,) = ids
        async with asyncio.timeout(20):
            while (found := await client.responses.retrieve(name)).status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert len(tokenizer.requests) == 1
        assert found.output_text == text_of(tokenizer.requests[0].sampling.seed)


async def test_the_events_of_a_response_are_given_again(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    async with gateways(nats) as (one, other), proxied(one.port) as (proxy, client):
        told = []
        for port in (one.port, other.port):
            proxy.switch(port)
            stream = await client.responses.create(
                model=MODEL, input="Tell me.", stream=True, extra_headers=keyed("events")
            )
            told.append([event.model_dump() async for event in stream])
        assert told[0] == told[1]
        assert told[0][-1]["type"] == "response.completed"
        assert len(tokenizer.requests) == 1


async def test_a_stream_is_whole_after_it_is_asked_for_again(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    tokenizer.pace = 0.01
    async with gateways(nats) as (one, other), proxied(one.port, max_retries=0) as (proxy, client):
        texts: list[str] = []
        names = set()
        while True:
            text, count = "", 0
            with contextlib.suppress(openai.APIConnectionError, httpx.HTTPError):
                async for chunk in await client.chat.completions.create(
                    model=MODEL, messages=ASKED, stream=True, extra_headers=keyed("again")
                ):
                    names.add((chunk.id, chunk.created))
                    text += chunk.choices[0].delta.content or ""
                    count += 1
                    if count == 20 and not texts:
                        proxy.switch(other.port)
                texts.append(text)
                if len(text) == len(text_of(tokenizer.requests[0].sampling.seed)):
                    break
            texts.append(text)
        assert len(names) == 1, "each attempt has the same id and time"
        assert texts[-1] == text_of(tokenizer.requests[0].sampling.seed)
        assert texts[0] != texts[-1]
        assert texts[-1].startswith(texts[0])


class Stream:
    """What a client of server-sent events has of a stream, over all its connections."""

    def __init__(self) -> None:
        self.text, self.last, self.names, self.is_done = "", "", set[str](), False
        self.events = self.total_tokens = 0

    async def read(self, lines: AsyncIterator[str], most: int = 10**9) -> None:
        """Read events until the end or until there are `most`; a client remembers the last id."""
        name = ""
        async for line in lines:
            if line.startswith("id: "):
                name = line[4:]
            if not line.startswith("data: "):
                continue
            self.last, self.events = name, self.events + 1
            if line == "data: [DONE]":
                self.is_done = True
            else:
                chunk = json.loads(line[6:])
                self.names.add(chunk["id"])
                self.total_tokens = (chunk.get("usage") or {}).get("total_tokens", 0)
                self.text += "".join(
                    choice["delta"].get("content") or "" for choice in chunk["choices"]
                )
            if self.events >= most:
                return


def post(http: httpx.AsyncClient, port: int, key: str, **more: Any) -> Any:
    body = {"model": MODEL, "messages": ASKED, "stream": True} | more.pop("fields", {})
    headers = {"authorization": f"Bearer {more.pop('bearer', KEY)}"} | keyed(key, **more)
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return http.stream("POST", url, json=body, headers=headers)


async def test_a_stream_goes_on_behind_its_last_event_at_another_gateway(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    """Wherever it breaks, and again from what is stored at its end."""
    async with (
        gateways(nats) as (one, other),
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
    ):
        for most in (1, 2, 5, 17):
            tokenizer.pace = 0.01
            stream, key = Stream(), f"behind-{most}"
            async with post(http, one.port, key) as response:
                await stream.read(response.aiter_lines(), most)
            had = stream.text, stream.last
            async with post(http, other.port, key, last=stream.last) as response:
                await stream.read(response.aiter_lines())
            seed = tokenizer.requests[-1].sampling.seed
            assert (stream.text, stream.is_done) == (text_of(seed), True)
            assert len(stream.names) == 1
            count = len(tokenizer.requests)
            stored = Stream()
            stored.text = had[0]
            async with post(http, one.port, key, last=had[1]) as response:
                assert response.headers["idempotent-replayed"] == "true"
                await stored.read(response.aiter_lines())
            assert (stored.text, stored.is_done) == (text_of(seed), True)
            assert len(tokenizer.requests) == count, "nothing is computed for it"


@pytest.mark.timeout(180)
async def test_a_stream_goes_on_after_its_gateway_was_killed(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    first, second = free_port(), free_port()
    tokenizer.pace = 0.02
    async with (
        ForkServer("motet_gateway.service") as forks,
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
    ):
        gateway = await forks.start(nats, "motet_gateway", "--port", str(first))
        await forks.start(nats, "motet_gateway", "--port", str(second))
        for port in (first, second):
            await serves(http, port)
        stream = Stream()
        async with post(http, first, "killed") as response:
            lines = response.aiter_lines()
            await stream.read(lines, 12)
            os.kill(gateway, signal.SIGKILL)
            with contextlib.suppress(httpx.HTTPError):
                await stream.read(lines)
        assert not stream.is_done
        async with post(http, second, "killed", last=stream.last) as response:
            await stream.read(response.aiter_lines())
        assert (stream.text, stream.is_done) == (
            text_of(tokenizer.requests[-1].sampling.seed),
            True,
        )
        assert len(stream.names) == 1


async def serves(http: httpx.AsyncClient, port: int) -> None:
    async with asyncio.timeout(90):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get(f"http://127.0.0.1:{port}/health/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def test_a_second_attempt_takes_over_from_one_that_still_runs(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    """The first gateway is told to stop, and only the second one charges."""
    tokenizer.pace = 0.05
    async with (
        gateways(nats) as (one, other),
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
    ):
        first, second = Stream(), Stream()
        fields = {"stream_options": {"include_usage": True}}
        async with post(http, one.port, "both", fields=fields) as response:
            lines = response.aiter_lines()
            await first.read(lines, 5)
            async with post(http, other.port, "both", fields=fields) as later:
                await second.read(later.aiter_lines())
            rest = "\n".join([line async for line in lines])
        assert "another request with this Idempotency-Key has taken over" in rest
        assert "[DONE]" not in rest
        request = tokenizer.requests[-1]
        assert second.text == text_of(request.sampling.seed)
        assert tokenizer.cancelled == 1
        assert tokens(one) == 0
        assert tokens(other) == second.total_tokens > 0


async def test_an_attempt_is_charged_if_the_one_that_took_it_over_is_refused(
    nats: NatsServer, tokenizer: FakeTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt has the only stream of its tenant."""
    monkeypatch.setattr(run, "_PERIOD", 0.1)
    monkeypatch.setattr(run, "_GRACE", 0.5)
    path = tmp_path / "tenants.toml"
    path.write_text(document("concurrent_streams = 1"))
    tokenizer.pace = 0.05
    async with (
        gateways(nats, tenants_file=path, request_timeout=3.0) as (one, other),
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
    ):
        stream = Stream()
        async with post(http, one.port, "refused", bearer=ACME) as response:
            lines = response.aiter_lines()
            await stream.read(lines, 5)
            async with post(http, other.port, "refused", bearer=ACME) as later:
                assert later.status_code == 429
            rest = "\n".join([line async for line in lines])
        assert "[DONE]" not in rest
        await until(lambda: tokens(one, tenant="acme") > 0)
        assert tokens(other, tenant="acme") == 0


# ------------------------------------------------------------------------------------------------- stored
async def test_a_reply_is_given_again_and_charged_once(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    async with (
        gateways(nats) as (one, other),
        proxied(one.port, max_retries=3) as (proxy, client),
    ):
        replies = []
        for port in (one.port, other.port, one.port):
            proxy.switch(port)
            made = await client.chat.completions.with_raw_response.create(
                model=MODEL, messages=ASKED, extra_headers=keyed("stored")
            )
            replies.append((made.content, made.headers.get("idempotent-replayed")))
        assert len({body for body, _ in replies}) == 1
        assert [replayed for _, replayed in replies] == [None, "true", "true"]
        assert len(tokenizer.requests) == 1
        total = json.loads(replies[0][0])["usage"]["total_tokens"]
        await charged(total, one, other)
        other_one = await client.chat.completions.create(
            model=MODEL, messages=ASKED, extra_headers=keyed("another")
        )
        assert other_one.id not in replies[0][0].decode()


async def test_a_sound_is_given_again_and_spoken_once(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    bus = await nats.bus("tts")
    async with (
        running(ScriptedTts(bus)) as voice,
        gateways(nats) as (one, other),
        proxied(one.port) as (proxy, client),
    ):
        for gateway in (one, other):
            await gateway.bus.directory.wait_for(lambda d: d.ready("tts"), 10)
        sounds = []
        for port in (one.port, other.port):
            proxy.switch(port)
            made = await client.audio.speech.create(
                model=VOICE,
                voice="alto",
                input="Two red circles.",
                response_format="opus",
                extra_headers=keyed("sound"),
            )
            sounds.append(made.content)
        assert sounds[0] == sounds[1]
        assert len(voice.requests) == 1
    await bus.close()


async def test_another_request_under_the_key_is_refused(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    async with gateways(nats) as (one, _), proxied(one.port, max_retries=0) as (_, client):
        asked: Any = {"model": MODEL, "extra_headers": keyed("key")}
        await client.chat.completions.create(messages=ASKED, **asked)
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await client.chat.completions.create(messages=ASKED, max_tokens=3, **asked)
        assert (refused.value.code, refused.value.type) == (
            "idempotency_error",
            "idempotency_error",
        )
        assert refused.value.param == "Idempotency-Key"
        with pytest.raises(openai.UnprocessableEntityError):
            await client.completions.create(prompt="Tell me.", **asked)
        assert len(tokenizer.requests) == 1


async def test_a_refused_request_may_be_corrected(
    nats: NatsServer, tokenizer: FakeTokenizer
) -> None:
    async with gateways(nats) as (one, _), proxied(one.port, max_retries=0) as (_, client):
        asked: Any = {"model": MODEL, "messages": ASKED, "extra_headers": keyed("key")}
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(temperature=9, **asked)
        made = await client.chat.completions.create(**asked)
        assert made.choices[0].message.content


@pytest.mark.parametrize("key", ["k" * 256, "a\tb"])
async def test_a_key_has_a_bounded_form(
    nats: NatsServer, tokenizer: FakeTokenizer, key: str
) -> None:
    async with (
        gateways(nats) as (one, _),
        httpx.AsyncClient(trust_env=False) as http,
        post(http, one.port, key) as response,
    ):
        assert response.status_code == 400
        assert json.loads(await response.aread())["error"]["param"] == "Idempotency-Key"


async def test_an_unknown_stream_does_not_go_on(nats: NatsServer, tokenizer: FakeTokenizer) -> None:
    async with gateways(nats) as (one, _), httpx.AsyncClient(trust_env=False) as http:
        async with post(http, one.port, "unknown", last="0o=1,0c=5") as response:
            assert response.status_code == 404
            assert json.loads(await response.aread())["error"]["param"] == "Last-Event-ID"
        async with post(http, one.port, "unknown", last="five") as response:
            assert response.status_code == 400
        assert not tokenizer.requests


async def test_tenants_share_no_keys_and_have_room_of_their_own(
    nats: NatsServer, tokenizer: FakeTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(document("stored_bytes = 1000"))
    async with (
        gateways(nats, tenants_file=path) as (one, _),
        httpx.AsyncClient(trust_env=False) as http,
    ):
        names = []
        for bearer in (ACME, OTHER):
            async with post(
                http, one.port, "same", bearer=bearer, fields={"stream": False}
            ) as reply:
                names.append(json.loads(await reply.aread())["id"])
        assert len(set(names)) == 2
        async with post(http, one.port, "one more", bearer=ACME) as reply:
            assert reply.status_code == 429
            assert json.loads(await reply.aread())["error"]["code"] == "insufficient_quota"
        async with post(http, one.port, "one more", bearer=OTHER) as reply:
            assert reply.status_code == 200


async def test_without_a_key_nothing_is_kept(nats: NatsServer, tokenizer: FakeTokenizer) -> None:
    async with gateways(nats) as (one, _), proxied(one.port) as (_, client):
        for _ in range(2):
            await client.chat.completions.create(model=MODEL, messages=ASKED)
        assert len(tokenizer.requests) == 2
        entries = context(one).idempotency
        assert entries is not None
        assert await entries._documents.used("") == 0
