"""Garbage on every subject, sent by whoever may publish there: typed errors or counted drops, and nobody dies."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import msgpack
import nats.errors
import pytest

from chaos.conftest import MODEL
from chaos.streams import Streams, request
from e2e.engines.peer import PROTOCOL, Peer, operator, service_stats
from e2e.stack import MotetStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("chaos")]

CALLERS = {"tokenizer": "gateway", "decode": "tokenizer", "vad": "gateway"}
OPERATIONS = {
    "tokenizer": ("chat", "complete"),
    "decode": ("generate",),
    "vad": ("detect", "predict_turn_end", "find_speech"),
}


def open_map(**changes: Any) -> dict[str, Any]:
    """A good open, apart from `changes`."""
    body = {"type": "generate", "model": MODEL, "prompt": [1, 2], "sampling": {"max_tokens": 1}}
    caller = "gateway-0000dead"
    return {
        "type": "open",
        "v": PROTOCOL,
        "caller": caller,
        "stream": 1,
        "credit": 1,
        "body": body,
        **changes,
    }


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def garbage() -> list[bytes]:
    """Bytes that no receiver can use. All end within a second's work."""
    noise = random.Random(5)
    good = msgpack.packb(open_map())
    body = open_map()["body"]
    bodies: list[Any] = [None, [], {}, {"type": "no_such"}, {"type": "chat"}, {"type": 5}, "chat"]
    samplings: list[Any] = [None, [], {"temperature": "hot"}, {"seed": "x"}]
    values: list[Any] = [
        *(None, True, 0, -1, 1.5, "open", "", [], {}, [[]], {"type": "open"}, {1: 2}, [None] * 10),
        *(
            ["f", PROTOCOL, "decode-0000dead", []],
            ["f", PROTOCOL, 7, []],
            ["f", 99, "decode-0000dead", []],
        ),
        ["f", PROTOCOL, "no instance id", [["a", 1]]],
        *(
            ["f", PROTOCOL, "decode-0000dead", [frame]]
            for frame in ([], ["?"], ["i"], ["i", 1, 0, ["t"]], ["a", "x"])
        ),
        [
            "f",
            PROTOCOL,
            "decode-0000dead",
            [["i", 2**60, 2**60, ["t", [2**62]]], ["e", 2**63, 0], ["!", 1, 0, "?", "?"]],
        ],
        *(
            ["k", PROTOCOL, "gateway-0000dead", [part]]
            for part in (["c", 1, -5], ["c", "x", 1], ["x"], ["z", 1], 5)
        ),
        *(
            ["U", PROTOCOL, "gateway-0000dead", [part]]
            for part in (["u", 1, 0, b"x"], ["u", -1, -1, b""], ["u", 1, 0], 5)
        ),
        *(["U", version, "gateway-0000dead", [["u", 1, 0, b""]]] for version in (0, 99, "1", None)),
        *(["k", version, "gateway-0000dead", [["x", 1]]] for version in (0, 99, "1", None)),
        *(open_map(v=version) for version in (0, 2, 99, "1", None, -1, 2**63)),
        *(
            open_map(caller=caller)
            for caller in ("", "x", "gateway-*", "gateway-0000dead.>", 5, None, "a" * 5000)
        ),
        *(open_map(stream=stream) for stream in (-1, 2**64 - 1, "1", None, 1.5)),
        *(open_map(credit=credit) for credit in (-1, "many", None)),
        *(open_map(deadline_ms=deadline) for deadline in (-1, 0, "soon", 2**62)),
        *(open_map(body=wrong) for wrong in bodies),
        *(
            open_map(body=body | {"prompt": prompt})
            for prompt in ([], [-1], [2**40], ["a"], None, "text")
        ),
        *(open_map(body=body | {"sampling": wrong}) for wrong in samplings),
        open_map(body=body | {"model": "no-such-model"}),
        {
            "type": "heartbeat",
            "v": PROTOCOL,
            "role": "decode",
            "instance": "gateway-0000dead",
            "state": "ready",
            "seq": 1,
        },
        {"type": "heartbeat", "v": 99, "role": 1, "instance": 2, "state": 3, "seq": "x"},
    ]
    raw = [
        b"",
        b"\xc1",
        b"\xff" * 100,
        b"{}",
        b'{"json": 1}',
        good[:-3],
        good + b"\x00",
        nested(1000),
        nested(200_000),
    ]
    raw += [b"\x87" + good[1:] + msgpack.packb("more") + nested(5000)]
    raw += [
        b"\x95" + msgpack.packb([tag, PROTOCOL, "decode-0000dead", []])[1:] + nested(5000)
        for tag in "fk"
    ]
    raw += [noise.randbytes(noise.randrange(1, 200)) for _ in range(50)]
    raw += [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ]  # lengths that are a lie
    return raw + [msgpack.packb(value) for value in values]


def subjects_of(stack: MotetStack, user: str) -> list[str]:
    """Every subject that a role may publish on to reach somebody."""
    found = [f"motet.v2.ev.{user}.{user}-0000dead.heartbeat"]
    for role, caller in CALLERS.items():
        instances = [child["instance"] for child in stack.children(role)]
        callers = [child["instance"] for child in stack.children(caller)]
        if user == caller:
            found += [f"motet.v2.{role}.{op}" for op in OPERATIONS[role]]
            found += [
                f"motet.v2.{role}.i.{instance}.{end}"
                for instance in instances
                for end in ("open", "ctl", "feed")
            ]
        if user == role:
            found += [f"motet.v2.inbox.{caller}.{instance}.frames" for instance in callers]
            found += [f"motet.v2.{caller}.i.{instance}.ctl" for instance in callers]
    return found


async def still_well(stack: MotetStack, pids: dict[str, int]) -> None:
    """The same processes, and they answer as ever."""
    assert {child["name"]: child["pid"] for child in stack.children()} == pids
    async with Streams(stack.url, [request(number, MODEL, 20) for number in range(4)]) as streams:
        for outcome in await streams.finish(30):
            assert (outcome.finish, outcome.error, outcome.broken) == ("length", None, "")


def pids_of(stack: MotetStack) -> dict[str, int]:
    return {child["name"]: child["pid"] for child in stack.children()}


@pytest.mark.parametrize("user", ["gateway", "tokenizer", "decode", "vad"])
async def test_garbage_kills_nobody(user: str, stack: MotetStack) -> None:
    pids = pids_of(stack)
    async with Peer.connect(stack.nats_url, stack.passwords, user) as peer:
        for subject in subjects_of(stack, user):
            for data in garbage():
                await peer.client.publish(subject, data)
        await peer.client.flush()
        assert not peer.errors, "each of these subjects is one that the role may publish on"
        await still_well(stack, pids)


@pytest.mark.parametrize(
    ("user", "role"), [("gateway", "tokenizer"), ("tokenizer", "decode"), ("gateway", "vad")]
)
async def test_an_open_that_cannot_be_read_is_answered_with_a_typed_error(
    user: str, role: str, stack: MotetStack
) -> None:
    cases = {
        b"\xc1": "malformed_message",
        msgpack.packb({"type": "open", "v": PROTOCOL}): "malformed_message",
        msgpack.packb(open_map(body={"type": "no_such"})): "malformed_message",
        msgpack.packb(open_map(credit="many")): "malformed_message",
        msgpack.packb(open_map(v=99)): "protocol_mismatch",
        nested(1000): "malformed_message",
        nested(100_000): "malformed_message",
    }
    async with Peer.connect(stack.nats_url, stack.passwords, user) as peer:
        for stream, (data, code) in enumerate(cases.items(), start=1):
            peer.frames[stream] = deque()
            reply = f"{peer.inbox}.open.{stream}"
            await peer.client.publish(f"motet.v2.{role}.{OPERATIONS[role][0]}", data, reply=reply)
            tag, _, _, got, message, *_ = await peer.next(stream)
            assert (tag, got) == ("!", code), data[:50]
            assert message


async def test_what_is_dropped_is_counted(stack: MotetStack) -> None:
    instance = str(stack.children("decode")[0]["instance"])

    async def dropped() -> int:
        return sum(
            (await service_stats(stack.nats_url, stack.passwords, instance))["dropped"].values()
        )

    before = await dropped()
    async with Peer.connect(stack.nats_url, stack.passwords, "tokenizer") as peer:
        for _ in range(10):
            await peer.client.publish(f"motet.v2.decode.i.{instance}.ctl", b"\xc1")
        await peer.client.flush()
        async with asyncio.timeout(10):
            while await dropped() < before + 10:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_service_requests_with_bodies_are_answered_all_the_same(stack: MotetStack) -> None:
    pids = pids_of(stack)
    async with operator(stack.nats_url, stack.passwords) as client:
        for verb in ("PING", "INFO", "STATS"):
            for data in garbage():
                await client.publish(f"$SRV.{verb}", data)
        await client.flush()
        assert (await client.request("$SRV.PING", b"\xff", timeout=5)).data
    await still_well(stack, pids)


async def test_oversize_is_refused_by_the_sender_and_by_nats(stack: MotetStack) -> None:
    """Just below the limit everybody copes; above it NATS closes the connection of whoever sends it, not of others."""
    pids = pids_of(stack)
    async with Peer.connect(stack.nats_url, stack.passwords, "gateway") as peer:
        limit = peer.client.max_payload
        for data in (
            b"\xff" * limit,
            msgpack.packb(open_map(body={"type": "chat", "model": "x" * (limit - 1000)})),
        ):
            await peer.client.publish("motet.v2.tokenizer.chat", data)
        await peer.client.flush()
        with pytest.raises(nats.errors.MaxPayloadError):
            await peer.client.publish("motet.v2.tokenizer.chat", b"x" * (limit + 1))
        await still_well(stack, pids)
