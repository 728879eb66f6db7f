"""Texts that are spoken while they are written: a client, the gateway on a real port, nats-server, real voices."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import websockets

from motet_gateway.audio.encoder import FORMATS
from motet_gateway.audio.speech import MOST_TEXT
from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer
from motet_shared.wire.subjects import role_of
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.running.service_process import end, start
from support.stages.served_gateway import KEY, Served, served, served_gateway
from support.stages.tts_stage import MODEL, TEXT, config

PATIENCE = 30.0  # seconds for the next message
PCM = {"response_format": "pcm", "stream_audio": True, "seed": 5}
NOTHING = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tts_checkpoints.pocket_tts(
        tmp_path_factory.mktemp("tts") / "model", sample=True, threshold=0.2
    )


@dataclass
class Writer:
    """Write to one socket, and keep what comes back."""

    socket: websockets.ClientConnection
    events: list[dict[str, Any]] = field(default_factory=list)
    sounds: list[bytes] = field(default_factory=list)

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def configure(self, **fields: Any) -> None:
        await self.send("session.config", model=MODEL, **fields)

    async def write(self, text: str, size: int = 1000) -> None:
        for at in range(0, len(text), size):
            await self.send("input.text", text=text[at : at + size])

    async def next(self) -> str:
        """Take the next message; return its type, "sound" for a binary one."""
        async with asyncio.timeout(PATIENCE):
            data = await self.socket.recv()
        if isinstance(data, bytes):
            self.sounds.append(data)
            return "sound"
        self.events.append(json.loads(data))
        return str(self.events[-1]["type"])

    async def until(self, wanted: str) -> dict[str, Any]:
        while await self.next() != wanted:
            pass
        return self.events[-1]

    async def refused(self) -> dict[str, Any]:
        error: dict[str, Any] = (await self.until("error"))["error"]
        return error

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def sound(self) -> bytes:
        return b"".join(self.sounds)


@asynccontextmanager
async def writing(port: int, key: str = KEY) -> AsyncIterator[Writer]:
    headers = {"authorization": f"Bearer {key}"}
    url = f"ws://127.0.0.1:{port}/v1/audio/speech/stream"
    async with websockets.connect(
        url, proxy=None, max_size=None, additional_headers=headers
    ) as socket:
        yield Writer(socket)


@dataclass
class Booth:
    gateway: Gateway
    tts: list[Tts]

    def writing(self, key: str = KEY) -> Any:
        return writing(self.gateway.port, key)

    async def speech(self, text: str = TEXT, **fields: Any) -> bytes:
        """Return what POST /v1/audio/speech answers."""
        fields = {"seed": 5} | fields
        async with Served(self.gateway).client() as client:
            speaking = client.audio.speech.with_streaming_response.create(
                model=MODEL, voice="", input=text, response_format="pcm", extra_body=fields
            )
            async with speaking as answer:
                return await answer.read()

    async def idle(self) -> None:
        async with asyncio.timeout(10):
            while self.gateway.bus.caller.streams or any(one.bus.calls.active for one in self.tts):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def booth(folder: Path) -> AsyncIterator[Booth]:
    async with served("tts", lambda bus: Tts(config(folder), bus)) as (gateway, tts):
        yield Booth(gateway, tts)


@pytest.mark.parametrize("size", [3, 1000])
async def test_the_sound_is_that_of_the_whole_text(booth: Booth, size: int) -> None:
    whole = await booth.speech()
    async with booth.writing() as writer:
        await writer.configure(**PCM)
        await writer.write(TEXT, size)
        await writer.send("input.done")
        done = await writer.until("session.done")
    assert writer.sound == whole
    starts, ends = writer.of("audio.start"), writer.of("audio.done")
    assert [event["sentence_index"] for event in starts] == list(range(len(starts)))
    assert " ".join(event["sentence_text"] for event in starts) == TEXT
    assert {(event["format"], event["sample_rate"], event["channels"]) for event in starts} == {
        ("pcm", 24_000, 1)
    }
    assert sum(event["total_bytes"] for event in ends) == len(whole)
    assert not any(event["error"] for event in ends)
    assert ends[-1]["credit"] == done["credit"] == MOST_TEXT + len(TEXT)
    assert (done["utterance_index"], done["total_sentences"]) == (0, len(starts))
    assert not done["error"]
    assert not done["cancelled"]
    assert done["usage"]["total_tokens"] > done["usage"]["output_tokens"] > 0


async def test_a_sentence_is_heard_while_the_next_is_unwritten(booth: Booth) -> None:
    async with booth.writing() as writer:
        await writer.configure(**PCM)
        await writer.write("The blue circle is small. A")
        first = await writer.until("audio.done")
        assert first["sentence_index"] == 0
        assert writer.sounds
        await writer.write("nd so on.")
        await writer.send("input.done")
        await writer.until("session.done")
    assert [event["sentence_text"] for event in writer.of("audio.start")][-1] == "And so on."


async def test_one_connection_speaks_many_texts_with_settings_of_their_own(booth: Booth) -> None:
    async with booth.writing() as writer:
        await writer.configure(**PCM)
        await writer.write("It is small.")
        await writer.send("input.done")
        await writer.configure(**PCM, speed=2.0)  # while the first is spoken
        await writer.write("It is small.")
        await writer.send("input.done")
        await writer.send("input.done")  # of no text
        for index in range(3):
            assert (await writer.until("session.done"))["utterance_index"] == index
        assert writer.of("session.done")[2]["total_sentences"] == 0
        assert writer.of("session.done")[2]["usage"] == NOTHING
        await writer.write("And goodbye.")
        await writer.send("session.close")
        await writer.until("session.done")
        with pytest.raises(websockets.ConnectionClosedOK):
            await writer.next()
    first, second = (event["total_bytes"] for event in writer.of("audio.done")[:2])
    assert first == pytest.approx(2 * second, rel=0.2)


async def test_every_format_is_one_stream_that_can_be_decoded(booth: Booth) -> None:
    seconds = len(await booth.speech()) / 2 / 24_000
    for audio_format in FORMATS:
        async with booth.writing() as writer:
            await writer.configure(response_format=audio_format, stream_audio=True, seed=5)
            await writer.write(TEXT)
            await writer.send("input.done")
            await writer.until("session.done")
        rate = writer.of("audio.start")[0]["sample_rate"]
        if audio_format in ("pcm", "pcmu", "pcma"):
            found = len(writer.sound) / (2 if audio_format == "pcm" else 1) / rate
        else:
            with av.open(io.BytesIO(writer.sound), "r") as container:
                frames = list(container.decode(audio=0))
            found = sum(frame.samples for frame in frames) / frames[0].sample_rate
        # Coders add and cut a frame.
        assert found == pytest.approx(seconds, abs=0.12), audio_format


async def test_each_sentence_is_a_file_without_stream_audio(booth: Booth) -> None:
    async with booth.writing() as writer:
        await writer.configure(seed=5)
        await writer.write(TEXT)
        await writer.send("input.done")
        await writer.until("session.done")
    assert len(writer.sounds) == len(writer.of("audio.start")) > 2
    frames = [data[44:] for data in writer.sounds]
    assert b"".join(frames) == await booth.speech()
    with wave.open(io.BytesIO(writer.sounds[1])) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24_000, 1, 2)


async def test_a_text_can_be_spoken_when_it_is_complete_only(booth: Booth) -> None:
    whole = await booth.speech()
    async with booth.writing() as writer:
        await writer.configure(**PCM, split_granularity="none")
        await writer.write(TEXT, 7)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.socket.recv(), 0.5)
        await writer.send("input.done")
        done = await writer.until("session.done")
    assert done["total_sentences"] == 1
    assert writer.sound == whole


async def test_words_have_times(booth: Booth) -> None:
    whole = await booth.speech()
    async with booth.writing() as writer:
        await writer.configure(**PCM, word_timestamps=True)
        await writer.write(TEXT)
        await writer.send("input.done")
        await writer.until("session.done")
    chunks = writer.of("audio.chunk")
    assert not writer.sounds
    assert b"".join(base64.b64decode(chunk["audio_b64"]) for chunk in chunks) == whole
    told = [chunk["timestamps"] for chunk in chunks if chunk["timestamps"] is not None]
    assert [word["word"] for sentence in told for word in sentence] == TEXT.split()
    for sentence, done in zip(told, writer.of("audio.done"), strict=True):
        assert sentence[0]["start_ms"] >= 0
        assert sentence[-1]["end_ms"] <= done["total_bytes"] / 48 + 2


async def test_what_is_wrong_is_refused_by_name_and_the_connection_stays(booth: Booth) -> None:
    async with booth.writing() as writer:
        await writer.send("input.text", text="too early", event_id="mine")
        error = await writer.refused()
        assert (error["param"], error["event_id"]) == ("type", "mine")
        for fields, param in (
            ({"colour": "red"}, "colour"),
            ({"speed": 9}, "speed"),
            ({"response_format": "midi"}, "response_format"),
            ({"word_timestamps": True}, "word_timestamps"),
            ({"model": "none-such"}, "model"),
            ({"instructions": "sadly"}, "instructions"),
            ({"split_granularity": "clause"}, "split_granularity"),
        ):
            await writer.send("session.config", **({"model": MODEL} | fields))
            assert (await writer.refused())["param"] == param, fields
        await writer.configure(**PCM)
        await writer.socket.send(b"\x00\x01")
        assert (await writer.refused())["code"] == "invalid_request"
        await writer.socket.send("{")
        assert (await writer.refused())["code"] == "malformed_message"
        await writer.write("Still here")
        await writer.configure(**PCM)  # in the middle
        assert (await writer.refused())["param"] == "type"
        await writer.send("input.done")
        assert not (await writer.until("session.done"))["error"]


async def test_an_unknown_voice_ends_the_utterance_and_not_the_connection(booth: Booth) -> None:
    async with booth.writing() as writer:
        await writer.configure(**PCM, voice="none-such")
        await writer.write("It is small. And")
        assert (await writer.refused())["param"] == "voice"
        assert (await writer.until("audio.done"))["error"]
        assert (await writer.until("session.done"))["error"]
        await writer.write(" this is dropped with it.")
        await writer.send("input.done")
        await writer.configure(**PCM)
        await writer.write("It is small.")
        await writer.send("input.done")
        done = await writer.until("session.done")
    assert (done["utterance_index"], done["error"]) == (1, False)


async def test_a_cancelled_text_is_heard_no_further(booth: Booth) -> None:
    async with booth.writing() as writer:
        await writer.configure(**PCM)
        await writer.write(TEXT * 100)
        await writer.send("input.done")
        await writer.write("It is next.")
        await writer.send("input.done")
        while await writer.next() != "sound":
            pass
        await writer.send("input.cancel")
        for index in (0, 1):
            done = await writer.until("session.done")
            assert (done["utterance_index"], done["cancelled"], done["error"]) == (
                index,
                True,
                False,
            )
        assert done["total_sentences"] == 0
        await booth.idle()
        assert not writer.of("error")
        await writer.write("It is small.")
        await writer.send("input.done")
        last = await writer.until("session.done")
    assert not last["cancelled"]
    assert last["credit"] == MOST_TEXT + len(TEXT * 100 + "It is next." + "It is small.")


async def test_leaving_is_a_remote_cancel(booth: Booth) -> None:
    async with booth.writing() as writer:
        await writer.configure(**PCM)
        await writer.write(TEXT * 100)
        while await writer.next() != "sound":
            pass
    await booth.idle()
    assert booth.gateway.service is not None
    async with asyncio.timeout(10):
        while len(booth.gateway.service.sessions):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert booth.gateway.service.limits.active == 0


async def test_text_beyond_the_credit_is_refused_and_can_be_sent_later(booth: Booth) -> None:
    sentence = "It is small. "
    most = MOST_TEXT // len(sentence) * len(sentence)
    async with booth.writing() as writer:
        await writer.configure(**PCM)
        await writer.write((sentence * MOST_TEXT)[:most], most)
        await writer.write(sentence * 20)
        error = await writer.refused()
        assert (error["code"], error["param"]) == ("input_buffer_full", "text")
        credit = (await writer.until("audio.done"))["credit"]
        assert MOST_TEXT < credit <= MOST_TEXT + 2 * len(sentence)
        await writer.write(sentence)
        await writer.send("input.cancel")
        assert (await writer.until("session.done"))["cancelled"]
    assert len(writer.of("error")) == 1


async def test_a_wrong_key_is_refused(booth: Booth) -> None:
    async with booth.writing("wrong") as writer:
        assert (await writer.refused())["code"] == "invalid_api_key"
        with pytest.raises(websockets.ConnectionClosedError):
            await writer.next()


async def test_first_audio_factor_and_seconds_are_metrics(booth: Booth) -> None:
    async with booth.writing() as writer:
        await writer.configure(**PCM)
        await writer.write(TEXT)
        await writer.send("input.done")
        await writer.until("session.done")
    await booth.speech()
    assert booth.gateway.service is not None
    read = booth.gateway.service.metrics.registry.get_sample_value
    owner = {"role": "gateway", "instance": booth.gateway.bus.instance, "model": MODEL}
    assert read("motet_speech_first_audio_seconds_count", owner) == 2
    assert read("motet_speech_realtime_factor_count", owner) == 2
    assert read("motet_speech_underruns_total", owner) is not None
    assert read("motet_speech_audio_seconds_total", owner) == pytest.approx(
        2 * len(writer.sound) / 48_000
    )


# --------------------------------------------------------------------------------------- deaths
@pytest.mark.extended("families", after=1)
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("audio_format", ["pcm", "flac"])
async def test_a_killed_voice_leaves_no_gap_and_repeats_nothing(
    folder: Path, audio_format: str
) -> None:
    """Two processes; the one that speaks is killed in the middle of a text that is still written."""
    flags = ("--model", str(folder), "--name", MODEL, "--threads", "1")
    small = ("--first-chunk", "0.002", "--chunk", "0.01")
    async with NatsServer() as nats, AsyncExitStack() as stack:
        made = [await start(nats, "motet_tts", *flags, *small) for _ in range(2)]
        for process in made:
            stack.push_async_callback(end, process)
        gateway = await stack.enter_async_context(served_gateway(nats))
        await gateway.bus.directory.wait_for(lambda d: len(d.ready("tts")) == 2, 120)
        pids = {beat.instance: beat.pid for beat in gateway.bus.directory.instances("tts")}
        said: list[bytes] = []
        for kills in (False, True):
            async with writing(gateway.port) as writer:
                await writer.configure(response_format=audio_format, stream_audio=True, seed=5)
                await writer.write(TEXT * 6 + " An", 17)
                if kills:
                    process = await _speaking(gateway, pids, made)
                    process.kill()
                await writer.write("d so on.")
                await writer.send("input.done")
                done = await writer.until("session.done")
                assert not done["error"]
            said.append(writer.sound)
        whole, survived = (_samples(data, audio_format) for data in said)
        assert len(whole) == len(survived)
        # Processes may add floats in another order: a step or two of 16 bits.
        assert np.abs(whole - survived).max() <= 4


async def _speaking(gateway: Gateway, pids: dict[str, int], made: list[Any]) -> Any:
    """Return the process that is in the middle of a sentence."""
    async with asyncio.timeout(30):
        while True:
            for stream in gateway.bus.caller.streams.values():
                if stream.received > 2 and stream.instance and role_of(stream.instance) == "tts":
                    return next(one for one in made if one.pid == pids[stream.instance])
            await asyncio.sleep(0.001)


def _samples(data: bytes, audio_format: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    if audio_format == "pcm":
        return np.frombuffer(data, "<i2").astype(np.int32)
    with av.open(io.BytesIO(data), "r") as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    return np.concatenate(frames, axis=1)[0].astype(np.int32)
