"""Connect to realtime sessions over a raw WebSocket; official types validate every event."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import websockets
from openai._models import construct_type
from openai.types.realtime import RealtimeServerEvent

PATIENCE = 60.0  # seconds for the next event
TRANSCRIPTION = "conversation.item.input_audio_transcription"
# How every turn begins that the server finds by itself.
SPOKEN_TURN = [
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
]


def check_event(event: dict[str, Any]) -> None:
    """Raise if the official types do not accept an event."""
    parsed: Any = construct_type(type_=RealtimeServerEvent, value=event)
    type(parsed).model_validate(event, strict=True)


@dataclass
class Client:
    """Hold one end of a socket and all received events."""

    socket: websockets.ClientConnection
    events: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def update(self, **session: Any) -> dict[str, Any]:
        await self.send("session.update", session={"type": "realtime", **session})
        return (await self.until("session.updated"))[-1]["session"]

    async def audio(self, data: bytes, piece: int = 9600) -> None:
        for start in range(0, len(data), piece):
            audio = base64.b64encode(data[start : start + piece]).decode()
            await self.send("input_audio_buffer.append", audio=audio)

    async def next(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(PATIENCE):
                event: dict[str, Any] = json.loads(await self.socket.recv())
        except TimeoutError:
            last = ", ".join(event["type"] for event in self.events[-8:])
            raise TimeoutError(f"nothing came for {PATIENCE:g} s after {last}") from None
        check_event(event)
        self.events.append(event)
        return event

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events up to the first of these types; any other error or failure fails."""
        found = [await self.next()]
        while (kind := found[-1]["type"]) not in kinds:
            assert kind != "error", found[-1]
            assert not kind.endswith(".failed"), found[-1]
            found.append(await self.next())
        return found

    async def refused(self) -> dict[str, Any]:
        return (await self.until("error"))[-1]["error"]


@asynccontextmanager
async def talking(
    url: str, headers: Mapping[str, str] | None = None, **session: Any
) -> AsyncIterator[Client]:
    """Open a session, with these settings if given. headers: of the request that opens it."""
    async with websockets.connect(
        url, proxy=None, max_size=None, additional_headers=headers
    ) as socket:
        client = Client(socket)
        await client.until("session.created")
        if session:
            await client.update(**session)
        yield client


def kinds(events: list[dict[str, Any]], *, heard: bool = True) -> list[str]:
    """Return the types of events, each kind of delta once; `heard=False` leaves out transcription."""
    found: list[str] = []
    for event in events:
        kind = event["type"]
        if not (kind.endswith(".delta") and kind in found) and (
            heard or not kind.startswith(TRANSCRIPTION)
        ):
            found.append(kind)
    return found


def sound(events: list[dict[str, Any]]) -> bytes:
    deltas = [event["delta"] for event in events if event["type"] == "response.output_audio.delta"]
    return b"".join(base64.b64decode(delta) for delta in deltas)


def one(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [event for event in events if event["type"] == kind]
    assert len(found) == 1, kinds(events)
    return found[0]
