"""Sockets that break in the middle of a conversation, over real ones: the client comes back and nothing is missing."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import websockets

from motet_shared.messages import Text
from support.clients.realtime_client import TRANSCRIPTION, one, sound
from support.media.spoken import say, silence
from support.services.fake_services import MODEL, words
from support.services.voice_services import WORD_MS, tone_ms
from support.stages.voice_stage import Stage, stage

PATIENCE = 60.0
HELLO = "Two red circles and a blue square."
REPLY = (
    "Here they are. Both of them are red, I think. And one of them is larger than the other one."
)


class Wanderer:
    """A client that loses its socket, and goes on with the session: it counts what it sends, and knows its last event.

    `breaks`: how many events come from one socket before it breaks, for each that does.
    """

    def __init__(self, url: str, breaks: list[int]):
        self._url, self._breaks = url, list(breaks)
        self.events: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.sent: list[str] = []
        self.resumed = 0
        self._left = -1
        self.socket: websockets.ClientConnection | None = None
        self.session_id = ""

    @classmethod
    @asynccontextmanager
    async def of(cls, made: Stage, breaks: list[int]) -> AsyncIterator[Wanderer]:
        wanderer = cls(f"ws://127.0.0.1:{made.gateway.port}/v1/realtime?model={MODEL}", breaks)
        await wanderer.connect("")
        wanderer.session_id = (await wanderer.until("session.created"))[-1]["session"]["id"]
        wanderer._left = wanderer._breaks.pop(0) if wanderer._breaks else -1
        try:
            yield wanderer
        finally:
            assert wanderer.socket is not None
            await wanderer.socket.close()

    async def connect(self, query: str) -> None:
        port = urlsplit(self._url).port
        peer = socket.create_connection(("127.0.0.1", port))
        peer.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16
        )  # the kernel is not to read in its place
        self.socket = await websockets.connect(
            self._url + query, sock=peer, proxy=None, max_size=None
        )

    async def send(self, kind: str, **fields: Any) -> None:
        self.sent.append(json.dumps({"type": kind, **fields}))
        assert self.socket is not None
        try:
            await self.socket.send(self.sent[-1])
        except websockets.ConnectionClosed:
            await self.go_on()

    async def audio(self, data: bytes, piece: int = 4800) -> None:
        for start in range(0, len(data), piece):
            audio = base64.b64encode(data[start : start + piece]).decode()
            await self.send("input_audio_buffer.append", audio=audio)

    def tear(self) -> None:
        assert self.socket is not None
        self.socket.transport.abort()

    async def go_on(self) -> None:
        """Another socket; what the server did not get is sent again."""
        await self.connect(f"&session_id={self.session_id}&after={self.events[-1]['event_id']}")
        while (event := await self._receive())["type"] != "session.resumed":
            assert event["type"] != "error", event
        self.resumed += 1
        self._left = self._breaks.pop(0) if self._breaks else -1
        assert self.socket is not None
        for text in self.sent[event["received"]["events"] :]:
            await self.socket.send(text)

    async def _receive(self) -> dict[str, Any]:
        assert self.socket is not None
        text = await asyncio.wait_for(self.socket.recv(), PATIENCE)
        self.texts.append(str(text))
        self.events.append(json.loads(text))
        return self.events[-1]

    async def read_all(self) -> None:
        """What has arrived and was not read yet."""
        with suppress(TimeoutError):
            while True:
                await asyncio.wait_for(self._receive(), 0.5)

    async def next(self) -> dict[str, Any]:
        if self._left == 0:
            self.tear()
        self._left -= 1
        while True:
            try:
                return await self._receive()
            except websockets.ConnectionClosed:
                await self.go_on()

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        found = [await self.next()]
        while found[-1]["type"] not in kinds:
            assert found[-1]["type"] != "error", found[-1]
            found.append(await self.next())
        return found

    async def say(self, text: str) -> None:
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
        await self.send("conversation.item.create", item=item)


def in_one_row(events: list[dict[str, Any]]) -> bool:
    """Each event once, none left out."""
    return [int(event["event_id"].rpartition("_")[2]) for event in events] == list(
        range(1, len(events) + 1)
    )


async def test_a_reply_over_many_sockets_is_one_reply() -> None:
    """Long enough for the server to learn in between what has arrived, and forget it."""
    story = " ".join(f"{number:04d}-{'x' * 200}" for number in range(1500))
    chance = random.Random(7)
    breaks = [chance.randrange(1, 60) for _ in range(12)]
    async with stage() as made:
        made.tokenizer.reply, made.tokenizer.pace = lambda request: words(story), 0.002
        async with Wanderer.of(made, breaks) as client:
            await client.say("tell me a story")
            await client.send("response.create")
            await client.until("rate_limits.updated")
            assert made.gateway.service is not None
            (session,) = made.gateway.service.sessions
            assert session.channel._log._sent_size < 2**18, "what has arrived is not kept"
        assert client.resumed == len(breaks)
        assert in_one_row(client.events)
        deltas = [
            event["delta"]
            for event in client.events
            if event["type"] == "response.output_text.delta"
        ]
        assert "".join(deltas) == story
        assert [event["type"] for event in client.events].count("response.done") == 1
        assert made.tokenizer.cancelled == 0
        await asyncio.sleep(0)
        made.gateway.check_integrity()


async def test_a_client_that_hangs_is_replaced() -> None:
    """It reads nothing, so the socket is full: the session still moves to the next one at once."""
    pieces = [Text(f"{number:04d}" * 8192, [number]) for number in range(300)]
    async with stage() as made:
        made.tokenizer.reply = lambda request: pieces
        async with Wanderer.of(made, []) as client:
            await client.say("talk")
            await client.send("response.create")
            await client.until("response.content_part.added")
            assert client.socket is not None
            hung = client.socket
            hung.transport.pause_reading()
            hung.transport.resume_reading = lambda: None  # type: ignore[method-assign]  # the library would
            sent = -1
            while sent != made.tokenizer.sent:  # until nothing more gets through
                sent = made.tokenizer.sent
                await asyncio.sleep(0.5)
            await client.read_all()
            assert sent < len(pieces), "too little for this machine's buffers"
            await client.go_on()
            if not any(event["type"] == "rate_limits.updated" for event in client.events):
                await client.until("rate_limits.updated")
            hung.transport.abort()
        deltas = [
            event["delta"]
            for event in client.events
            if event["type"] == "response.output_text.delta"
        ]
        assert "".join(deltas) == "".join(piece.text for piece in pieces)
        assert in_one_row(client.events)


async def test_a_spoken_turn_over_many_sockets() -> None:
    """What is heard has neither gap nor repeat; what is said is whole; what was played can be told after all."""
    spoken = silence(700) + say(HELLO) + silence(900)
    heard = []
    async with stage("asr", "vad", "tts") as made:
        assert made.asr is not None
        assert made.tts is not None
        made.tts.pace = 0.02
        made.tokenizer.reply = lambda request: words(REPLY)
        for breaks in ([], [1, 2, 6, 9, 4]):
            made.asr.script = ["two red circles"]
            async with Wanderer.of(made, breaks) as client:
                await client.send(
                    "session.update", session={"audio": {"input": {"transcription": {}}}}
                )
                for start in range(0, len(spoken), 24_000):
                    if breaks and start % 72_000 == 48_000:
                        client.tear()
                    await client.audio(spoken[start : start + 24_000])
                await client.until("rate_limits.updated")
                heard.append(made.asr.heard.pop())
                assert client.resumed >= len(breaks)
                assert in_one_row(client.events)
                assert (
                    one(client.events, f"{TRANSCRIPTION}.completed")["transcript"]
                    == "two red circles"
                )
                assert tone_ms(sound(client.events)) == len(REPLY.split()) * WORD_MS
                item = one(client.events, "response.done")["response"]["output"][0]
                client.tear()
                await client.send(
                    "conversation.item.truncate",
                    item_id=item["id"],
                    content_index=0,
                    audio_end_ms=4 * WORD_MS,
                )
                await client.until("conversation.item.truncated")
                await client.send("conversation.item.retrieve", item_id=item["id"])
                kept = (await client.until("conversation.item.retrieved"))[-1]["item"]
                assert REPLY.startswith(kept["content"][0]["transcript"])
                assert len(kept["content"][0]["transcript"].split()) == 4
    assert heard[0] == heard[1]


async def test_a_gateway_that_does_not_have_it_says_so() -> None:
    async with stage() as made:
        url = f"ws://127.0.0.1:{made.gateway.port}/v1/realtime?session_id=sess_elsewhere"
        async with websockets.connect(url, proxy=None) as client:
            error = json.loads(await client.recv())["error"]
            assert error["code"] == "session_not_found"
            with pytest.raises(websockets.ConnectionClosed):
                await client.recv()
            assert client.close_code == 4000
