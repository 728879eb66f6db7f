"""A rolling restart under load, of services without models as processes: each request completes, unchanged."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import websockets

from motet_cli.supervision import address
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.logs import Log
from motet_cli.supervision.orders import Restart, Scale
from motet_cli.supervision.rolling import Rolling
from motet_cli.supervision.supervisor import Supervisor
from motet_shared.errors import ConfigError, Unavailable
from motet_shared.testing import NatsServer
from support.running.service_process import python_environment, settings
from support.services.fake_services import MODEL
from support.services.marked_services import read_words, story

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROLES = ("tokenizer", "decode", "tts")
SPOKEN = "S1n0w0 S1n0w1 S1n0w2. S1n1w0 S1n1w1 S1n1w2 S1n1w3."
PATIENCE = 120.0


@dataclass
class Stack:
    """`motet up`, as it were: real processes under the real supervisor."""

    supervisor: Supervisor
    rolling: Rolling
    url: str
    told: list[str]

    def pids(self) -> dict[str, int]:
        return {entry["name"]: entry["pid"] for entry in self.supervisor.describe()}


@asynccontextmanager
async def stack() -> AsyncIterator[Stack]:
    log = Log(io.StringIO())
    supervisor = Supervisor(log)
    told: list[str] = []
    async with NatsServer() as nats:
        with address.bound("127.0.0.1", 0) as listener:
            port, fd = listener.getsockname()[1], listener.fileno()
            env = python_environment() | settings(nats)
            argv = (
                "motet_gateway",
                "--listen-fd",
                str(fd),
                "--drain-timeout",
                "600",
                "--patience",
                "30s",
            )
            gateway = replace(_spec("gateway", argv, env), drain=10.0, fds=(fd,))
            services = [
                _spec(role, ("support.services.marked_services", role, "--pace", "0.02"), env)
                for role in ROLES
            ]
            supervisor.start([gateway, *services])
            made = Stack(
                supervisor,
                Rolling(supervisor, NatsAccess(nats.url, nats.passwords["operator"]), told.append),
                f"http://127.0.0.1:{port}",
                told,
            )
            try:
                await _ready(made.url)
                yield made
            finally:
                await supervisor.kill()
                log.close()


def _spec(role: str, argv: tuple[str, ...], env: dict[str, str]) -> ChildSpec:
    stage = 0 if role == "gateway" else 1
    return ChildSpec(
        name=role, role=role, argv=(sys.executable, "-m", *argv), env=env, grace=10.0, stage=stage
    )


async def _ready(url: str) -> None:
    async with asyncio.timeout(PATIENCE), httpx.AsyncClient(trust_env=False, timeout=60) as http:
        while True:
            try:
                models = (await http.get(f"{url}/v1/models")).json()["data"]
            except httpx.HTTPError:
                models = []
            if len(models) == 2:  # the one that thinks, and the voice
                return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _sent(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[httpx.Response]:
    """Send a request again if its connection is closed before the reply begins, as all SDKs do.

    A client cannot know whether the server closes an idle connection at this moment (RFC 9112, 9.3.1).
    """
    try:
        reply = await http.send(http.build_request("POST", path, json=body), stream=True)
    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
        reply = await http.send(http.build_request("POST", path, json=body), stream=True)
    try:
        yield reply
    finally:
        await reply.aclose()


@dataclass
class Load:
    """Clients that ask again and again, until it is over."""

    url: str
    answers: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        kinds = (self.chat, self.chat_anew, self.speak, self.converse)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=PATIENCE, trust_env=False
        ) as self._http:
            tasks = [
                asyncio.create_task(self._repeat(kind)) for kind in (*kinds, self.chat, self.speak)
            ]
            try:
                yield
            finally:
                self.over.set()
                await asyncio.gather(*tasks)
        assert not self.wrong
        assert all(self.answers.get(kind.__name__) for kind in kinds), self.answers

    async def all_of_them(self, more: int = 1) -> None:
        """Until each kind has had so many more answers."""
        due = {kind: count + more for kind, count in self.answers.items()}
        async with asyncio.timeout(PATIENCE):
            while not self.wrong and not self._enough(due):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def _enough(self, due: dict[str, int]) -> bool:
        return len(self.answers) == 4 and all(
            self.answers[kind] >= count for kind, count in due.items()
        )

    async def _repeat(self, ask: Callable[[], Awaitable[bool]]) -> None:
        while not self.over.is_set() and not self.wrong:
            try:
                if not await ask():
                    self.wrong.append(f"{ask.__name__}: another answer")
            except Exception as error:
                self.wrong.append(f"{ask.__name__}: {type(error).__name__}: {error}")
            self.answers[ask.__name__] = self.answers.get(ask.__name__, 0) + 1

    async def chat(self) -> bool:
        """Over connections that are used again."""
        return await self._chat(self._http)

    async def chat_anew(self) -> bool:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, trust_env=False) as http:
            return await self._chat(http)

    async def _chat(self, http: httpx.AsyncClient) -> bool:
        heard = "speaker 7 asks"
        body = {"model": MODEL, "messages": [{"role": "user", "content": heard}], "stream": True}
        said, finish = "", None
        async with _sent(http, "/v1/chat/completions", body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    for choice in chunk["choices"]:  # of an error there are none
                        said += choice["delta"].get("content") or ""
                        finish = choice["finish_reason"] or finish
        return (reply.status_code, said, finish) == (200, story(heard), "stop")

    async def speak(self) -> bool:
        body = {"model": "marked-voice", "input": SPOKEN, "response_format": "pcm"}
        async with _sent(self._http, "/v1/audio/speech", body) as reply:
            sound = await reply.aread()
        return reply.status_code == 200 and read_words(sound) == SPOKEN.split()

    async def converse(self) -> bool:
        """A reply in a session of its own; a gateway that leaves says so between replies, never in one."""
        url = self.url.replace("http", "ws", 1) + f"/v1/realtime?model={MODEL}"
        async with websockets.connect(url, proxy=None) as socket:
            item = {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "speaker 2 asks"}],
            }
            response = {"output_modalities": ["text"]}
            events: list[dict[str, str]] = []
            try:
                await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
                await socket.send(json.dumps({"type": "response.create", "response": response}))
                while not events or events[-1]["type"] != "response.done":
                    events.append(json.loads(await socket.recv()))
            except websockets.ConnectionClosed as closed:
                began = any(event["type"] == "response.created" for event in events)
                return not began and closed.rcvd is not None and closed.rcvd.code == 1012
        deltas = [
            event["delta"] for event in events if event["type"] == "response.output_text.delta"
        ]
        return "".join(deltas) == story("speaker 2 asks")


async def test_nobody_notices_that_everything_is_replaced() -> None:
    async with stack() as here:
        before, load = here.pids(), Load(here.url)
        async with load.running():
            await load.all_of_them()
            lines: list[str] = []
            await here.rolling.carry_out(Restart([], 60.0), lines.append)
            await load.all_of_them()
        after = here.pids()
        assert before.keys() == after.keys()
        assert not set(before.values()) & set(after.values())
        assert [line.partition(":")[0] for line in lines] == [*ROLES, "gateway"]
        assert here.told == lines
        assert all(slot.restarts == 0 for slot in here.supervisor.slots)


async def test_more_and_fewer_while_it_serves() -> None:
    async with stack() as here:
        load = Load(here.url)
        async with load.running():
            await load.all_of_them()
            await here.rolling.carry_out(
                Scale({"tokenizer": 2, "gateway": 2}, 60.0), here.told.append
            )
            assert sorted(here.pids()) == sorted(["gateway", "gateway-2", *ROLES, "tokenizer-2"])
            await load.all_of_them()
            await here.rolling.carry_out(
                Scale({"tokenizer": 1, "gateway": 1}, 60.0), here.told.append
            )
            await load.all_of_them()
        assert sorted(here.pids()) == sorted(["gateway", *ROLES])
        with pytest.raises(ConfigError) as caught:
            await here.rolling.carry_out(Restart(["nats"], 1.0), here.told.append)
        assert caught.value.param == "ROLE"
        with pytest.raises(ConfigError) as caught:
            await here.rolling.carry_out(Scale({"tts": 0}, 1.0), here.told.append)
        assert caught.value.param == "ROLE=N"


async def test_a_new_process_that_fails_changes_nothing() -> None:
    async with stack() as here:
        slot = next(slot for slot in here.supervisor.slots if slot.spec.role == "tts")
        before, good = here.pids(), slot.spec
        slot.spec = ChildSpec(
            name="tts", role="tts", argv=(sys.executable, "-c", "raise SystemExit(3)")
        )
        with pytest.raises(Unavailable, match=r"tts: .*3\)"):
            await here.rolling.carry_out(Restart(["tts"], 1.0), here.told.append)
        slot.spec = good
        assert here.pids() == before
