"""Spoken conversations with a client that knows nothing of us: raw WebSocket, real NATS, real voice activity."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import websockets

from motet_asr.config import AsrConfig
from motet_asr.service import Asr
from motet_media.audio import a_law_decode, a_law_encode, mu_law_decode, mu_law_encode
from motet_shared.errors import BadRequest, InternalError
from motet_shared.testing import running
from motet_tts.service import Tts
from motet_vad.config import VadConfig
from motet_vad.service import Vad
from support.checkpoints import tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.clients.realtime_client import SPOKEN_TURN, TRANSCRIPTION, Client, kinds, one, sound
from support.media.spoken import say, silence
from support.services.fake_services import MODEL, words
from support.services.voice_services import ASR_MODEL, WORD_MS, tone_ms
from support.stages.tts_stage import config as tts_config
from support.stages.voice_stage import Stage, stage

HELLO = "Two red circles and a blue square."
SPOKEN_REPLY = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio.delta",
    "response.output_audio_transcript.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
    "rate_limits.updated",
]


@pytest.fixture
async def ears() -> AsyncIterator[Stage]:
    async with stage("asr") as made:
        yield made


@pytest.fixture
async def whole() -> AsyncIterator[Stage]:
    async with stage("asr", "vad", "tts") as made:
        yield made


def manual(**audio_input: Any) -> dict[str, Any]:
    return {
        "output_modalities": ["text"],
        "audio": {"input": {"turn_detection": None, **audio_input}},
    }


async def test_a_session_speaks_though_the_voice_was_lost_a_moment_ago(whole: Stage) -> None:
    """It comes back, or another takes its place: the reply waits for that, and is spoken."""
    directory = whole.gateway.bus.directory
    [beat] = directory.ready("tts")
    directory.suspect(beat.instance)
    assert not directory.ready("tts")
    async with whole.talk(audio={"input": {"turn_detection": None}}) as client:
        whole.tokenizer.reply = lambda request: words("One two.")
        await client.send("response.create", response={"instructions": "count"})
        await client.until("response.done")
        assert kinds(client.events)[-len(SPOKEN_REPLY) + 1 :] == SPOKEN_REPLY[:-1]


# ------------------------------------------------------------------------------------------------ the client commits
async def test_a_commit_is_an_item_and_its_words_come_later(ears: Stage) -> None:
    assert ears.asr is not None
    ears.asr.script = ["show me\na circle"]
    pcm = say(HELLO)
    asked = {"model": "whisper-1", "language": "en", "prompt": "shapes"}
    async with ears.talk(**manual(transcription=asked)) as client:
        ears.asr.go_on.clear()
        await client.audio(pcm)
        await client.send("input_audio_buffer.commit")
        events = await client.until("conversation.item.done")
        assert kinds(events) == SPOKEN_TURN[2:]
        item = events[-1]["item"]
        assert item["content"] == [{"type": "input_audio", "transcript": None}]
        await client.send("response.create")
        await client.until("response.created")
        ears.asr.go_on.set()
        events += await client.until("rate_limits.updated")
        deltas = [event["delta"] for event in events if event["type"] == f"{TRANSCRIPTION}.delta"]
        assert deltas == ["show me", " a circle"]
        completed = one(events, f"{TRANSCRIPTION}.completed")
        assert (completed["transcript"], completed["item_id"]) == ("show me a circle", item["id"])
        assert completed["usage"]["seconds"] == pytest.approx(len(pcm) / 48000, abs=0.01)
        await client.send("conversation.item.retrieve", item_id=item["id"])
        kept = (await client.until("conversation.item.retrieved"))[-1]["item"]
        assert kept["content"][0]["transcript"] == "show me a circle"
    assert ears.tokenizer.requests[-1].messages == [{"role": "user", "content": "show me a circle"}]
    assert ears.asr.heard == [(24000, pcm)]
    assert (ears.asr.requests[0].model, ears.asr.requests[0].prompt) == (ASR_MODEL, "shapes")


@pytest.mark.parametrize(
    ("kind", "encode", "decode"),
    [("audio/pcmu", mu_law_encode, mu_law_decode), ("audio/pcma", a_law_encode, a_law_decode)],
)
async def test_the_telephone_is_heard_at_its_rate(
    ears: Stage, kind: str, encode: Any, decode: Any
) -> None:
    assert ears.asr is not None
    data = encode(say(HELLO, 8000))
    async with ears.talk(**manual(format={"type": kind})) as client:
        await client.audio(data)
        await client.send("input_audio_buffer.commit")
        await client.send("response.create")
        await client.until("rate_limits.updated")
    assert ears.asr.heard == [(8000, decode(data))]


async def test_what_cannot_be_heard_is_said_and_the_socket_lives(ears: Stage) -> None:
    async with ears.talk(**manual()) as client:
        await client.send("input_audio_buffer.commit", event_id="mine")
        error = await client.refused()
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
        for audio in ("%%%", "abc", "ä"):
            await client.send("input_audio_buffer.append", audio=audio)
            error = await client.refused()
            assert (error["param"], error["type"]) == ("audio", "invalid_request_error")
        await client.send("input_audio_buffer.append", audio="A" * (15 * 2**20 + 4))
        assert (await client.refused())["code"] == "payload_too_large"
        await client.audio(silence(1000))
        await client.send("input_audio_buffer.clear")
        assert kinds(await client.until("input_audio_buffer.cleared")) == [
            "input_audio_buffer.cleared"
        ]
        await client.send("input_audio_buffer.commit")
        assert (await client.refused())["code"] == "input_audio_buffer_commit_empty"


async def test_the_buffer_is_bounded() -> None:
    async with stage("asr", max_message=100_000) as made, made.talk(**manual()) as client:
        await client.audio(silence(3000), piece=48_000)
        assert (await client.refused())["code"] == "payload_too_large"
        await client.send("input_audio_buffer.commit")
        events = await client.until("conversation.item.done")
        assert kinds(events)[-3:] == SPOKEN_TURN[2:]


async def test_a_transcription_that_fails_is_told_once(ears: Stage) -> None:
    assert ears.asr is not None
    ears.asr.error = BadRequest("nothing to hear")
    async with ears.talk(**manual(transcription={})) as client:
        await client.audio(say(HELLO))
        await client.send("input_audio_buffer.commit")
        failed = (await client.until(f"{TRANSCRIPTION}.failed"))[-1]
        assert failed["error"]["message"] == "nothing to hear"
        await client.send("response.create")
        done = one(await client.until("rate_limits.updated"), "response.done")["response"]
        assert (done["status"], done["status_details"]["error"]["message"]) == (
            "failed",
            "nothing to hear",
        )
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "hello"}],
        }
        await client.send("conversation.item.create", item=item)
        await client.send("response.create")
        assert (
            one(await client.until("rate_limits.updated"), "response.done")["response"]["status"]
            == "completed"
        )


async def test_a_spoken_item_may_be_created_whole(ears: Stage) -> None:
    assert ears.asr is not None
    ears.asr.script = ["a star"]
    async with ears.talk(**manual()) as client:
        part = {"type": "input_audio", "audio": base64.b64encode(say(HELLO)).decode()}
        item = {"type": "message", "role": "user", "content": [part]}
        await client.send("conversation.item.create", item=item)
        await client.send("response.create")
        await client.until("rate_limits.updated")
    assert ears.tokenizer.requests[-1].messages == [{"role": "user", "content": "a star"}]


async def test_a_server_without_a_role_names_it(ears: Stage) -> None:
    async with ears.talk() as client:
        created = client.events[0]["session"]
        assert (created["output_modalities"], created["audio"]["input"]["turn_detection"]) == (
            ["text"],
            None,
        )
        for session, role in (
            ({"output_modalities": ["audio"]}, "tts"),
            ({"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}, "vad"),
            ({"audio": {"output": {"voice": "alto"}}}, "tts"),
        ):
            await client.send("session.update", session=session)
            assert f"no {role} is ready" in (await client.refused())["message"]
        await client.send(
            "session.update", session={"audio": {"input": {"transcription": {"model": "bogus"}}}}
        )
        await client.until("session.updated", "error")


# ------------------------------------------------------------------------------------------------- turns are detected
async def test_a_spoken_turn_with_a_spoken_reply(whole: Stage) -> None:
    assert whole.asr is not None
    whole.asr.script = ["two red circles"]
    whole.tokenizer.reply = lambda request: words("Here they are. Both of them are red, I think.")
    async with whole.talk(audio={"input": {"transcription": {}}}) as client:
        session = client.events[-1]["session"]
        assert session["output_modalities"] == ["audio"]
        assert session["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 500
        spoken = say(HELLO)
        await client.audio(silence(900) + spoken + silence(900))
        events = await client.until("rate_limits.updated")
    assert kinds(events, heard=False) == SPOKEN_TURN + SPOKEN_REPLY
    started, stopped = one(events, SPOKEN_TURN[0]), one(events, SPOKEN_TURN[1])
    length = len(spoken) / 48
    assert 500 <= started["audio_start_ms"] <= 900
    assert 900 + length + 200 <= stopped["audio_end_ms"] <= 900 + length + 800
    assert started["item_id"] == stopped["item_id"] == one(events, SPOKEN_TURN[2])["item_id"]
    assert one(events, f"{TRANSCRIPTION}.completed")["transcript"] == "two red circles"
    assert len(whole.asr.heard[0][1]) / 48 == pytest.approx(
        stopped["audio_end_ms"] - started["audio_start_ms"], abs=2
    )
    done = one(events, "response.done")["response"]
    transcript = "Here they are. Both of them are red, I think."
    assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": transcript}]
    assert tone_ms(sound(events)) == len(transcript.split()) * WORD_MS
    said = [e["delta"] for e in events if e["type"] == "response.output_audio_transcript.delta"]
    assert "".join(said) == transcript
    assert done["usage"]["output_token_details"]["audio_tokens"] == len(transcript.split())
    assert whole.tts is not None
    asked = [request.text for request in whole.tts.requests]
    assert asked == ["Here they are.", "Both of them are red, I think."]


async def test_words_come_with_their_sound(whole: Stage) -> None:
    """At each moment the captions are those of the sound that came."""
    async with whole.talk(audio={"input": {"turn_detection": None}}) as client:
        assert whole.tts is not None
        whole.tts.pace = 0.002
        text = "One two three four five six. Seven eight."
        whole.tokenizer.reply = lambda request: words(text)
        await ask(client, "go")
        events = await client.until("rate_limits.updated")
    heard, captions = 0, ""
    for event in events:
        if event["type"] == "response.output_audio.delta":
            heard += tone_ms(base64.b64decode(event["delta"]))
        elif event["type"] == "response.output_audio_transcript.delta":
            captions += event["delta"]
            assert len(captions.split()) * WORD_MS == heard
    assert captions == text


async def test_speech_interrupts_the_reply(whole: Stage) -> None:
    assert whole.asr is not None
    assert whole.tts is not None
    whole.asr.script = ["tell me a story", "stop it"]
    whole.tokenizer.reply = lambda request: words("Once upon a time. " * 40)
    whole.tts.pace = 0.15
    async with whole.talk() as client:
        await client.audio(silence(500) + say(HELLO) + silence(900))
        events = await client.until("response.output_audio_transcript.delta")
        whole.tokenizer.reply = lambda request: words("Sorry.")
        await client.audio(say(HELLO) + silence(900))
        events = await client.until("response.done")
        order = [kind for kind in kinds(events) if kind != "response.output_audio.delta"]
        assert order[-7:] == ["input_audio_buffer.speech_started", *SPOKEN_REPLY[6:12]] or (
            "input_audio_buffer.speech_started" in order and order[-6:] == SPOKEN_REPLY[6:12]
        )
        done = events[-1]["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
        item = done["output"][0]
        assert item["status"] == "incomplete"
        told = item["content"][0]["transcript"]
        assert 0 < len(told) < len("Once upon a time. " * 40)
        again = await client.until("rate_limits.updated") + await client.until(
            "rate_limits.updated"
        )
        assert (
            one(again, "response.done")["response"]["output"][0]["content"][0]["transcript"]
            == "Sorry."
        )
    assert whole.tts.cancelled == 1
    roles = [
        (message["role"], message["content"]) for message in whole.tokenizer.requests[-1].messages
    ]
    assert roles == [("user", "tell me a story"), ("assistant", told), ("user", "stop it")]


async def test_a_noise_without_words_gets_no_reply(whole: Stage) -> None:
    assert whole.asr is not None
    whole.asr.script = ["", "hello"]
    async with whole.talk() as client:
        await client.audio(
            silence(500) + say("Hello there.") + silence(1500) + say(HELLO) + silence(900)
        )
        events = await client.until("rate_limits.updated")
    assert kinds(events).count("input_audio_buffer.committed") == 2
    assert len(whole.tokenizer.requests) == 1


async def test_a_turn_is_answered_though_a_noise_follows_before_its_words(whole: Stage) -> None:
    assert whole.asr is not None
    whole.asr.script = ["show me a circle", ""]
    async with whole.talk() as client:
        whole.asr.go_on.clear()
        for sound in (say(HELLO), say("Hello there.")):
            await client.audio(silence(500) + sound + silence(900))
            await client.until("conversation.item.done")
        whole.asr.go_on.set()
        await client.until("response.done")
    (request,) = whole.tokenizer.requests
    assert request.messages[0] == {"role": "user", "content": "show me a circle"}


async def test_a_reply_that_is_asked_for_before_the_words_are_known_is_the_only_one(
    whole: Stage,
) -> None:
    assert whole.asr is not None
    whole.asr.script = ["show me a circle"]
    async with whole.talk() as client:
        whole.asr.go_on.clear()
        await client.audio(silence(500) + say(HELLO) + silence(900))
        await client.until("conversation.item.done")
        await client.send("response.create")
        await client.until("response.created")
        whole.asr.go_on.set()
        await client.until("response.done")
        await asyncio.sleep(0.5)
    assert len(whole.tokenizer.requests) == 1


async def test_detection_without_replies(whole: Stage) -> None:
    turns = {
        "type": "server_vad",
        "create_response": False,
        "silence_duration_ms": 200,
        "prefix_padding_ms": 0,
    }
    async with whole.talk(audio={"input": {"turn_detection": turns}}) as client:
        await client.audio(silence(500) + say(HELLO) + silence(900))
        assert kinds(await client.until("conversation.item.done")) == SPOKEN_TURN
        await client.send("response.create")
        assert kinds(await client.until("response.created")) == ["response.created"]


async def test_long_silence_asks_the_model_to_speak(whole: Stage) -> None:
    turns = {"type": "server_vad", "idle_timeout_ms": 1000}
    whole.tokenizer.reply = lambda request: words("Are you there?")
    async with whole.talk(
        instructions="Be kind.", audio={"input": {"turn_detection": turns}}
    ) as client:
        await client.audio(silence(1100))
        events = await client.until("rate_limits.updated")
    assert kinds(events)[:4] == ["input_audio_buffer.timeout_triggered", *SPOKEN_TURN[2:]]
    assert (events[0]["audio_start_ms"], events[0]["audio_end_ms"]) == (0, 1000)
    assert one(events, "response.done")["response"]["status"] == "completed"


async def test_turns_are_detected_when_the_service_dies(whole: Stage) -> None:
    """Another instance hears the turn from its beginning: no edge is lost, none told twice."""
    assert whole.vad is not None
    assert whole.asr is not None
    whole.asr.script = ["two red circles"]
    async with running(Vad(VadConfig(metrics_port=-1), await whole.nats.bus("vad"))) as other:
        await whole.gateway.bus.directory.wait_for(lambda d: len(d.ready("vad")) == 2, 5)
        async with whole.talk() as client:
            await client.audio(silence(500) + say(HELLO))
            await client.until("input_audio_buffer.speech_started")
            serving = next(vad for vad in (whole.vad, other) if vad.bus.calls.active)
            await serving.bus.close()
            await client.audio(silence(900))
            events = await client.until("rate_limits.updated")
    assert kinds(events)[:4] == SPOKEN_TURN[1:]


# ------------------------------------------------------------------------------------------------------ what is heard
async def ask(client: Client, text: str) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    await client.send("conversation.item.create", item=item)
    await client.until("conversation.item.done")
    await client.send("response.create")


async def test_truncation_keeps_the_words_that_were_heard(whole: Stage) -> None:
    whole.tokenizer.reply = lambda request: words("One two three. Four five six.")
    async with whole.talk(audio={"input": {"turn_detection": None}}) as client:
        await ask(client, "count")
        item = one(await client.until("rate_limits.updated"), "response.done")["response"][
            "output"
        ][0]

        async def truncate(ms: int) -> None:
            await client.send(
                "conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=ms
            )

        await truncate(6 * WORD_MS + 1)
        assert (await client.refused())["param"] == "audio_end_ms"
        for ms, left in (
            (4 * WORD_MS + 50, "One two three. Four"),
            (2 * WORD_MS, "One two"),
            (10, ""),
        ):
            await truncate(ms)
            truncated = (await client.until("conversation.item.truncated"))[-1]
            assert (truncated["item_id"], truncated["audio_end_ms"]) == (item["id"], ms)
            await client.send("conversation.item.retrieve", item_id=item["id"])
            kept = (await client.until("conversation.item.retrieved"))[-1]["item"]
            assert kept["content"] == [{"type": "output_audio", "transcript": left}]
        await truncate(11)
        assert (await client.refused())["param"] == "audio_end_ms"


@pytest.mark.parametrize(
    ("kind", "decode"), [("audio/pcmu", mu_law_decode), ("audio/pcma", a_law_decode)]
)
async def test_the_telephone_gets_its_format(whole: Stage, kind: str, decode: Any) -> None:
    output = {"format": {"type": kind}, "voice": "bass", "speed": 1.25}
    async with whole.talk(audio={"input": {"turn_detection": None}, "output": output}) as client:
        await ask(client, "hello")
        events = await client.until("rate_limits.updated")
        pcm = decode(sound(events))
        assert tone_ms(pcm, 8000) == 3 * WORD_MS
        assert (
            max(
                int.from_bytes(pcm[i : i + 2], "little", signed=True) for i in range(0, len(pcm), 2)
            )
            > 7000
        )
        for voice, message in (("alto", "cannot change"), ("nobody", "cannot change")):
            await client.send("session.update", session={"audio": {"output": {"voice": voice}}})
            assert message in (await client.refused())["message"]
    assert whole.tts is not None
    assert (whole.tts.requests[0].voice, whole.tts.requests[0].speed) == ("bass", 1.25)


async def test_a_voice_that_fails_fails_the_response(whole: Stage) -> None:
    assert whole.tts is not None
    whole.tts.error = InternalError("no breath")
    async with whole.talk(audio={"input": {"turn_detection": None}}) as client:
        await ask(client, "hello")
        done = one(await client.until("rate_limits.updated"), "response.done")["response"]
        assert (done["status"], done["status_details"]["error"]["message"]) == (
            "failed",
            "no breath",
        )
        whole.tts.error = None
        await ask(client, "again")
        assert (
            one(await client.until("rate_limits.updated"), "response.done")["response"]["status"]
            == "completed"
        )
        await client.send("session.update", session={"audio": {"output": {"voice": "nobody"}}})
        assert (await client.refused())["param"] == "session.audio.output.voice"


# ------------------------------------------------------------------------------------------------ it only listens
async def test_a_transcription_session(whole: Stage) -> None:
    assert whole.asr is not None
    whole.asr.script = ["two red circles", "a blue square"]
    url = f"ws://127.0.0.1:{whole.gateway.port}/v1/realtime?intent=transcription"
    async with websockets.connect(url, proxy=None) as socket:
        client = Client(socket)
        created = (await client.until("session.created"))[0]["session"]
        assert (created["type"], list(created["audio"])) == ("transcription", ["input"])
        setting = {
            "type": "transcription",
            "audio": {"input": {"transcription": {"model": "whisper-1"}}},
        }
        await client.send("session.update", session=setting)
        await client.until("session.updated")
        for words_said in ("two red circles", "a blue square"):
            await client.audio(silence(500) + say(HELLO) + silence(900))
            events = await client.until(f"{TRANSCRIPTION}.completed")
            assert kinds(events, heard=False) == SPOKEN_TURN
            assert events[-1]["transcript"] == words_said
        await client.send("response.create")
        assert "transcription session" in (await client.refused())["message"]
    assert not whole.tokenizer.requests


# --------------------------------------------------------------------------------------------- the official client
async def test_the_official_client_talks_and_interrupts(whole: Stage) -> None:
    assert whole.asr is not None
    assert whole.tts is not None
    whole.asr.script = ["tell me a story", "stop"]
    whole.tokenizer.reply = lambda request: words("Once upon a time. " * 40)
    whole.tts.pace = 0.02
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    base = f"http://127.0.0.1:{whole.gateway.port}/v1"
    async with (
        openai.AsyncOpenAI(base_url=base, api_key="x", http_client=http) as client,
        client.realtime.connect(model=MODEL) as connection,
        asyncio.timeout(20),
    ):
        turns: Any = {"type": "server_vad", "silence_duration_ms": 300}
        output: Any = {"voice": "marin"}
        await connection.session.update(
            session={
                "type": "realtime",
                "audio": {"input": {"turn_detection": turns}, "output": output},
            }
        )
        await speak_to(connection, silence(500) + say(HELLO) + silence(600))
        heard, item_id = 0, ""
        statuses: list[Any] = []
        async for event in connection:
            assert event.type != "error", event
            if event.type == "response.output_audio.delta":
                heard, item_id = heard + tone_ms(base64.b64decode(event.delta)), event.item_id
                if heard == 3 * WORD_MS and not statuses:
                    whole.tokenizer.reply = lambda request: words("Sorry.")
                    await speak_to(connection, say(HELLO) + silence(600))
            elif event.type == "input_audio_buffer.speech_started" and item_id:
                await connection.conversation.item.truncate(
                    item_id=item_id, content_index=0, audio_end_ms=2 * WORD_MS + 50
                )
            elif event.type == "response.done":
                statuses.append((event.response.status, event.response.status_details))
                if len(statuses) == 2:
                    break
    assert [status for status, _ in statuses] == ["cancelled", "completed"]
    assert statuses[0][1].reason == "turn_detected"
    contents = [message["content"] for message in whole.tokenizer.requests[-1].messages]
    assert contents == ["tell me a story", "Once upon", "stop"]


async def speak_to(connection: Any, pcm: bytes) -> None:
    for start in range(0, len(pcm), 9600):
        await connection.input_audio_buffer.append(
            audio=base64.b64encode(pcm[start : start + 9600]).decode()
        )


# --------------------------------------------------------------------------------------------------- real models
async def test_models_of_real_architectures_listen_and_speak(tmp_path: Path) -> None:
    """Whisper and pocket_tts with random weights: what is said means nothing, but all of it has its place in time."""
    ears_at = tiny_whisper(tmp_path / "asr")
    voice_at = tts_checkpoints.pocket_tts(tmp_path / "tts", sample=True, threshold=0.2)
    async with stage() as made, AsyncExitStack() as stack:
        asr = Asr(
            AsrConfig(model=str(ears_at), name="ears", fallback=False, threads=1),
            await made.nats.bus("asr"),
        )
        actors = [asr, Tts(tts_config(voice_at), await made.nats.bus("tts"))]
        for actor in actors:
            await stack.enter_async_context(running(actor))
        directory = made.gateway.bus.directory
        await directory.wait_for(lambda d: d.ready("asr") and d.ready("tts"), 20)
        text = "The blue circle is left of the star. It is small."
        made.tokenizer.reply = lambda request: words(text)
        heard_as = {"turn_detection": None, "transcription": {"model": "ears", "language": "en"}}
        async with made.talk(audio={"input": heard_as}) as client:
            await client.audio(say(HELLO))
            await client.send("input_audio_buffer.commit")
            transcript = (await client.until(f"{TRANSCRIPTION}.completed"))[-1]["transcript"]
            await client.send("response.create")
            events = await client.until("rate_limits.updated")
            assert kinds(events) == SPOKEN_REPLY
            item = one(events, "response.done")["response"]["output"][0]
            assert item["content"][0]["transcript"] == text
            ms = tone_ms(sound(events))
            assert ms > 0
            await client.send(
                "conversation.item.truncate",
                item_id=item["id"],
                content_index=0,
                audio_end_ms=ms // 2,
            )
            await client.until("conversation.item.truncated")
            await client.send("conversation.item.retrieve", item_id=item["id"])
            kept = (await client.until("conversation.item.retrieved"))[-1]["item"]["content"][0][
                "transcript"
            ]
            assert text.startswith(kept)
            assert 0 < len(kept) < len(text)
        assert made.tokenizer.requests[-1].messages == [{"role": "user", "content": transcript}]
