"""A gateway dies again and again under a WebSocket session: its client is told what it is told by one that lives."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import websockets
from websockets.frames import Frame, Opcode

from motet_gateway.kept import session as kept_session
from motet_shared.messages import Chat, Complete, Text
from motet_shared.process.actor import Actor
from motet_shared.testing import memory_buses, running, settle
from support.clients.gateway_client import World, world
from support.media.spoken import silence
from support.running.until import until
from support.services.fake_services import MODEL, words
from support.services.resuming_services import ResumingAsr, ResumingTts
from support.services.two_lives import Connection, kept_socket

STORY = " ".join(f"word{number}" for number in range(60))
SPOKEN = " ".join(f"Sentence number {number} has some words." for number in range(6))
PATIENCE = 30.0


class Client:
    """The client of a session whose gateway dies as soon as one of `deaths` events have come."""

    def __init__(
        self, connection: Connection, socket: websockets.ClientConnection, deaths: list[int]
    ):
        self.connection, self.socket, self.deaths = connection, socket, list(deaths)
        self.events: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def say(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        await self.send(
            "conversation.item.create",
            item={"type": "message", "role": "user", "content": content},
        )

    async def until(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(PATIENCE):
            while not found or found[-1]["type"] != kind:
                found.append(json.loads(await self.socket.recv()))
                self.events.append(found[-1])
                assert found[-1]["type"] != "error" or kind == "error", found[-1]
                if self.deaths and len(self.events) >= self.deaths[0]:
                    self.deaths.pop(0)
                    await self.connection.die_and_live()
        return found


@asynccontextmanager
async def session(
    here: World,
    *deaths: int,
    query: str = f"model={MODEL}",
    first: str = "session.created",
    headers: dict[str, str] | None = None,
) -> AsyncIterator[Client]:
    async with kept_socket(here.app, f"/v1/realtime?{query}", headers) as (connection, socket):
        client = Client(connection, socket, list(deaths))
        await client.until(first)
        yield client


def said(events: list[dict[str, Any]]) -> list[str]:
    """What events say: the deltas of an item are joined, and ids are numbered by their first appearance."""
    numbers = [int(event["event_id"].rpartition("_")[2]) for event in events]
    assert numbers == list(range(1, len(events) + 1))
    ids: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    growing: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        shown = {name: value for name, value in event.items() if name != "event_id"}
        if shown["type"] == "rate_limits.updated":
            continue
        if (delta := shown.get("delta")) is not None:
            if shown["type"] == "response.output_audio.delta":
                shown["delta"] = base64.b64decode(delta).hex()
            same = growing.setdefault((shown["type"], shown["item_id"]), shown)
            if same is not shown:
                same["delta"] += shown["delta"]
                continue
        found.append(shown)
    texts = []
    for event in found:
        text = json.dumps(event)
        for prefix in ("resp", "item", "conv", "sess", "call"):
            for part in text.split(f'"{prefix}_')[1:]:
                name = f"{prefix}_" + part.split('"', 1)[0]
                ids.setdefault(name, f"{prefix} {len(ids)}")
        for name, number in ids.items():
            text = text.replace(name, number)
        texts.append(text)
    return texts


def reply(request: Chat | Complete) -> list[Text]:
    assert isinstance(request, Chat)
    last = request.messages[-1]["content"]
    if last == "speak":
        return words(SPOKEN)
    return words(f"{len(request.messages)} {STORY} {last}")


@pytest.fixture
async def here() -> AsyncIterator[World]:
    """No session is kept here for a client that comes back: a gateway that dies keeps none."""
    async with world(patience=30.0, session_keep=0.0) as made, AsyncExitStack() as stack:
        made.tokenizer.reply, made.tokenizer.pace = reply, 0.001
        buses = await stack.enter_async_context(memory_buses("tts", "asr", hub=made.hub))
        actors: list[Actor] = [ResumingTts(buses[0]), ResumingAsr(buses[1])]
        for actor in actors:
            await stack.enter_async_context(running(actor))
        await settle()
        yield made
        await made.service.close()


async def converse(client: Client) -> None:
    """Three turns and a refusal."""
    await client.send("session.update", session={"type": "realtime", "output_modalities": ["text"]})
    await client.until("session.updated")
    await client.say("first")
    await client.send("response.create")
    await client.until("response.done")
    await client.say("second")
    await client.send("conversation.item.delete", item_id="unknown")
    await client.until("error")
    await client.send("response.create", response={"metadata": {"number": "2"}})
    await client.until("response.done")
    await client.say("third")
    await client.send("response.create")
    await client.until("response.done")


async def test_a_written_session_goes_on_at_every_gateway(here: World) -> None:
    async with session(here) as client:
        await converse(client)
        undisturbed = client.events
        assert client.connection.lives == 1
    text = "".join(event.get("delta", "") for event in undisturbed)
    assert text == "".join(f"{turn} {STORY} {name}" for turn, name in
                           ((1, "first"), (3, "second"), (5, "third")))  # fmt: skip
    for step in (7, 23, 40):
        deaths = range(1, len(undisturbed), step)
        async with session(here, *deaths) as client:
            await converse(client)
            assert client.connection.lives == 1 + len(deaths)
            assert said(client.events) == said(undisturbed)


async def test_each_gateway_ends_what_the_one_before_asked(here: World) -> None:
    """A reply has a later epoch than those before it, and at the next gateway a later one of its own."""
    async with session(here, 30, 120) as client:
        await converse(client)
        assert client.connection.lives == 3
    epochs = here.tokenizer.epochs
    assert len({epoch.session for epoch in epochs}) == 1
    numbers = [epoch.number for epoch in epochs]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 5, "three replies, of which two were asked for again"


async def test_what_is_sent_while_no_gateway_is_there_is_handled_once(here: World) -> None:
    async with session(here) as client:
        await client.send(
            "session.update", session={"type": "realtime", "output_modalities": ["text"]}
        )
        await client.until("session.updated")
        await client.connection.die()
        await client.say("first")
        await client.send("response.create")
        await client.connection.live()
        done = (await client.until("response.done"))[-1]
        assert done["response"]["status"] == "completed"
        added = [event for event in client.events if event["type"] == "conversation.item.added"]
        assert len(added) == 2, "the question and the answer"
        said(client.events)


async def test_a_message_of_which_half_was_received_is_handled(here: World) -> None:
    item = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "half"}],
    }
    text = json.dumps({"type": "conversation.item.create", "item": item}).encode()
    data = Frame(Opcode.TEXT, text).serialize(mask=True)
    async with session(here) as client:
        for cut in (1, 5, len(data) // 2, len(data) - 1):
            client.socket.transport.write(data[:cut])
            await asyncio.sleep(0.02)
            await client.connection.die_and_live()
            client.socket.transport.write(data[cut:])
            added = (await client.until("conversation.item.done"))[-1]
            assert added["item"]["content"][0]["text"] == "half"
        assert said(client.events)
        assert await asyncio.wait_for(await client.socket.ping(), PATIENCE) >= 0


async def test_a_ping_that_no_gateway_answered_is_answered(here: World) -> None:
    async with session(here) as client:
        await client.connection.die()
        pings = [await client.socket.ping() for _ in range(3)]
        await client.connection.live()
        for ping in pings:  # before the client's own, after 20 s, whose answer would be one to all
            await asyncio.wait_for(ping, 15.0)


async def test_a_cancelled_reply_stays_cancelled(here: World) -> None:
    """What was told of it stays in the conversation, however much of it the next gateway computes."""
    async with session(here) as client:
        await client.send(
            "session.update", session={"type": "realtime", "output_modalities": ["text"]}
        )
        await client.say("long")
        await client.send("response.create")
        while sum(event["type"] == "response.output_text.delta" for event in client.events) < 20:
            await client.until("response.output_text.delta")
        await client.send("response.cancel")
        done = (await client.until("response.done"))[-1]["response"]
        assert done["status"] == "cancelled"
        text = done["output"][0]["content"][0]["text"]
        asked = len(here.tokenizer.requests)
        await client.connection.die_and_live()
        await client.send("conversation.item.retrieve", item_id=done["output"][0]["id"])
        kept = (await client.until("conversation.item.retrieved"))[-1]["item"]
        assert kept["content"][0]["text"] == text
        deltas = [e["delta"] for e in client.events if e["type"] == "response.output_text.delta"]
        assert "".join(deltas) == text
        assert len(here.tokenizer.requests) == asked, "nothing is asked again"
        said(client.events)


async def secret(here: World, **session: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """A header with a client secret, and the session that it opens."""
    body = {"session": {"type": "realtime", "output_modalities": ["text"], **session}}
    made = (await here.post("/v1/realtime/client_secrets", body)).json()
    return {"authorization": f"Bearer {made['value']}"}, made["session"]


async def answered(client: Client) -> list[str]:
    await client.say("first")
    await client.send("response.create")
    await client.until("response.done")
    return said(client.events)


async def test_a_session_of_a_client_secret_goes_on_at_every_gateway(here: World) -> None:
    """Gateways of which none has issued it; the secret has opened its session once, and expires."""
    headers, expected = await secret(here, instructions="be brief")
    async with session(here, headers=headers, query="") as client:
        undisturbed = await answered(client)
        count = len(client.events)
    headers, expected = await secret(here, instructions="be brief")
    async with session(here, headers=headers, query="") as client:
        for at in range(2, count, 20):
            client.deaths.append(at)
        assert client.events[0]["session"] == expected
        secrets = here.service.client_secrets
        await client.connection.die()
        secrets._secrets.clear()
        await client.connection.live()
        assert await answered(client) == undisturbed
        assert client.connection.lives > 3
        async with kept_socket(here.app, "/v1/realtime", headers) as (_, other):
            error = json.loads(await other.recv())["error"]
            assert error["code"] == "invalid_api_key", "it has opened its session"
        here.service.sessions._seconds = PATIENCE
        client.socket.transport.abort()
        await asyncio.sleep(0.05)
        query = f"session_id={expected['id']}"
        async with session(here, query=query, first="session.resumed", headers=headers) as again:
            assert again.events[-1]["session"] == expected


async def test_a_withdrawn_key_ends_the_session_of_its_secret_at_the_next_gateway(
    here: World,
) -> None:
    headers, _ = await secret(here)
    async with session(here, headers=headers, query="") as client:
        await client.connection.die()
        here.service.authenticator._keyed = True  # no key at all is accepted
        await client.connection.live()
        error = json.loads(await client.socket.recv())["error"]
        assert error["code"] == "invalid_api_key"
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await client.socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 3000


async def speak(client: Client) -> None:
    """A turn of sound that the client commits, and a spoken answer; then a written question to that."""
    audio = {"input": {"turn_detection": None, "transcription": {"model": "whisper-1"}}}
    await client.send("session.update", session={"type": "realtime", "audio": audio})
    await client.until("session.updated")
    sound = silence(600)
    for start in range(0, len(sound), 4800):
        data = base64.b64encode(sound[start : start + 4800]).decode()
        await client.send("input_audio_buffer.append", audio=data)
    await client.send("input_audio_buffer.commit")
    await client.until("conversation.item.input_audio_transcription.completed")
    await client.say("speak")
    await client.send("response.create")
    done = (await client.until("response.done"))[-1]["response"]
    await client.send(
        "conversation.item.truncate",
        item_id=done["output"][0]["id"],
        content_index=0,
        audio_end_ms=20,
    )
    await client.until("conversation.item.truncated")
    await client.send("conversation.item.retrieve", item_id=done["output"][0]["id"])
    await client.until("conversation.item.retrieved")


async def test_a_spoken_session_goes_on_at_every_gateway(here: World) -> None:
    async with session(here) as client:
        await speak(client)
        undisturbed = client.events
    kinds = {event["type"] for event in undisturbed}
    assert {"response.output_audio.delta", "response.output_audio_transcript.delta"} <= kinds
    for step in (9, 31):
        deaths = range(1, len(undisturbed), step)
        async with session(here, *deaths) as client:
            await speak(client)
            assert client.connection.lives > len(deaths) // 2
            assert said(client.events) == said(undisturbed)


async def test_a_client_comes_back_to_an_adopted_session(here: World) -> None:
    """The events of earlier gateways are found by their ids, too."""
    async with session(here) as client:
        await client.say("one")
        await client.until("conversation.item.done")
        await client.connection.die_and_live()
        await client.say("two")
        await client.until("conversation.item.done")
        here.service.sessions._seconds = PATIENCE
        session_id, (_, after, *missed) = client.events[0]["session"]["id"], client.events
        client.socket.transport.abort()
        await asyncio.sleep(0.05)
        query = f"model={MODEL}&session_id={session_id}&after={after['event_id']}"
        async with session(here, query=query, first="session.resumed") as again:
            *sent, resumed = again.events
            assert sent == missed
            assert resumed["received"]["events"] == 2
            await again.send("response.create")
            await again.until("response.done")


async def move(
    here: World,
    client: Client,
    sockets: AsyncExitStack,
    headers: dict[str, str] | None = None,
) -> None:
    """Break the client's connection, and have it come back over another one."""
    here.service.sessions._seconds = PATIENCE
    client.socket.transport.abort()
    await asyncio.sleep(0.05)
    session_id, after = client.events[0]["session"]["id"], client.events[-1]["event_id"]
    path = f"/v1/realtime?session_id={session_id}&after={after}"
    socket = kept_socket(here.app, path, headers)
    client.connection, client.socket = await sockets.enter_async_context(socket)


async def test_a_session_that_has_moved_goes_on_at_every_gateway(here: World) -> None:
    """Three sockets, and deaths over each of them, in the middle of replies too."""

    async def turns(client: Client, sockets: AsyncExitStack, deaths: int) -> None:
        await client.send(
            "session.update", session={"type": "realtime", "output_modalities": ["text"]}
        )
        await client.say("first")
        await client.send("response.create")
        await client.until("response.done")
        for name in ("second", "third"):
            await move(here, client, sockets)
            await client.until("session.resumed")
            assert client.events[-1]["received"]["events"] == (3 if name == "second" else 5)
            here.service.sessions._seconds = 0.0
            await client.say(name)
            client.deaths = [len(client.events) + 1 + step * 11 for step in range(deaths)]
            await client.send("response.create")
            await client.until("response.done")
            assert client.connection.lives == 1 + deaths
            client.deaths = []

    told = []
    for deaths in (0, 5):
        async with AsyncExitStack() as sockets, session(here) as client:
            await turns(client, sockets, deaths)
            told.append(said(client.events))
    assert told[0] == told[1]


async def test_a_reply_goes_on_that_was_begun_over_another_socket(here: World) -> None:
    """The client has lost what was on its way, and gets it under the same ids, at whatever gateway."""
    async with AsyncExitStack() as sockets, session(here) as client:
        await client.send(
            "session.update", session={"type": "realtime", "output_modalities": ["text"]}
        )
        await client.say("long")
        await client.send("response.create")
        for _ in range(9):
            await client.until("response.output_text.delta")
        lost = [json.loads(await client.socket.recv()) for _ in range(12)]
        await move(here, client, sockets)
        await client.connection.die_and_live()
        client.deaths = [len(client.events) + 5, len(client.events) + 9]
        resumed = asyncio.create_task(client.until("response.done"))
        done = (await resumed)[-1]["response"]
        text = done["output"][0]["content"][0]["text"]
        deltas = [e["delta"] for e in client.events if "delta" in e]
        assert "".join(deltas) == text == f"1 {STORY} long"
        again = {event["event_id"]: event for event in client.events}
        for event in lost:
            assert again[event["event_id"]] == event
        numbers = [int(event["event_id"].rpartition("_")[2]) for event in client.events]
        assert numbers == list(range(1, len(numbers) + 1))
        assert client.connection.lives == 4


async def test_a_session_of_a_client_secret_moves(here: World) -> None:
    headers, _ = await secret(here)
    async with (
        AsyncExitStack() as sockets,
        session(here, headers=headers, query="") as client,
    ):
        await answered(client)
        await move(here, client, sockets, headers)
        await client.until("session.resumed")
        await client.connection.die()
        here.service.client_secrets._secrets.clear()
        await client.connection.live()
        await client.say("again")
        await client.send("response.create")
        done = (await client.until("response.done"))[-1]["response"]
        assert done["output"][0]["content"][0]["text"] == f"3 {STORY} again"
        said(client.events)


@pytest.mark.parametrize("deaths", [0, 1, 3])
@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_a_client_that_is_away_comes_back_to_a_session_of_the_next_gateway(
    here: World, how: str, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has played a part of what was sent to it, and gets the rest of the reply, in the row that there was.

    deaths: since it left; 0: the gateway died before it noticed that, or it left meanwhile.
    """
    monkeypatch.setattr(kept_session, "_CHECKPOINT", 900)
    sessions = here.service.sessions
    async with AsyncExitStack() as sockets, session(here) as client:
        await client.send(
            "session.update", session={"type": "realtime", "output_modalities": ["text"]}
        )
        await client.say("first")
        await client.send("response.create")
        await client.until("rate_limits.updated")
        await client.say("long")
        await client.send("response.create")
        for _ in range(9):
            await client.until("response.output_text.delta")
        lost = [json.loads(await client.socket.recv()) for _ in range(12)]
        if deaths == 0:
            await client.connection.die()
            await until(lambda: len(sessions) == 0)
        sessions._seconds = PATIENCE
        if how == "reset":  # as that of a process which has not read all
            linger = struct.pack("ii", 1, 0)
            client.connection.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.socket.transport.abort()
        if deaths == 0:
            if how == "reset":
                await asyncio.sleep(0.05)
            await client.connection.live()  # else it leaves while that begins
        await until(lambda: sessions.kept == 1)
        for _ in range(deaths):
            await client.connection.die()
            await sessions.end(next(iter(sessions)))
            await client.connection.live()
            await until(lambda: sessions.kept == 1)
        before = client.connection
        await move(here, client, sockets)
        assert client.connection.lives == 1
        done = (await client.until("response.done"))[-1]["response"]
        assert done["output"][0]["content"][0]["text"] == f"3 {STORY} long"
        again = {event["event_id"]: event for event in client.events}
        for event in lost:
            assert again[event["event_id"]] == event
        await client.connection.die_and_live()
        await client.say("third")
        await client.send("response.create")
        done = (await client.until("response.done"))[-1]["response"]
        assert done["output"][0]["content"][0]["text"] == f"5 {STORY} third"
        said(client.events)
        before.close()


async def test_memory_of_a_session_is_closed_with_it(here: World) -> None:
    """Whether its client has left, has moved, or is away until it is given up."""

    before = memories()
    async with session(here) as client:
        await client.say("one")
        await client.until("conversation.item.done")
    async with AsyncExitStack() as sockets, session(here) as client:
        await move(here, client, sockets)
        await client.until("session.resumed")
        await move(here, client, sockets)
        await client.until("session.resumed")
        here.service.sessions._seconds = 0.2
        client.socket.transport.abort()
        await asyncio.sleep(0.05)
    await until(lambda: memories() <= before)  # less, if one of another test has ended


def memories() -> int:
    """The descriptors of connections' memory in this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            count += "motet-connection" in os.readlink(f"/proc/self/fd/{name}")
    return count


async def look(client: Client) -> None:
    """Frames between questions, of which each is answered by how many pictures its prompt has."""
    video = {"type": "merged", "frames": 2, "groups": 2, "group_size": 2}
    await client.send(
        "session.update",
        session={"type": "realtime", "output_modalities": ["text"], "video": video},
    )
    await client.until("session.updated")
    for turn in range(4):
        for number in range(3):
            image = base64.b64encode(b"%d %d" % (turn, number)).decode()
            await client.send("input_image_buffer.append", image=image)
        await client.say(f"turn {turn}")
        await client.send("response.create")
        await client.until("response.done")


def files_of(request: Chat) -> list[str]:
    return ["+".join(file.digest for file in (*one.merged, one.file)) for one in request.images]


def describe(request: Chat | Complete) -> list[Text]:
    assert isinstance(request, Chat)
    files = files_of(request)
    return words(f"{len(files)} {' '.join(files)} {STORY}") if files else reply(request)


async def test_a_session_with_frames_goes_on_at_every_gateway(here: World) -> None:
    """Each gateway has the same frames: what the others asked the services is asked again in no request."""
    here.tokenizer.reply = describe
    async with session(here) as client:
        await look(client)
        undisturbed = client.events
    prompts = [files_of(request) for request in here.tokenizer.requests]
    assert [len(files) for files in prompts] == [3, 4, 4, 4]
    for step in (5, 23):
        deaths = range(1, len(undisturbed), step)
        async with session(here, *deaths) as client:
            await look(client)
            assert client.connection.lives == 1 + len(deaths)
            assert said(client.events) == said(undisturbed)


# ------------------------------------------------------------------------------------------------------ checkpoints
@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have a checkpoint made at every quiet time; returns how many bytes it has left to handle again."""
    made: list[int] = []
    begin_again = kept_session.KeptSession.begin_again

    def noted(kept: kept_session.KeptSession, state: bytes, numbered: int) -> None:
        begin_again(kept, state, numbered)
        transport = kept._transport
        made.append(transport.recorded - transport.checkpoint_size)

    monkeypatch.setattr(kept_session, "_CHECKPOINT", 1)
    monkeypatch.setattr(kept_session, "_SHARE", 0)
    monkeypatch.setattr(kept_session.KeptSession, "begin_again", noted)
    return made


@pytest.mark.parametrize("talk", [converse, speak, look])
async def test_a_session_goes_on_from_its_checkpoints(
    here: World, checkpoints: list[int], talk: Callable[[Client], Awaitable[None]]
) -> None:
    here.tokenizer.reply = describe
    async with session(here) as client:
        await talk(client)
        undisturbed = client.events
    assert len(checkpoints) >= 5
    assert checkpoints[-1] < 1000, "no more than the upgrade"
    deaths = range(1, len(undisturbed), 11)
    async with session(here, *deaths) as client:
        await talk(client)
        assert client.connection.lives > len(deaths) // 2
        assert said(client.events) == said(undisturbed)


async def test_a_session_goes_on_from_a_checkpoint_that_has_moved(
    here: World, checkpoints: list[int]
) -> None:
    """The client comes back over two more connections; one has checkpoints of its own."""

    async def turns(client: Client, sockets: AsyncExitStack, dies: bool) -> list[str]:
        await client.send(
            "session.update", session={"type": "realtime", "output_modalities": ["text"]}
        )
        for name in ("first", "second", "third"):
            await client.say(name)
            await client.send("response.create")
            await client.until("response.done")
            await client.until("rate_limits.updated")
            await move(here, client, sockets)
            if dies:
                await client.connection.die_and_live()
            await client.until("session.resumed")
            if dies:
                await client.connection.die_and_live()
        return said(client.events)

    told = []
    for dies in (False, True):
        async with AsyncExitStack() as sockets, session(here) as client:
            told.append(await turns(client, sockets, dies))
    assert told[0] == told[1]
    assert len(checkpoints) > 6
