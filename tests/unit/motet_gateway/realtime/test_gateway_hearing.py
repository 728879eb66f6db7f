"""Realtime sessions with a model that hears: it gets the user's sound, and nothing is transcribed."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motet_gateway.config import GatewayConfig
from motet_gateway.context import GatewayContext
from motet_gateway.http.app import App
from motet_media.audio import pcm_bytes, wav_header
from motet_media.sound_file import read_audio
from motet_pipelines.voice.conversation.converse import converse
from motet_pipelines.voice.conversation.events import ReplyEnded
from motet_pipelines.voice.conversation.history import History, chat_messages, user_audio_item
from motet_pipelines.voice.conversation.inputs import (
    AppendAudio,
    CommitAudio,
    CreateReply,
    Input,
)
from motet_pipelines.voice.conversation.settings import ConversationSettings, ReplySettings
from motet_pipelines.voice.conversation.user_sound import (
    LONGEST_MS,
    SOUND,
    recorded_ms,
    recordings,
)
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import PayloadTooLarge
from motet_shared.messages import ModelCard
from motet_shared.process.actor import Actor
from motet_shared.process.telemetry import Metrics
from motet_shared.testing import memory_bus, running, settle
from support.clients.gateway_client import Socket, World, session, world
from support.families import hearing, processed_vlms
from support.media.coded_speech import (
    ASR_MODEL,
    RATE,
    CodedAsr,
    CodedVad,
    cough,
    quiet,
    say,
    words_in,
)
from support.services.fake_services import MODEL, FakeEncoder, words
from support.stages import vlm_stage

TRANSCRIPTION = "conversation.item.input_audio_transcription"
SERVER = {"type": "server_vad", "prefix_padding_ms": 0}
END = quiet(800)
NAME = "qwen2_audio"
TIE = 1e-4


@dataclass
class Ears:
    """A client of a model that hears, and the sound of each request that the model got."""

    world: World
    socket: Socket
    asr: CodedAsr | None
    heard: list[list[bytes]]  # PCM of each request
    events: list[Any] = field(default_factory=list)

    async def set(self, **audio_input: Any) -> Any:
        self.socket.send("session.update", session={"audio": {"input": audio_input}})
        return (await self.until("session.updated", "error"))[-1]

    async def say(self, *parts: bytes) -> None:
        await append(self.socket, b"".join(parts))

    async def until(self, *kinds: str) -> list[Any]:
        found = await self.socket.until(*kinds)
        self.events += found
        return found

    @property
    def asked(self) -> list[Any]:
        """Return the contents of the messages of the last request."""
        return [message["content"] for message in self.world.tokenizer.requests[-1].messages]

    @property
    def words(self) -> list[str]:
        """Return the words of each recording of the last request."""
        return [" ".join(words_in(pcm)) for pcm in self.heard[-1]]


async def append(socket: Socket, pcm: bytes) -> None:
    """Send a tenth of a second at a time, each handled before the next."""
    for at in range(0, len(pcm), 4800):
        audio = base64.b64encode(pcm[at : at + 4800]).decode()
        socket.send("input_audio_buffer.append", audio=audio)
        await settle(100)


@asynccontextmanager
async def ears(
    *, audio: bool = True, encoder: bool = True, asr: bool = False
) -> AsyncIterator[Ears]:
    """Run a session with a model that accepts sound if `audio`, beside these services and vad."""
    heard: list[list[bytes]] = []
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(world(patience=0.5))
        here.tokenizer.card = ModelCard(name=MODEL, context=4096, audio=audio)
        here.tokenizer.bus.heartbeat()
        store = await stack.enter_async_context(BlobStore(here.tokenizer.bus.instance, 1 << 20))

        async def fetch(request: Any) -> None:
            assert all(image.is_audio for image in request.images)
            files = [bytes(await store.get(image.file)) for image in request.images]
            heard.append([file[len(wav_header(RATE)) :] for file in files])

        here.tokenizer.on_request = fetch
        actors: list[Actor] = [CodedVad(await memory_bus(here.hub, "vad"))]
        if encoder:
            actors.append(FakeEncoder(None, await memory_bus(here.hub, "encoder")))
        recognizer = CodedAsr(await memory_bus(here.hub, "asr")) if asr else None
        actors += [recognizer] if recognizer is not None else []
        for actor in actors:
            await stack.enter_async_context(running(actor))
        await settle()
        async with session(here.app, query={"model": MODEL}) as socket:
            yield Ears(here, socket, recognizer, heard)
        await settle(200)
        await here.service.close()


def types(events: list[Any]) -> list[str]:
    return [event["type"] for event in events]


def user_items(events: list[Any]) -> list[Any]:
    return [
        event["item"]
        for event in events
        if event["type"] == "conversation.item.done" and event["item"]["role"] == "user"
    ]


@pytest.mark.parametrize("asr", [False, True])
async def test_the_model_hears_turns_that_nothing_transcribes(asr: bool) -> None:
    async with ears(asr=asr) as client:
        await client.set(turn_detection=SERVER)
        await client.say(say("show me"), END)
        await client.until("response.done")
        await client.say(say("the red circle"), END)
        await client.until("response.done")
        assert client.asked == [
            [{"type": "audio"}],
            "You said: [{'type': 'audio'}]",
            [{"type": "audio"}],
        ]
        assert client.words == ["show me", "the red circle"]
        for item in user_items(client.events):
            assert item["content"] == [{"type": "input_audio", "transcript": None}]
            client.socket.send("conversation.item.retrieve", item_id=item["id"])
            found = (await client.until("conversation.item.retrieved"))[-1]["item"]
            assert found["content"] == item["content"]
        assert not [kind for kind in types(client.events) if kind.startswith(TRANSCRIPTION)]
        assert types(client.events).count("input_audio_buffer.speech_started") == 2
        if client.asr is not None:
            assert not client.asr.listens
            assert not client.asr.transcribes


async def test_speech_interrupts_a_reply_without_words() -> None:
    async with ears() as client:
        await client.set(turn_detection=SERVER)
        client.world.tokenizer.reply = lambda request: words("word " * 300)
        client.world.tokenizer.pace = 0.02
        await client.say(say("show me"), END)
        await client.until("response.output_text.delta")
        client.events.clear()
        await client.say(cough(400), END)
        await client.say(say("stop it right now"))
        done = (await client.until("response.done"))[-1]["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
        assert types(client.events).count("input_audio_buffer.speech_started") == 1
        client.world.tokenizer.pace = 0.0
        await client.say(END)
        await client.until("response.done")
        assert client.words == ["show me", "stop it right now"]


async def test_what_a_client_commits_is_heard() -> None:
    async with ears() as client:
        await client.set(turn_detection=None)
        await client.say(say("one two"))
        client.socket.send("input_audio_buffer.commit")
        client.socket.send("response.create")
        await client.until("response.done")
        assert client.words == ["one two"]


async def test_sound_of_given_items_is_heard_in_its_place() -> None:
    async with ears() as client:
        sound = base64.b64encode(say("one two")).decode()
        content = [
            {"type": "input_text", "text": "Listen:"},
            {"type": "input_audio", "audio": sound},
            {"type": "input_audio", "transcript": "three"},
        ]
        item = {"type": "message", "role": "user", "content": content}
        shown = [
            {"type": "text", "text": "Listen:"},
            {"type": "audio"},
            {"type": "text", "text": "three"},
        ]
        client.socket.send("conversation.item.create", item=item)
        client.socket.send("response.create")
        await client.until("response.done")
        assert client.asked == [shown]
        response = {"conversation": "none", "input": [item]}
        client.socket.send("response.create", response=response)
        await client.until("response.done")
        assert client.asked == [shown]
        assert client.words == ["one two"]


async def test_sound_counts_where_old_turns_are_dropped() -> None:
    async with ears() as client:
        limit = {
            "type": "retention_ratio",
            "retention_ratio": 0.5,
            "token_limits": {"post_instructions": 80},
        }
        client.socket.send("session.update", session={"truncation": limit})
        await client.set(turn_detection=SERVER)
        for said in ("one two three four five six", "seven eight nine ten eleven twelve"):
            await client.say(say(said), END)
            await client.until("response.done")
        assert client.words == ["seven eight nine ten eleven twelve"]


async def test_a_conversation_without_a_gateway_hears() -> None:
    async with ears() as client, BlobStore("library", 1 << 20) as store:

        async def stored() -> BlobStore:
            return store

        async def microphone() -> AsyncIterator[Input]:
            yield AppendAudio(say("show me"))
            yield CommitAudio()
            yield CreateReply()

        reply = ReplySettings(model=MODEL, hears=True, speaks=False)
        bus, settings = client.world.buses[0], ConversationSettings(reply=reply)
        async with aclosing(converse(bus, stored, microphone(), settings)) as batches:
            events = [event async for batch in batches for event in batch]
        assert [event.status for event in events if isinstance(event, ReplyEnded)] == ["completed"]
        assert client.asked == [[{"type": "audio"}]]
        assert client.words == ["show me"]
        store.check_integrity()
        assert store.stats()["blobs"] == 0


# ----------------------------------------------------------------------------------------- settings
async def test_a_transcription_that_is_asked_for_is_what_the_model_gets() -> None:
    async with ears(asr=True) as client:
        await client.set(turn_detection=SERVER, transcription={"model": ASR_MODEL})
        await client.say(say("show me"), END)
        await client.until("response.done")
        assert client.asked == ["show me"]
        assert client.heard == [[]]


async def test_sound_and_transcript_may_both_be_asked_for() -> None:
    async with ears(asr=True) as client:
        updated = await client.set(
            turn_detection=SERVER, transcription={"model": ASR_MODEL}, model_input="audio"
        )
        assert updated["session"]["audio"]["input"]["model_input"] == "audio"
        assert client.asr is not None
        client.asr.go_on.clear()  # the reply does not wait for words
        await client.say(say("show me"), END)
        await client.until("response.done")
        assert client.words == ["show me"]
        client.asr.go_on.set()
        assert (await client.until(f"{TRANSCRIPTION}.completed"))[-1]["transcript"] == "show me"


async def test_a_client_may_have_the_model_read_words() -> None:
    async with ears(asr=True) as client:
        updated = await client.set(turn_detection=SERVER, model_input="transcript")
        assert updated["session"]["audio"]["input"]["model_input"] == "transcript"
        await client.say(say("show me"), END)
        await client.until("response.done")
        assert client.asked == ["show me"]
        again = await client.set(model_input=None)
        assert "model_input" not in again["session"]["audio"]["input"]
        await client.say(say("now"), END)
        await client.until("response.done")
        assert client.words == ["now"]


@pytest.mark.parametrize(
    ("services", "given", "param"),
    [
        ({"audio": False, "asr": True}, {"model_input": "audio"}, "model_input"),
        ({"encoder": False, "asr": True}, {"model_input": "audio"}, "model_input"),
        ({}, {"model_input": "transcript"}, "model_input"),
        ({}, {"transcription": {}}, "transcription"),
        ({"audio": False}, {"turn_detection": SERVER}, "turn_detection.type"),
        ({"encoder": False}, {"turn_detection": SERVER}, "turn_detection.type"),
    ],
)
async def test_what_no_service_can_do_is_refused_by_name(
    services: dict[str, bool], given: dict[str, Any], param: str
) -> None:
    async with ears(**services) as client:
        refused = await client.set(**given)
        assert refused["type"] == "error"
        assert refused["error"]["param"] == f"session.audio.input.{param}"


async def test_a_session_that_transcribes_has_no_model_that_could_hear() -> None:
    async with ears(asr=True) as client:
        session_update = {
            "type": "transcription",
            "audio": {"input": {"model_input": "transcript"}},
        }
        client.socket.send("session.update", session=session_update)
        refused = (await client.until("session.updated", "error"))[-1]
        assert refused["error"]["param"] == "session.audio.input.model_input"


async def test_a_session_that_transcribes_keeps_its_newest_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("motet_pipelines.voice.conversation.history.MAX_ITEMS", 2)
    async with ears(asr=True) as client:
        audio = {"input": {"turn_detection": SERVER, "transcription": {"model": ASR_MODEL}}}
        client.socket.send("session.update", session={"type": "transcription", "audio": audio})
        assert (await client.until("session.updated", "error"))[-1]["type"] == "session.updated"
        for said in ("one", "two", "three"):
            await client.say(say(said), END)
            completed = (await client.until(f"{TRANSCRIPTION}.completed", "error"))[-1]
            assert completed.get("transcript") == said, completed
        first, *_, last = [item["id"] for item in user_items(client.events)]
        client.socket.send("conversation.item.retrieve", item_id=last)
        await client.until("conversation.item.retrieved")
        client.socket.send("conversation.item.retrieve", item_id=first)
        refused = (await client.until("conversation.item.retrieved", "error"))[-1]
        assert refused["error"]["code"] == "item_retrieve_invalid_item_id"


async def test_without_an_encoder_the_model_gets_words() -> None:
    async with ears(encoder=False, asr=True) as client:
        await client.set(turn_detection=SERVER)
        await client.say(say("show me"), END)
        await client.until("response.done")
        assert client.asked == ["show me"]


# --------------------------------------------------------------------------------------- recordings
def test_long_speech_is_cut_where_it_is_quiet() -> None:
    pcm = cough(28_000) + quiet(500) + cough(20_000) + quiet(1000) + cough(3000)
    files = recordings(pcm, RATE)
    header = len(wav_header(RATE))
    assert b"".join(file[header:] for file in files) == pcm
    lengths = [recorded_ms({"audio": file}) for file in files]
    assert len(lengths) == 2
    assert 28_000 < lengths[0] <= 28_500
    (longest,) = recordings(cough(LONGEST_MS), RATE)
    assert read_audio(longest, 60.0).size <= 30 * 16_000, "as much as Whisper's towers take"


def test_hardly_any_sound_is_none() -> None:
    assert recordings(cough(99), RATE) == []
    assert recordings(cough(100) + b"\0", RATE) == [wav_header(RATE, 4800) + cough(100)]


def spoken(item_id: str, seconds: float) -> Any:
    item = user_audio_item(item_id)
    item["content"][0][SOUND] = recordings(cough(1000 * seconds), RATE)
    return item


def test_the_oldest_sound_makes_room() -> None:
    history = History(pcm_bytes(3500, RATE))
    for number in range(5):
        item = spoken(f"item_{number}", 1.0)
        history.make_room(item)
        history.insert(item)
    assert [item["id"] for item in history.items()] == [f"item_{number}" for number in range(5)]
    assert [item["id"] for item in history.shown()] == ["item_2", "item_3", "item_4"]
    assert [len(message["content"]) for message in chat_messages("", history.shown())] == [1, 1, 1]
    item = spoken("too long", 4.0)
    history.make_room(item)
    with pytest.raises(PayloadTooLarge):
        history.insert(item)


def test_turns_that_were_dropped_stay_dropped() -> None:
    history = History(pcm_bytes(4500, RATE))
    for number in range(4):
        history.insert(spoken(f"item_{number}", 1.0))
    history.keep_turns(1)
    item = spoken("item_4", 1.0)
    history.make_room(item)  # the sound of the first one, which is not shown, is forgotten
    history.insert(item)
    assert [item["id"] for item in history.shown()] == ["item_3", "item_4"]
    history.keep_turns(4)
    assert [item["id"] for item in history.shown()] == ["item_3", "item_4"]
    history.delete("item_3")
    assert [item["id"] for item in history.shown()] == ["item_4"]
    history.delete("item_4")
    assert history.shown() == []
    history.insert(spoken("item_5", 0.2))
    assert [item["id"] for item in history.shown()] == ["item_5"]


# ------------------------------------------------------------------------------- a model that hears
def sound(seed: int, seconds: float) -> bytes:
    """Return PCM at 24 kHz without a sample that is 0: speech to `CodedVad`."""
    times = np.arange(int(seconds * RATE)) / RATE
    rng = np.random.default_rng(seed)
    tones = sum(np.sin(2 * np.pi * pitch * times) for pitch in rng.uniform(100, 4000, 3))
    values = (tones * 4000).astype("<i2")
    return np.where(values == 0, 1, values).astype("<i2").tobytes()


@torch.inference_mode()
def expected(folder: Path, model: Any, messages: list[Any], files: list[bytes], count: int) -> str:
    """Return the reply by `transformers.generate`, greedy."""
    processor = processed_vlms.reference_processor(folder)
    text = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    sounds = [read_audio(data, 60.0) for data in files]
    inputs = processor(text=[text], audio=sounds, add_special_tokens=False, return_tensors="pt")
    made = model.generate(
        **inputs,
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for step in made.logits:
        best, second = step[0].topk(2).values.tolist()
        assert best - second > TIE, "a tie: choose other sounds"
    ids = made.sequences[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.long
async def test_a_spoken_conversation_is_that_of_transformers(tmp_path: Path) -> None:
    model = processed_vlms.write_family(NAME, hearing.FAMILIES[NAME], tmp_path)
    async with vlm_stage.stage(tmp_path) as made, AsyncExitStack() as stack:
        await made.encoder(max_sound=2.0)
        await made.decode()
        await made.tokenizer()
        await made.start(CodedVad(await memory_bus(made.hub, "vad")))
        bus = await memory_bus(made.hub, "gateway")
        stack.push_async_callback(bus.close)
        service = GatewayContext(GatewayConfig(), bus, Metrics("gateway", bus.instance))
        await settle()
        messages: list[Any] = []
        sent = b""
        files: list[bytes] = []
        async with session(App(service), query={"model": vlm_stage.MODEL}) as socket:
            changes = {"temperature": 0, "max_output_tokens": 8}
            socket.send(
                "session.update",
                session={
                    **changes,
                    "audio": {"input": {"turn_detection": {**SERVER, "silence_duration_ms": 320}}},
                },
            )
            await socket.until("session.updated")
            for seed in range(2):
                await append(socket, sound(seed, 0.8) + quiet(640))
                found = await socket.until("response.done")
                start, stop = (
                    next(event[field] for event in found if event["type"].endswith(kind))
                    for kind, field in (
                        ("speech_started", "audio_start_ms"),
                        ("speech_stopped", "audio_end_ms"),
                    )
                )
                sent += sound(seed, 0.8) + quiet(640)
                pcm = sent[pcm_bytes(start, RATE) : pcm_bytes(stop, RATE)]
                files.append(wav_header(RATE, len(pcm)) + pcm)
                messages.append({"role": "user", "content": [{"type": "audio"}]})
                response = found[-1]["response"]
                reply = response["output"][0]["content"][0]["text"]
                assert reply == expected(tmp_path, model, messages, files, 8)
                assert response["usage"]["input_token_details"]["audio_tokens"] > 20 * (seed + 1)
                messages.append({"role": "assistant", "content": reply})
        await service.close()
