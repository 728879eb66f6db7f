"""What each role may say and hear on NATS, as services/nats.conf has it, and that everything else is refused.

The table is the file itself: every subject that any role may use is tried by every role, and the server must refuse
exactly those that are not in the role's own block.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import nats
import pytest
from nats.aio.client import Client

from motet_shared.testing import NATS_CONF, NatsServer

_BLOCK = re.compile(r"^  ([A-Z]+) = \{\n(.*?)^  \}", re.DOTALL | re.MULTILINE)
_LIST = re.compile(r"(publish|subscribe): \{ allow: \[(.*?)\] \}", re.DOTALL)
_USER = re.compile(r"\{ user: (\w+), password: \$PASSWORD_([A-Z]+), permissions: \$([A-Z]+) \}")
_REFUSED = re.compile(
    r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE
)

# That nobody may use, and patterns that would hear what is meant for others.
FOREIGN = (
    "anything",
    "motet.v2.decode.generate",
    "$SYS.REQ.SERVER.PING",
    "_INBOX_other.x",
    "motet.v2",
)
WIDE = (
    ">",
    "*",
    "motet.>",
    "motet.v2.>",
    "motet.v2.inbox.>",
    "motet.v2.inbox.*.>",
    "motet.v2.*.*",
    "_INBOX.>",
    "$JS.>",
)


@dataclass(frozen=True)
class Block:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def blocks() -> dict[str, Block]:
    """By user. What the file has is read whole, or the test fails."""
    text = re.sub(r"#.*", "", NATS_CONF.read_text())
    named = {}
    for name, body in _BLOCK.findall(text):
        lists = {
            kind: tuple(re.findall(r'"([^"]+)"', entries)) for kind, entries in _LIST.findall(body)
        }
        named[name] = Block(lists["publish"], lists["subscribe"])
    users = {user: named[block] for user, own, block in _USER.findall(text) if user.upper() == own}
    assert len(users) == len(named) == text.count("user: ")
    return users


BLOCKS = blocks()


def matches(pattern: str, subject: str) -> bool:
    """As NATS does; `subject` may be a pattern too, which then has to be no wider."""
    allowed, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(allowed):
        if token == ">":
            return len(given) > index
        if index >= len(given) or given[index] == ">" or (token != "*" and token != given[index]):
            return False
    return len(allowed) == len(given)


def concrete(pattern: str) -> str:
    """A subject that it matches."""
    return pattern.replace("*", "somebody-1").replace(">", "some.thing")


EVERYTHING = sorted(
    {concrete(pattern) for block in BLOCKS.values() for pattern in block.publish + block.subscribe}
    | set(FOREIGN)
)


def permitted(patterns: tuple[str, ...], subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)


@asynccontextmanager
async def connected(
    server: NatsServer, user: str
) -> AsyncIterator[tuple[Client, list[tuple[str, str]]]]:
    """A connection as that user, and what the server has refused it: (publish or subscription, subject)."""
    refused: list[tuple[str, str]] = []

    async def note(error: Exception) -> None:
        if found := _REFUSED.search(str(error)):
            refused.append((found[1].lower(), found[2].lower()))

    client = await nats.connect(
        server.url, user=user, password=server.passwords[user], error_cb=note, allow_reconnect=False
    )
    try:
        yield client, refused
    finally:
        await client.close()


async def received(client: Client) -> None:
    """Wait until the server has received what is queued; see `NatsTransport.flush`."""
    await client.flush()
    await client.flush()


async def told(client: Client, refused: list[tuple[str, str]], count: int) -> None:
    """Until the server has said all that it has to say: it answers in order, and errors are noted a little later."""
    await client.flush()
    async with asyncio.timeout(15):
        while len(refused) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await client.flush()
    await asyncio.sleep(0.05)


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer() as made:
        yield made


def test_the_table_is_the_whole_file() -> None:
    assert {"gateway", "tokenizer", "decode", "operator"} < BLOCKS.keys()
    assert len(EVERYTHING) > 40
    for user, block in BLOCKS.items():
        assert ">" not in block.publish + block.subscribe, f"{user} may do everything"
        assert f"motet.v2.ev.{user}.*.heartbeat" in block.publish
        others = [p for p in block.publish if p.startswith("motet.v2.ev.") and f".{user}." not in p]
        assert not others, f"{user} may pass for another role: {others}"


@pytest.mark.parametrize("user", BLOCKS)
async def test_a_role_says_what_its_block_allows_and_nothing_else(
    server: NatsServer, user: str
) -> None:
    due = {s.lower() for s in EVERYTHING if not permitted(BLOCKS[user].publish, s)}
    assert due, "there is something that it must not say"
    async with connected(server, user) as (client, refused):
        for subject in EVERYTHING:
            await client.publish(subject, b"x")
        await told(client, refused, len(due))
        assert {subject for kind, subject in refused if kind == "publish"} == due
        assert len(refused) == len(due)


@pytest.mark.parametrize("user", BLOCKS)
async def test_a_role_hears_what_its_block_allows_and_nothing_else(
    server: NatsServer, user: str
) -> None:
    tried = [*EVERYTHING, *WIDE, *BLOCKS[user].subscribe]
    due = {s.lower() for s in tried if not permitted(BLOCKS[user].subscribe, s)}
    assert due >= {">", "motet.>", "motet.v2.>", "motet.v2.inbox.>"}
    async with connected(server, user) as (client, refused):
        for subject in dict.fromkeys(tried):
            await client.subscribe(subject)
        await told(client, refused, len(due))
        assert {subject for kind, subject in refused if kind == "subscription"} == due


@pytest.mark.parametrize("user", [user for user in BLOCKS if user != "operator"])
async def test_a_refused_word_reaches_nobody(server: NatsServer, user: str) -> None:
    """Not only does the server complain: another role, which may hear it, does not."""
    other = "decode" if user != "decode" else "encoder"
    async with (
        connected(server, user) as (client, refused),
        connected(server, other) as (listener, none),
    ):
        heard = await listener.subscribe(f"motet.v2.ev.{other}.*.heartbeat")
        await received(listener)
        await client.publish(f"motet.v2.ev.{other}.{other}-1.heartbeat", b"forged")
        await told(client, refused, 1)
        await listener.publish(f"motet.v2.ev.{other}.{other}-1.heartbeat", b"true")
        assert (await heard.next_msg(timeout=10)).data == b"true"
        assert len(refused) == 1
        assert not none


async def test_an_answer_is_allowed_once_to_who_has_asked(server: NatsServer) -> None:
    """`allow_responses`: a role may answer a probe, but neither twice nor anybody else."""
    async with (
        connected(server, "operator") as (asking, _),
        connected(server, "asr") as (asked, refused),
    ):
        probes = await asked.subscribe("$SRV.PING")
        await received(asked)
        inbox = "_INBOX.probe.1"
        answers = await asking.subscribe(inbox)
        await asking.publish("$SRV.PING", b"", reply=inbox)
        await received(asking)
        probe = await probes.next_msg(timeout=10)
        await asked.publish(probe.reply, b"once")
        await asked.publish(probe.reply, b"twice")
        await asked.publish("_INBOX.probe.2", b"elsewhere")
        await told(asked, refused, 2)
        assert (await answers.next_msg(timeout=10)).data == b"once"
        assert refused == [("publish", inbox.lower()), ("publish", "_inbox.probe.2")]


@pytest.mark.parametrize(
    ("user", "password"),
    [("decode", "wrong"), ("nobody", None), ("", None), (None, None), ("DECODE", None)],
)
async def test_nobody_else_gets_in(
    server: NatsServer, user: str | None, password: str | None
) -> None:
    given = {} if user is None else {"user": user, "pass": password or server.passwords["decode"]}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert (await reader.readline()).startswith(b"INFO ")
    writer.write(b"CONNECT " + json.dumps({"verbose": False, **given}).encode() + b"\r\nPING\r\n")
    answer = await asyncio.wait_for(reader.read(), 30)
    assert b"Authorization Violation" in answer
    assert b"PONG" not in answer
    writer.close()
    await writer.wait_closed()
