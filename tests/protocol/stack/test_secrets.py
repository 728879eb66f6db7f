"""Keys and passwords are in nothing that a process tells: logs, traces, errors, metrics, titles, $SRV.INFO."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
import websockets
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from motet_cli.checkpoints.model_folders import ModelFolder
from motet_cli.supervision import nats as nats_command
from motet_cli.supervision.stack import AccessOptions, Stack
from motet_shared.credentials import make_passwords
from motet_shared.errors import InternalError
from motet_shared.process import telemetry
from motet_shared.tenants import digest
from motet_shared.testing import NatsServer, free_port, running
from support.clients.gateway_client import Socket, world
from support.running.service_process import end, python_environment
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer
from support.stages.tenants_stage import bearer

PLAIN, SECOND, TENANT, WRONG = (
    "plain-key-0123456789",
    "second-key-9876",
    "sk-motet-tenant-0123",
    "sk-motet-wrong-4567",
)
HELLO: Any = [{"role": "user", "content": "hello"}]


def tenants(folder: Path) -> Path:
    path = folder / "tenants.toml"
    path.write_text(
        "[tenants.acme]\nmetrics = true\nrequests_per_minute = 1000\n"
        f'[[keys]]\ntenant = "acme"\nsha256 = "{digest(TENANT)}"\n'
    )
    return path


def keys(folder: Path) -> Path:
    path = folder / "keys"
    path.write_text(f"{PLAIN}\n{SECOND}\n")
    return path


def found(text: str, *secrets: str) -> list[str]:
    """Those that are in it, in part too."""
    return [secret for secret in secrets if secret in text or secret[len("sk-motet-") :] in text]


# --------------------------------------------------------------------------------------------------------- a process
@asynccontextmanager
async def gateway(server: NatsServer, folder: Path) -> AsyncIterator[tuple[int, int, list[str]]]:
    """(port, pid, log) of a gateway that tells all it can; it runs as it would for anybody."""
    port = free_port()
    log: list[str] = []
    env = python_environment() | {
        "MOTET_NATS_URL": server.url,
        "MOTET_NATS_CREDENTIALS": str(server.credentials),
        "MOTET_LOG_LEVEL": "debug",
        "MOTET_STOP_WITH_PARENT": "true",
        "MOTET_API_KEY_FILE": str(keys(folder)),
        "MOTET_TENANTS_FILE": str(tenants(folder)),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "motet_gateway",
        "--port",
        str(port),
        env=env,
        stderr=asyncio.subprocess.PIPE,
    )
    stderr = process.stderr
    assert stderr is not None

    async def read() -> None:
        async for line in stderr:
            log.append(line.decode())

    reading = asyncio.create_task(read())
    try:
        yield port, process.pid, log
    finally:
        await end(process)
        await reading


async def ready(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(90):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get(f"http://127.0.0.1:{port}/health/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def ask_everything(port: int) -> list[str]:
    """All that a client can get to see, with keys in every place where clients put them."""
    base = f"http://127.0.0.1:{port}"
    told: list[str] = []
    body = {"model": MODEL, "messages": HELLO}
    async with httpx.AsyncClient(trust_env=False, base_url=base) as http:
        for key in (PLAIN, SECOND, TENANT, WRONG):
            for path in (
                "/v1/models",
                "/v1/models/none",
                "/metrics",
                "/v1/nothing",
                "/v1/images/jobs/x",
            ):
                told.append(_shown(await http.get(path, headers=bearer(key))))
            for fields in ({}, {"stream": True}, {"bogus": 1}, {"model": "none"}):
                told.append(
                    _shown(
                        await http.post(
                            "/v1/chat/completions", json=body | fields, headers=bearer(key)
                        )
                    )
                )
            told.append(
                _shown(await http.post("/v1/chat/completions", content=b"{", headers=bearer(key)))
            )
        told.append(
            _shown(await http.get("/v1/models", headers={"authorization": f"Basic {PLAIN}"}))
        )
        told.append(
            _shown(
                await http.get("/v1/models", headers={"authorization": PLAIN, "api-key": TENANT})
            )
        )
        told.append(_shown(await http.get("/health/ready", headers=bearer(TENANT))))
    for key in (PLAIN, TENANT, WRONG):
        told += await _talk(port, key)
    return told


def _shown(reply: httpx.Response) -> str:
    return f"{reply.headers}\n{reply.text}"


async def _talk(port: int, key: str) -> list[str]:
    url = f"ws://127.0.0.1:{port}/v1/realtime?model={MODEL}"
    protocols: Any = ["realtime", f"openai-insecure-api-key.{key}"]
    told: list[str] = []
    async with websockets.connect(url, subprotocols=protocols, proxy=None) as socket:
        with contextlib.suppress(websockets.ConnectionClosed):
            told.append(str(await socket.recv()))
            await socket.send("no JSON")
            told.append(str(await socket.recv()))
        assert socket.response is not None
        told.append(str(socket.response.headers))
    return [*told, socket.close_reason or ""]


async def test_nothing_that_a_process_tells_has_a_secret(tmp_path: Path) -> None:
    async with NatsServer() as server, gateway(server, tmp_path) as (port, pid, log):
        tokenizer = FakeTokenizer(None, await server.bus("tokenizer"))
        decode = FakeDecode(None, await server.bus("decode"))
        async with running(tokenizer), running(decode):
            await ready(port)
            told = await ask_everything(port)
            tokenizer.error = InternalError("a bug")
            told += await ask_everything(port)
            services = await service_api(server)
        titles = [title for process in (pid, server.pid) for title in titles_of(process)]
        metrics_port = re.search(r"metrics on http://127\.0\.0\.1:(\d+)", "".join(log))
        assert metrics_port is not None
        async with httpx.AsyncClient(trust_env=False) as http:
            told.append((await http.get(f"http://127.0.0.1:{metrics_port[1]}/metrics")).text)
    everything = {
        "answers": "\n".join(told),
        "log": "".join(log),
        "titles": "\n".join(titles),
        "services": services,
    }
    assert "motet_gateway" in everything["titles"]
    assert "motet_tenant_requests_total" in everything["answers"], "the metrics were told"
    assert "motet-gateway" in everything["services"]
    assert "/v1/chat/completions 200" in everything["log"], "something was logged"
    for name, text in everything.items():
        assert not found(text, PLAIN, SECOND, TENANT, WRONG, *server.passwords.values()), name


def titles_of(pid: int) -> list[str]:
    """What `ps` shows to everybody."""
    return [Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "comm")]


async def service_api(server: NatsServer) -> str:
    """$SRV.PING, INFO and STATS of all that run."""
    client = await nats.connect(server.url, user="operator", password=server.passwords["operator"])
    told: list[str] = []
    try:
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        for verb in ("PING", "INFO", "STATS"):
            await client.publish(f"$SRV.{verb}", b"", reply=inbox)
            for _ in range(3):  # gateway, tokenizer, decode
                told.append((await answers.next_msg(timeout=30)).data.decode())
    finally:
        await client.close()
    return "\n".join(told)


async def test_a_wrong_password_is_not_repeated(tmp_path: Path) -> None:
    async with NatsServer() as server:
        env = python_environment() | {
            "MOTET_NATS_URL": server.url,
            "MOTET_NATS_PASSWORD": "a-wrong-password",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "motet_gateway",
            "--port",
            "0",
            env=env,
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await asyncio.wait_for(process.communicate(), 90)
        assert process.returncode == 78
        assert b"password" in err
        assert b"a-wrong-password" not in err


def test_no_command_line_of_the_stack_has_a_password(tmp_path: Path) -> None:
    folder = tmp_path / "nats"
    passwords = make_passwords(folder)
    access = AccessOptions(api_key_file=keys(tmp_path), tenants_file=tenants(tmp_path))
    model = ModelFolder("m", tmp_path)
    stack = Stack(
        models=(model,),
        nats_url="nats://127.0.0.1:1",
        credentials=folder,
        asr=model,
        tts=model,
        access=access,
    )
    specs = [*stack.services(), nats_command.spec(1, folder)]
    assert len(specs) >= 6
    for spec in specs:
        assert not found(
            f"{' '.join(spec.argv)} {dict(spec.env)}", *passwords.values(), PLAIN, TENANT
        )
    assert not found(repr(stack), *passwords.values())


# ------------------------------------------------------------------------------------------------------------- traces
@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.trace_with(provider)
    yield exporter
    telemetry.trace_with(None)
    provider.shutdown()


async def test_traces_have_no_keys(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with world(
        api_key=f"{PLAIN}\n{SECOND}", tenants_file=tenants(tmp_path), patience=0.2
    ) as made:
        for key in (PLAIN, TENANT, WRONG):
            await made.ask(headers=bearer(key)).done()
            await made.ask(headers=bearer(key), stream=True).done()
            await made.ask(headers=bearer(key), model="none").done()
            talk = Socket(made.app, headers=bearer(key))
            await talk.receive()
            await talk.leave()
        made.tokenizer.error = InternalError("a bug")
        await made.ask(headers=bearer(TENANT)).done()
    told = [span.to_json() for span in spans.get_finished_spans()]
    assert len(told) >= 7
    assert any(json.loads(span)["status"]["status_code"] == "ERROR" for span in told)
    assert not found("\n".join(told), PLAIN, SECOND, TENANT, WRONG)
