"""A gateway dies again and again under a text that is spoken while it is written: its client is told the same."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import websockets

from motet_shared.testing import memory_buses, running, settle
from support.clients.gateway_client import World, world
from support.media.sound_files import without_serial
from support.services.resuming_services import ResumingTts, epochs_of_speech
from support.services.two_lives import Connection, kept_socket

PATIENCE = 30.0
TEXTS = [" ".join(f"Sentence {n} of {name} has words." for n in range(4)) for name in "abc"]


class Writer:
    """A client that writes; its gateway dies as soon as one of `deaths` messages have come."""

    def __init__(
        self, connection: Connection, socket: websockets.ClientConnection, deaths: list[int]
    ):
        self.connection, self._socket, self._deaths = connection, socket, list(deaths)
        self.messages: list[Any] = []  # sound as bytes, events as mappings

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def write(self, text: str, size: int = 7) -> None:
        for at in range(0, len(text), size):
            await self.send("input.text", text=text[at : at + size])

    async def next(self) -> Any:
        async with asyncio.timeout(PATIENCE):
            data = await self._socket.recv()
        self.messages.append(data if isinstance(data, bytes) else json.loads(data))
        if self._deaths and len(self.messages) >= self._deaths[0]:
            self._deaths.pop(0)
            await self.connection.die_and_live()
        return self.messages[-1]

    async def until(self, kind: str) -> Any:
        while isinstance(found := await self.next(), bytes) or found["type"] != kind:
            pass
        return found

    async def rest(self) -> int | None:
        """Take all that comes; return the close code."""
        try:
            while True:
                await self.next()
        except websockets.ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd is not None else None

    def told(self) -> list[Any]:
        """All that has come; sounds that follow each other are joined, as what they are cut into differs."""
        found: list[Any] = []
        for message in self.messages:
            shown = message
            if isinstance(message, dict):
                sound = base64.b64decode(message.get("audio_b64", "")).hex()
                shown = {k: v for k, v in message.items() if k not in ("audio_b64", "chunk_id")}
                if message["type"] == "audio.chunk" and message["timestamps"] is None:
                    shown["sound"] = sound
                if message["type"] == "error":
                    del shown["event_id"]
            if isinstance(shown, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += shown
            elif (
                isinstance(shown, dict)
                and "sound" in shown
                and isinstance(found[-1], dict)
                and "sound" in found[-1]
            ):
                found[-1]["sound"] += shown["sound"]
            else:
                found.append(shown)
        return [_without_serial(shown) for shown in found]

    def serials(self) -> int:
        """The number of Ogg streams in what has come."""
        sound = b"".join(one for one in self.messages if isinstance(one, bytes))
        return len({page[10:14] for page in sound.split(b"OggS")[1:]})


def _without_serial(shown: Any) -> Any:
    is_ogg = isinstance(shown, bytes) and shown.startswith(b"OggS")
    return without_serial(shown) if is_ogg else shown


@asynccontextmanager
async def writing(
    here: World, *deaths: int, headers: dict[str, str] | None = None
) -> AsyncIterator[Writer]:
    path = "/v1/audio/speech/stream"
    async with kept_socket(here.app, path, headers) as (connection, socket):
        yield Writer(connection, socket, list(deaths))


@asynccontextmanager
async def booth(**settings: Any) -> AsyncIterator[World]:
    async with world(patience=30.0, **settings) as made, AsyncExitStack() as stack:
        (bus,) = await stack.enter_async_context(memory_buses("tts", hub=made.hub))
        await stack.enter_async_context(running(ResumingTts(bus)))
        await settle()
        yield made
        await made.service.close()


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with booth() as made:
        yield made


async def equal_over_deaths(
    here: World, ask: Callable[[Writer], Awaitable[Any]], *steps: int
) -> list[Any]:
    """Compare what a client is told by gateways that die with what one is told that lives."""
    async with writing(here) as writer:
        closed = await ask(writer)
        undisturbed = writer.told()
        count, streams = len(writer.messages), writer.serials()
        assert writer.connection.lives == 1
    for step in steps:
        deaths = range(1, count - 1, step)
        async with writing(here, *deaths) as writer:
            assert await ask(writer) == closed
            assert writer.connection.lives > len(deaths) // 2
            assert writer.told() == undisturbed
            assert writer.serials() == streams
    return undisturbed


async def converse(writer: Writer, **config: Any) -> int | None:
    """Three utterances, of which two wait while the first is spoken, a refusal, and the end."""
    await writer.send("session.config", seed=3, **config)
    for text in TEXTS[:2]:
        await writer.write(text)
        await writer.send("input.done")
    await writer.until("session.done")
    await writer.send("input.text", text=7, event_id="wrong")
    await writer.until("error")
    await writer.until("session.done")
    await writer.send("session.config", seed=4, **config)
    await writer.write(TEXTS[2], 30)
    await writer.send("session.close")
    return await writer.rest()


@pytest.mark.parametrize(
    "config",
    [
        {"response_format": "pcm", "stream_audio": True},
        {"response_format": "wav"},
        {"response_format": "opus", "stream_audio": True},
        {"response_format": "pcm", "stream_audio": True, "word_timestamps": True},
        {"response_format": "mp3", "split_granularity": "none"},
    ],
    ids=["pcm", "files", "opus", "words", "whole"],
)
async def test_it_goes_on_at_every_gateway(here: World, config: dict[str, Any]) -> None:
    told = await equal_over_deaths(here, lambda writer: converse(writer, **config), 3, 17)
    done = [one for one in told if isinstance(one, dict) and one["type"] == "session.done"]
    assert [one["utterance_index"] for one in done] == [0, 1, 2]
    assert not any(one["error"] or one["cancelled"] for one in done)


async def test_each_gateway_ends_the_speech_that_the_one_before_asked(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = epochs_of_speech(monkeypatch)
    async with writing(here, 6, 12) as writer:
        await writer.send("session.config", response_format="pcm", stream_audio=True)
        await writer.write(TEXTS[0])
        await writer.send("session.close")
        assert await writer.rest() == 1000
        assert writer.connection.lives == 3
    (session,) = {epoch.session for epoch in epochs}
    assert session
    numbers = [epoch.number for epoch in epochs]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1, 2}


async def test_a_seed_that_was_drawn_is_drawn_again(here: World) -> None:
    """Requests to the model say the same in both gateways, without a seed from the client too."""
    async with writing(here, 3, 8, 20) as writer:
        await writer.send("session.config", response_format="pcm", stream_audio=True)
        await writer.write(TEXTS[0])
        await writer.send("session.close")
        assert await writer.rest() == 1000
    (sound,) = [len(b"".join(one for one in writer.messages if isinstance(one, bytes)))]
    assert sound == len(TEXTS[0].split()) * 200


async def test_a_cancelled_utterance_stays_cancelled(here: World) -> None:
    async with writing(here) as writer:
        await writer.send("session.config", response_format="pcm", stream_audio=True)
        await writer.write(TEXTS[0])
        await writer.until("audio.done")
        await writer.until("audio.start")
        await writer.send("input.cancel")
        await writer.write(TEXTS[1])
        await writer.send("input.done")
        done = await writer.until("session.done")
        assert done["cancelled"]
        await writer.connection.die_and_live()
        told = len(writer.messages)
        assert (await writer.until("session.done"))["utterance_index"] == 1
        sound = b"".join(one for one in writer.messages[told:] if isinstance(one, bytes))
        before = [one for one in writer.messages[:told] if one == done]
        assert before == [done]
        starts = [one["sentence_text"] for one in writer.messages if _is(one, "audio.start")]
        assert " ".join(starts[2:]) == TEXTS[1]
        assert len(sound) <= len(TEXTS[1].split()) * 200
        await writer.send("session.close")
        assert await writer.rest() == 1000


def _is(message: Any, kind: str) -> bool:
    return isinstance(message, dict) and message["type"] == kind


async def test_what_is_written_while_no_gateway_is_there_is_spoken_once(here: World) -> None:
    async with writing(here) as writer:
        await writer.send("session.config", response_format="pcm", stream_audio=True)
        await writer.write(TEXTS[0][:40])
        await writer.until("audio.start")
        await writer.connection.die()
        await writer.write(TEXTS[0][40:])
        await writer.send("session.close")
        await writer.connection.live()
        assert await writer.rest() == 1000
    starts = [one["sentence_text"] for one in writer.messages if _is(one, "audio.start")]
    assert " ".join(starts) == TEXTS[0]


async def test_silence_that_ended_an_utterance_has_ended_it(here: World) -> None:
    """The next gateway does not wait again, and drops what came behind it."""
    object.__setattr__(here.service.config, "request_timeout", 0.3)

    async def ask(writer: Writer) -> int | None:
        await writer.send("session.config", response_format="pcm", stream_audio=True)
        await writer.write("One two three. Four")
        assert (await writer.until("error"))["error"]["code"] == "deadline_exceeded"
        await writer.until("session.done")
        await writer.write(" is dropped.")
        await writer.send("input.done")
        await writer.write("Five six.")
        await writer.send("session.close")
        return await writer.rest()

    told = await equal_over_deaths(here, ask, 2, 5)
    starts = [one["sentence_text"] for one in told if _is(one, "audio.start")]
    assert starts == ["One two three.", "Five six."]


async def test_a_limit_refuses_once_and_admits_once() -> None:
    """What one gateway has refused or admitted, the next one does, whatever is left of the limit."""
    async with booth(max_streams=1) as here:
        async with writing(here) as writer:
            await writer.send("session.config", response_format="pcm", stream_audio=True)
            slot = here.service.limits.take()
            await writer.send("input.text", text="It is refused.")
            await writer.send("input.done")
            assert (await writer.until("error"))["error"]["code"] == "overloaded"
            await writer.until("session.done")
            slot.release()
            await writer.write(TEXTS[0])
            await writer.until("audio.done")
            await writer.connection.die()
            slot = here.service.limits.take()
            await writer.connection.live()
            await writer.send("session.close")
            assert await writer.rest() == 1000
            slot.release()
        done = [one for one in writer.messages if _is(one, "session.done")]
        assert [one["error"] for one in done] == [True, False]
        starts = [one["sentence_text"] for one in writer.messages if _is(one, "audio.start")]
        assert " ".join(starts) == TEXTS[0]
