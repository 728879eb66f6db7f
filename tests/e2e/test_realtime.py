"""A text conversation over raw `websockets` on /v1/realtime, in the documented order of events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets

from e2e.stack import ENDLESS, MotetStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("stack")]
SAY = {"type": "message", "role": "user"}


@asynccontextmanager
async def session(
    stack: MotetStack, model: str = "pocket-chat"
) -> AsyncIterator[websockets.ClientConnection]:
    url = stack.url.replace("http", "ws", 1) + f"/v1/realtime?model={model}"
    async with websockets.connect(url, proxy=None) as socket:
        yield socket


async def receive(socket: websockets.ClientConnection, *last: str) -> list[dict[str, Any]]:
    """Events up to and with the first of the type `last`."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in last:
        events.append(json.loads(await socket.recv()))
    return events


async def send(socket: websockets.ClientConnection, **event: Any) -> None:
    await socket.send(json.dumps(event))


async def say(socket: websockets.ClientConnection, text: str) -> None:
    item = {**SAY, "content": [{"type": "input_text", "text": text}]}
    await send(socket, type="conversation.item.create", item=item)


async def test_a_text_turn_streams_in_order(stack: MotetStack) -> None:
    async with session(stack) as socket:
        assert (await receive(socket, "session.created"))[0]["session"]["model"] == "pocket-chat"
        await send(
            socket,
            type="session.update",
            session={"type": "realtime", "output_modalities": ["text"]},
            event_id="e1",
        )
        assert (await receive(socket, "session.updated", "error"))[-1]["type"] == "session.updated"
        await say(
            socket, "There are two red circles and a blue square. How many circles are there?"
        )
        assert [event["type"] for event in await receive(socket, "conversation.item.done")] == [
            "conversation.item.added",
            "conversation.item.done",
        ]
        await send(socket, type="response.create")
        events = await receive(socket, "response.done")
        kinds = [event["type"] for event in events]
        deltas = [
            event["delta"] for event in events if event["type"] == "response.output_text.delta"
        ]
        assert list(dict.fromkeys(kinds)) == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
        done = next(event for event in events if event["type"] == "response.output_text.done")
        assert "".join(deltas) == done["text"]
        assert done["text"]
        assert events[-1]["response"]["status"] == "completed"
        assert len({event["event_id"] for event in events}) == len(events)


async def test_a_response_can_be_cancelled(stack: MotetStack) -> None:
    async with session(stack, ENDLESS) as socket:
        await receive(socket, "session.created")
        await send(
            socket,
            type="session.update",
            session={"type": "realtime", "output_modalities": ["text"]},
        )
        await receive(socket, "session.updated")
        for _ in range(2):  # and after a cancel the next one runs
            await say(socket, "Hello!")
            await send(socket, type="response.create")
            await receive(socket, "response.output_text.delta")
            await send(socket, type="response.cancel")
            last = (await receive(socket, "response.done"))[-1]["response"]
            assert last["status"] == "cancelled"
            assert last["status_details"]["reason"] == "client_cancelled"


async def test_nonsense_is_an_error_and_the_socket_lives(stack: MotetStack) -> None:
    async with session(stack) as socket:
        await receive(socket, "session.created")
        for nonsense in ("{", "[]", '{"type": "no.such.event"}', '{"type": 5}', b"\x00\x01"):
            await socket.send(nonsense)
            assert (await receive(socket, "error"))[-1]["error"]["message"]
        await say(socket, "Hello!")
        await receive(socket, "conversation.item.done")


async def test_an_unknown_model_is_said_and_closes_with_4000(stack: MotetStack) -> None:
    async with session(stack, "gpt-99") as socket:
        assert (await receive(socket, "error"))[-1]["error"]["code"] == "model_not_found"
        await socket.wait_closed()
        assert socket.close_code == 4000
