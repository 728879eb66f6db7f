"""Qwen2.5-Omni through its services: encoder, thinker, talker, code2wav, and the gateway in front.

Text and sound are those of the model. Sound begins before the text ends; a talker that dies is
replaced, and where there is none, the text goes on alone.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from motet_gateway.config import GatewayConfig
from motet_gateway.context import GatewayContext
from motet_gateway.http.app import App
from motet_pipelines.answers import record_in
from motet_pipelines.graphs.spoken import SPEAK, THINK
from motet_shared.messages import Audio, States
from motet_shared.process.telemetry import Metrics
from motet_shared.testing import die, settle
from motet_shared.wire.epochs import Epoch
from motet_tts.codecs.token2wav import Token2Wav, load_token2wav
from motet_tts.models.noise import Noise
from motet_tts.shaper import Shaper
from support.clients.gateway_client import Http
from support.families import omni, processed_vlms
from support.families.hearing import recording
from support.media.sound_files import EXACT, encoded
from support.stages.omni_stage import PROMPT, SEED, TOKENS, services
from support.stages.vlm_stage import MODEL

CONTEXT = 192  # of the talker, which fills it with codes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("omni")
    return folder, omni.write(folder)


def prompt_inputs(folder: Path, messages: list[dict[str, Any]], **media: Any) -> dict[str, Any]:
    processor = processed_vlms.reference_processor(folder)
    text = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    options = {"add_special_tokens": False, "return_tensors": "pt"}
    return dict(processor(text=[text], **media, **options))


def sound_of(folder: Path, codes: list[int]) -> bytes:
    """Return the PCM of codes in the voice Ethan, decoded as one stream."""
    model, speakers = load_token2wav(folder)
    codec = Token2Wav(model, list(speakers.values()))
    frames = [
        codec.frame(code, 1, Noise(SEED, 0, n).normal(*codec.noise_shape))
        for n, code in enumerate(codes)
    ]
    state = codec.begin()
    parts = [codec.decode([state], frame.view(1, 1, -1))[0] for frame in frames]
    rest = codec.finish(state)
    samples = torch.cat([*parts, *([] if rest is None else [rest])]).numpy()
    shaper = Shaper(codec.sample_rate)
    return shaper.push(samples) + shaper.finish()


def assert_sounds_like(found: bytes, expected: bytes) -> None:
    ours, theirs = (np.frombuffer(data, "<i2").astype(np.float32) for data in (found, expected))
    assert len(ours) == len(theirs)
    assert np.abs(ours - theirs).max() <= 1e-2 * np.abs(theirs).max() + 2


async def test_text_and_sound_are_those_of_the_model(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    async with services(folder) as run_by:
        await run_by.made.encoder()
        await run_by.thinker()
        await run_by.talker(context=CONTEXT)
        await run_by.code2wav()
        inputs = prompt_inputs(folder, PROMPT)
        tokens, codes, _ = omni.generated(model, inputs, TOKENS, CONTEXT)
        reply = await run_by.answer(run_by.call())
        assert not reply.ended.lost
        assert reply.ids == tokens
        assert_sounds_like(reply.pcm, sound_of(folder, codes[: codes_room(inputs)]))
        heard = recording(0, 0.6)
        content = [{"type": "text", "text": "What is "}, {"type": "audio"}]
        file = run_by.made.file(encoded(heard, *EXACT["wav"]), is_audio=True)
        both = [{"type": "image"}, *content]
        images = [*run_by.made.pictures(0), file]
        seen = await run_by.answer(run_by.call([{"role": "user", "content": both}], images))
        assert not seen.ended.lost
        assert len(seen.ids) == TOKENS
        assert seen.pcm


def codes_room(inputs: dict[str, Any]) -> int:
    return CONTEXT - inputs["input_ids"].shape[1] - 2


async def test_sound_begins_before_the_text_has_ended(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    async with services(folder) as run_by:
        await run_by.thinker()
        await run_by.talker()
        await run_by.code2wav()
        call = run_by.call(tokens=40)
        states: list[States] = []
        async with run_by.made.gateway.open("tokenizer", call.requests[THINK]) as stream:
            states = [item async for item in stream if isinstance(item, States)]
        some = [one for one in states if one.ref.start < one.prompt_tokens + 30]
        assert len(some) < len(states)
        speech = run_by.made.gateway.open("tts", call.requests[SPEAK])
        async with speech:
            for one in some:
                await speech.send(msgspec.msgpack.encode(one))
            async for item in speech:  # the rest of the text is still to come
                assert isinstance(item, Audio)
                break


async def test_a_talker_that_dies_is_replaced_or_missed(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    async with services(folder) as run_by:
        await run_by.thinker()
        talkers = [await run_by.talker(context=CONTEXT)]
        await run_by.code2wav(patience=0.3)
        whole = await run_by.answer(run_by.call())
        assert whole.pcm
        talkers.append(await run_by.talker(context=CONTEXT))

        async def kill() -> None:
            talkers.remove(await run_by.kill_serving(talkers))

        moved, _ = await asyncio.gather(run_by.answer(run_by.call()), kill())
        assert len(talkers) == 1
        assert (moved.text, moved.pcm) == (whole.text, whole.pcm)
        assert not moved.ended.lost
        alone, _ = await asyncio.gather(run_by.answer(run_by.call()), kill())
        assert not talkers
        assert alone.text == whole.text
        assert set(alone.ended.lost) == {SPEAK}
        assert whole.pcm.startswith(alone.pcm[: len(alone.pcm) // 2])


@dataclass
class Records:
    """What an earlier process has recorded of one request, `known` batches of it."""

    batches: list[bytes] = field(default_factory=list)
    known: int = 0
    at: int = 0
    ended: bytes | None = None
    end: bytes | None = None
    error: bytes | None = None

    async def next(self) -> bytes | None:
        self.at += 1
        return self.batches[self.at - 1] if self.at <= self.known else None

    @property
    def is_live(self) -> bool:
        return self.at >= self.known

    async def append(self, data: bytes) -> None:
        self.append_now(data)

    def append_now(self, data: bytes) -> None:
        self.batches.append(data)

    async def close(self, data: bytes, *, failed: bool) -> None:
        assert not failed
        self.ended = data

    def again(self) -> Records:
        """Return what the next process reads: a third of it."""
        known = -(-len(self.batches) // 3)
        return Records(self.batches[:known], known)

    def whole(self) -> Records:
        """Return what the next process reads of a stream that has ended."""
        return Records([*self.batches], len(self.batches), ended=self.ended, end=self.ended)


class Recorded:
    """A recorder in memory. number: of the gateway, which its epochs end with."""

    def __init__(self, streams: dict[bytes, Records], number: int = 0):
        self.streams, self._number = streams, number

    def open(self, digest: bytes) -> Records:
        return self.streams.setdefault(digest, Records())

    def memo(self, name: str) -> bytes | None:
        return None

    def note(self, name: str, value: bytes) -> None: ...

    def epoch(self, given: Epoch) -> Epoch:
        return Epoch(given.session, (given.number << 16) + self._number)


@pytest.mark.long
@pytest.mark.parametrize("is_written", [False, True])
async def test_other_gateways_go_on_within_the_sound(
    checkpoint: tuple[Path, Any], is_written: bool
) -> None:
    """The states of a reply that is written are computed again, at each gateway."""
    folder, _ = checkpoint
    async with services(folder) as run_by:
        await run_by.thinker()
        await run_by.talker(context=CONTEXT)
        await run_by.code2wav()

        async def answered(recorder: Recorded) -> Any:
            record_in(recorder)
            call = dataclasses.replace(run_by.call(tokens=40), epoch=Epoch("session", 1))
            return await run_by.answer(call)

        recorder = Recorded({})
        whole = await asyncio.create_task(answered(recorder))
        for number in (1, 2):
            text, sound = recorder.streams
            written, heard = recorder.streams[text], recorder.streams[sound]
            assert len(written.batches) > 1
            assert len(heard.batches) > 1
            known = written.whole() if is_written else written.again()
            recorder = Recorded({text: known, sound: heard.again()}, number)
            again = await asyncio.create_task(answered(recorder))
            assert not again.ended.lost
            assert again.text == whole.text
            assert_sounds_like(again.pcm, whole.pcm)


@pytest.mark.long
async def test_code2wav_that_dies_is_replaced(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    async with services(folder) as run_by:
        await run_by.thinker()
        await run_by.talker(context=CONTEXT)
        first = await run_by.code2wav()
        whole = await run_by.answer(run_by.call(tokens=40))

        async def kill() -> None:
            async with asyncio.timeout(30):
                while not first.bus.calls.active:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            await run_by.code2wav()
            run_by.made.actors.remove(first)
            die(first.bus)

        call = dataclasses.replace(run_by.call(tokens=40), patience=20.0)
        moved, _ = await asyncio.gather(run_by.answer(call), kill())
        assert not moved.ended.lost
        assert moved.text == whole.text
        assert_sounds_like(moved.pcm, whole.pcm)


async def test_without_talker_and_code2wav_there_is_text(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    async with services(folder) as run_by:
        await run_by.thinker()
        reply = await run_by.answer(run_by.call())
        assert reply.ids == omni.generated(model, prompt_inputs(folder, PROMPT), TOKENS, 2)[0]
        assert set(reply.ended.lost) == {SPEAK}


async def test_chats_are_answered_in_openais_shape(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    async with services(folder) as run_by:
        await run_by.thinker()
        await run_by.talker(context=80)
        code2wav = await run_by.code2wav(patience=0.3)
        bus = run_by.made.gateway
        service = GatewayContext(GatewayConfig(), bus, Metrics("gateway", bus.instance))
        app = App(service)

        async def ask(**fields: Any) -> Http:
            body = {
                "model": MODEL,
                "messages": PROMPT,
                "temperature": 0,
                "max_tokens": TOKENS,
                "seed": SEED,
                "modalities": ["text", "audio"],
                "audio": {"voice": "Ethan", "format": "pcm16"},
                **fields,
            }
            asked = Http(app, "/v1/chat/completions", json.dumps(body).encode())
            await asked.task
            return asked

        whole = json.loads((await ask()).body)
        message = whole["choices"][0]["message"]
        assert message["content"] is None
        assert base64.b64decode(message["audio"]["data"])
        streamed = await ask(stream=True)
        chunks = [
            json.loads(line[6:])
            for line in streamed.body.decode().splitlines()
            if line.startswith("data: {")
        ]
        audio = [c["choices"][0]["delta"].get("audio", {}) for c in chunks if c["choices"]]
        transcript = "".join(one.get("transcript", "") for one in audio)
        assert transcript == message["audio"]["transcript"]
        data = b"".join(base64.b64decode(one["data"]) for one in audio if "data" in one)
        assert data == base64.b64decode(message["audio"]["data"])
        assert audio[0]["id"] == audio[-2]["id"]
        assert "expires_at" in audio[-2]
        assert "error" not in audio[-2]
        for fields, param in (
            ({"audio": None}, "audio"),
            ({"modalities": ["text"]}, "audio"),
            ({"audio": {"voice": "nobody", "format": "pcm16"}}, "voice"),
            ({"stream": True, "audio": {"format": "mp3"}}, "audio.format"),
        ):
            refused = await ask(**fields)
            assert (refused.status, json.loads(refused.body)["error"]["param"]) == (400, param)
        die(code2wav.bus)
        run_by.made.actors.remove(code2wav)
        await settle()
        text = json.loads((await ask()).body)["choices"][0]["message"]
        assert text["audio"]["transcript"] == transcript
        assert text["audio"]["error"]
