"""A realtime client whose socket breaks comes back with the id of its session, and has missed nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_gateway.realtime import session
from motet_gateway.realtime.event_log import EventLog, EventNotFound
from motet_gateway.realtime.events import ItemDelete
from motet_shared.messages import Text
from motet_shared.tenants import digest
from motet_shared.testing import settle
from support.clients.gateway_client import Socket, World, world
from support.services.fake_services import MODEL, words

STORY = " ".join(f"w{number}" for number in range(200))


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world(patience=0.2) as made:
        made.tokenizer.reply = lambda request: words(STORY)
        made.tokenizer.pace = 0.002
        yield made
        await made.service.close()


class Caller:
    """A client of one session, over several sockets."""

    def __init__(self, here: World, **options: Any):
        self.here, self.options = here, options
        self.sockets = [Socket(here.app, **options)]
        self.id = ""

    @property
    def socket(self) -> Socket:
        return self.sockets[-1]

    @property
    def texts(self) -> list[str]:
        """All events, as they came."""
        return [text for socket in self.sockets for text in socket.texts]

    async def begin(self) -> None:
        self.id = (await self.socket.expect("session.created"))["session"]["id"]

    async def ask(self) -> None:
        self.socket.say("tell me a story")
        self.socket.send("response.create")

    def again(self, **query: str) -> Socket:
        """Another socket, to the same session."""
        self.sockets.append(
            Socket(self.here.app, query={"session_id": self.id, **query}, **self.options)
        )
        return self.socket

    def last(self) -> str:
        return str(json.loads(self.texts[-1])["event_id"])


async def caller(here: World, **options: Any) -> Caller:
    made = Caller(here, **options)
    await made.begin()
    return made


async def refused(socket: Socket) -> tuple[str, int | None]:
    error = (await socket.expect("error"))["error"]
    await asyncio.wait_for(socket.task, 10)
    return error["code"], socket.closed


def deltas(texts: list[str]) -> str:
    return "".join(event["delta"] for text in texts if "delta" in (event := json.loads(text)))


def numbers(texts: list[str]) -> list[int]:
    return [int(json.loads(text)["event_id"].rpartition("_")[2]) for text in texts]


# ------------------------------------------------------------------------------------------------------ what is missed
@pytest.mark.parametrize("cut", [0, 1, 40, 150])
async def test_the_rest_comes_in_order_and_nothing_twice(here: World, cut: int) -> None:
    client = await caller(here)
    await client.ask()
    await client.socket.until("response.output_text.delta" if cut else "response.created")
    while len(client.texts) < cut:
        await client.socket.receive()
    await client.socket.drop()
    here.tokenizer.pace = 0.0
    await settle(400)  # the reply goes on meanwhile
    client.again(after=client.last())
    await client.socket.until("rate_limits.updated")
    while not any('"session.resumed"' in text for text in client.socket.texts):
        await client.socket.receive()
    assert deltas(client.texts) == STORY
    assert numbers(client.texts) == list(range(1, len(client.texts) + 1)), (
        "no event is lost, repeated or out of order"
    )
    assert [json.loads(text)["type"] for text in client.socket.texts].count("session.resumed") == 1
    assert here.tokenizer.cancelled == 0
    await client.socket.leave()
    assert not len(here.service.sessions)


async def test_what_comes_again_is_the_same_to_the_byte(here: World) -> None:
    client = await caller(here)
    await client.ask()
    await client.socket.until("rate_limits.updated")
    before = list(client.texts)
    await client.socket.drop()
    client.again(after=json.loads(before[7])["event_id"])
    await client.socket.until("session.resumed")
    assert client.socket.texts[:-1] == before[8:]
    await client.socket.drop()
    client.again()  # of what came since, nobody knows whether it has arrived
    await client.socket.until("session.resumed")
    await client.socket.until("session.resumed")
    assert client.socket.texts[:-1] == client.sockets[1].texts
    await client.socket.leave()


async def test_the_conversation_goes_on_where_it_was(here: World) -> None:
    here.tokenizer.reply, here.tokenizer.pace = lambda request: words("Yes."), 0.0
    client = await caller(here)
    client.socket.send("session.update", session={"type": "realtime", "instructions": "be brief"})
    await client.socket.expect("session.updated")
    client.socket.say("one")
    await client.socket.until("conversation.item.done")
    client.socket.send("nonsense")
    await client.socket.expect("error")
    await client.socket.drop()
    client.again(after=client.last(), model=MODEL)
    resumed = await client.socket.expect("session.resumed")
    assert resumed["received"] == {"events": 3, "audio_ms": 0.0}
    assert (resumed["session"]["id"], resumed["session"]["instructions"]) == (client.id, "be brief")
    client.socket.send("response.create")
    await client.socket.until("rate_limits.updated")
    assert here.tokenizer.requests[-1].messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
    ]
    await client.socket.leave()


async def test_a_reply_to_nobody_waits_when_memory_is_full() -> None:
    async with world(session_memory=2**16) as here:
        here.tokenizer.reply = lambda request: [
            Text(f"{number:04d}" * 256, [number]) for number in range(400)
        ]
        client = await caller(here)
        client.socket.reading.clear()
        await client.ask()
        await client.socket.drop()
        await settle(400)
        assert here.tokenizer.sent < 200, "it is not made ahead without bound"
        client.again()
        await client.socket.until("rate_limits.updated")
        assert deltas(client.texts) == "".join(f"{number:04d}" * 256 for number in range(400))
        await client.socket.leave()
        await here.service.close()


async def test_a_second_socket_takes_the_session_over(here: World) -> None:
    client = await caller(here)
    await client.ask()
    await client.socket.until("response.output_text.delta")
    first = client.socket
    client.again(after=client.last())
    await client.socket.until("session.resumed")
    await asyncio.wait_for(first.task, 10)
    assert first.closed == 4001
    seen = len(first.texts)
    await client.socket.until("rate_limits.updated")
    assert len(first.texts) == seen
    told = first.texts + [text for text in client.socket.texts if text not in first.texts]
    assert deltas(told) == STORY
    assert len(here.service.sessions) == here.service.sessions.connected == 1
    await client.socket.leave()


async def test_a_session_that_was_too_busy_to_move_may_move_later(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MOVE_WITHIN", 0.05)
    client = await caller(here)
    (busy,) = here.service.sessions
    handled = asyncio.Event()
    monkeypatch.setitem(busy._handlers, ItemDelete, lambda event: handled.wait())
    first = client.socket
    first.send("conversation.item.delete", item_id="any")
    await settle()
    assert await refused(client.again()) == ("unavailable", 1013)
    assert first.closed == 4001
    handled.set()
    await asyncio.wait_for(first.task, 10)
    assert here.service.sessions.kept == 1
    client.again()
    await client.socket.until("session.resumed")
    await client.socket.leave()


# -------------------------------------------------------------------------------------------------------- the refusals
async def test_who_says_goodbye_does_not_come_back(here: World) -> None:
    client = await caller(here)
    await client.ask()
    await client.socket.until("response.output_text.delta")
    await client.socket.leave()
    await settle(50)
    assert here.tokenizer.cancelled == 1
    assert await refused(client.again()) == ("session_not_found", 4000)


async def test_a_session_waits_for_its_time_only() -> None:
    async with world(session_keep=0.05) as here:
        here.tokenizer.pace = 0.01
        here.tokenizer.reply = lambda request: words(STORY)
        client = await caller(here)
        await client.ask()
        await client.socket.until("response.output_text.delta")
        await client.socket.drop()
        await asyncio.sleep(0.3)
        assert await refused(client.again()) == ("session_not_found", 4000)
        assert (here.tokenizer.cancelled, here.service.limits.active) == (1, 0)


async def test_nothing_is_kept_where_that_is_off() -> None:
    async with world(session_keep=0.0) as here:
        client = await caller(here)
        await client.socket.drop()
        assert not len(here.service.sessions)
        assert await refused(client.again()) == ("session_not_found", 4000)


async def test_wrong_questions_are_told_and_change_nothing(here: World) -> None:
    client = await caller(here)
    await client.socket.drop()
    for query in ({"after": "event_1"}, {"model": "other"}, {"x": "y"}):
        assert (await refused(client.again(**query)))[1] == 4000
    lost = Socket(here.app, query={"model": MODEL, "after": "event_1"})
    assert await refused(lost) == ("invalid_request", 4000)
    assert await refused(Socket(here.app, query={"session_id": "sess_0"})) == (
        "session_not_found",
        4000,
    )
    client.again()
    await client.socket.until("session.resumed")
    await client.socket.leave()


async def test_another_key_finds_nothing() -> None:
    keys = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    async with world(api_key="one\ntwo") as here:
        client = await caller(here, headers=keys[0])
        await client.socket.drop()
        thief = Socket(here.app, query={"session_id": client.id}, headers=keys[1])
        assert await refused(thief) == ("session_not_found", 4000)
        client.again()
        await client.socket.until("session.resumed")
        await client.socket.leave()


# ---------------------------------------------------------------------------------------------------------- the limits
async def test_the_one_that_waited_longest_makes_room() -> None:
    async with world(max_kept_sessions=2) as here:
        clients = [await caller(here) for _ in range(3)]
        for client in clients:
            await client.socket.drop()
        assert len(here.service.sessions) == here.service.sessions.kept == 2
        assert await refused(clients[0].again()) == ("session_not_found", 4000)
        for client in clients[1:]:
            client.again()
            await client.socket.until("session.resumed")
            await client.socket.leave()


async def test_a_kept_session_is_one_of_its_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    key = f'[[keys]]\ntenant = "acme"\nsha256 = "{digest("k")}"\n'
    file.write_text(f"[tenants.acme]\nconcurrent_sockets = 1\n{key}")
    async with world(tenants_file=file) as here:
        headers = {"authorization": "Bearer k"}
        client = await caller(here, headers=headers)
        assert await refused(Socket(here.app, headers=headers)) == ("rate_limit_exceeded", 1013)
        await client.socket.drop()
        other = await caller(here, headers=headers)  # the one that nobody talks in makes room
        assert await refused(client.again()) == ("session_not_found", 4000)
        await other.socket.leave()
        here.service.authenticator.check_integrity()


async def test_stopping_keeps_nobody(here: World) -> None:
    client, other = await caller(here), await caller(here)
    await client.socket.drop()
    here.service.limits.draining = True
    assert await refused(client.again()) == ("draining", 1012)
    await other.socket.drop()
    assert here.service.sessions.kept == 1
    await here.service.sessions.close()
    assert not len(here.service.sessions)


# -------------------------------------------------------------------------------------------------------------- the log
def _event(number: int) -> bytes:
    return b'{"type":"a.b","event_id":"event_0_%d","x":"%s"}' % (number, b"x" * (number % 7 * 9000))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 12)),
        st.tuples(st.just("take"), st.just(0)),
        st.tuples(st.just("arrived"), st.floats(0, 1)),
        st.tuples(st.just("lost"), st.floats(0, 1)),
        st.tuples(st.just("unknown"), st.floats(0, 1)),
    ),
    max_size=60,
)


@given(steps)
def test_a_client_of_the_log_has_every_event_once(steps: list[tuple[str, Any]]) -> None:
    """`came` is what a client has; it may lose what was on its way, and says what it saw last."""
    log, came, due, sure = EventLog(2**17), [_event(0)], 1, 0
    log.add([_event(0)])
    assert log.take() == came
    for step, value in steps:
        if step == "add":
            log.add(map(_event, range(due, due + value)))
            due += value
        elif step == "take":
            came += log.take()
        elif step == "arrived":
            sure = max(sure, int(value * log.count))
            log.arrived(sure)
        elif not came:
            continue
        elif step == "lost":
            seen = max(1, sure, int(value * len(came)))
            try:
                log.rewind(f"event_0_{seen - 1}")
            except EventNotFound:
                continue
            del came[seen:]
            sure = seen
        else:
            try:
                log.rewind(None)
            except EventNotFound:
                continue
            del came[sure:]
    while log.waiting:
        came += log.take()
    assert came == [_event(number) for number in range(due)]
