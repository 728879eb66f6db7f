"""Words while they are spoken: real voice activity, a real judge of turns, and recognizers that may be killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motet_asr.config import AsrConfig
from motet_asr.service import Asr
from motet_pipelines.voice.end_of_turn import LONGEST_MS
from motet_shared.testing import running
from motet_shared.wire.bus import Bus
from motet_vad.config import VadConfig
from motet_vad.service import Vad
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.clients.realtime_client import TRANSCRIPTION, Client, kinds, one
from support.media.spoken import say, silence
from support.running.service_process import service_process
from support.services.fake_services import words
from support.services.voice_services import LiveAsr
from support.stages.voice_stage import Stage, stage

TURNS = Path(__file__).parents[3] / "models" / "pocket-turns"
HELLO = say("Two red circles and a blue square.")
SPOKEN_TURN = ["speech_started", "speech_stopped", "committed"]


@asynccontextmanager
async def judged() -> AsyncIterator[tuple[Stage, LiveAsr]]:
    """With real voice activity that knows when somebody has finished."""
    async with stage("tts") as made, AsyncExitStack() as stack:
        asr = LiveAsr(await made.nats.bus("asr"))
        vad = Vad(VadConfig(metrics_port=-1, turns=str(TURNS)), await made.nats.bus("vad"))
        for actor in (asr, vad):
            await stack.enter_async_context(running(actor))
        await made.gateway.bus.directory.wait_for(lambda d: d.ready("asr") and d.ready("vad"), 20)
        yield made, asr


async def speak(client: Client, pcm: bytes, pause: float = 0.02) -> None:
    """Five times as fast as people do."""
    for start in range(0, len(pcm), 4800):
        await client.audio(pcm[start : start + 4800])
        await asyncio.sleep(pause)


def told(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"{TRANSCRIPTION}.delta")


def turn_of(events: list[dict[str, Any]]) -> list[str]:
    kind = "input_audio_buffer."
    return [event["type"].removeprefix(kind) for event in events if event["type"].startswith(kind)]


async def test_the_judge_decides_how_long_a_turn_may_pause() -> None:
    async with judged() as (made, asr):
        turns = {"type": "semantic_vad", "eagerness": "high"}
        async with made.talk(
            audio={"input": {"turn_detection": turns}}, output_modalities=["text"]
        ) as client:
            lasted = []
            for text in ("show me the red circle", "show me the"):
                asr.script = [text]
                await speak(
                    client, silence(400) + HELLO + silence(LONGEST_MS["high"] + 300), pause=0.005
                )
                events = await client.until("rate_limits.updated")
                assert turn_of(events) == SPOKEN_TURN
                one_turn = [one(events, f"input_audio_buffer.{kind}") for kind in SPOKEN_TURN[:2]]
                lasted.append(one_turn[1]["audio_end_ms"] - one_turn[0]["audio_start_ms"])
                assert made.tokenizer.requests[-1].messages[-1] == {"role": "user", "content": text}
    assert lasted[1] - lasted[0] > 700, "what is not finished is waited for"
    assert not asr.requests, "nothing is heard twice"


async def test_words_interrupt_the_official_way_and_mhm_does_not() -> None:
    async with judged() as (made, asr):
        made.tokenizer.reply = lambda request: words("Once upon a time. " * 30)
        assert made.tts is not None
        made.tts.pace = 0.02
        asr.script = ["tell me a story"]
        async with made.talk() as client:
            await speak(client, silence(400) + HELLO + silence(900))
            await client.until("response.output_audio_transcript.delta")
            asr.script = ["Mhm, yeah."]
            await speak(client, say("Hello there.") + silence(900), pause=0.01)
            asr.script = ["no, stop it"]
            speaking = asyncio.create_task(speak(client, HELLO + silence(900)))
            events = await client.until("response.done")
            await speaking
            assert events[-1]["response"]["status"] == "cancelled"
            assert turn_of(events)[0] == "speech_started"
            assert turn_of(events).count("speech_started") == 1
            made.tokenizer.reply = lambda request: words("Sorry.")
            if "input_audio_buffer.committed" not in kinds(events):
                await client.until("input_audio_buffer.committed")
            await client.until("response.done")
        said = [message["content"] for message in made.tokenizer.requests[-1].messages]
        assert (said[0], said[2]) == ("tell me a story", "no, stop it")


# --------------------------------------------------------------------------------------------------- real recognizers
HEARD = {"transcription": {"model": "ears", "language": "en"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Whisper, whose words mean nothing."""
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


def whisper(folder: Path, bus: Bus) -> Asr:
    config = AsrConfig(
        model=str(folder),
        name="ears",
        fallback=False,
        threads=1,
        partial_every=0.3,
        metrics_port=-1,
    )
    return Asr(config, bus)


async def ready(made: Stage, count: int) -> None:
    await made.gateway.bus.directory.wait_for(lambda d: len(d.ready("asr")) == count, 100)


async def completed(client: Client) -> dict[str, Any]:
    """The words of the only turn, which the deltas add up to."""
    while f"{TRANSCRIPTION}.completed" not in kinds(client.events):
        await client.next()
    event = one(client.events, f"{TRANSCRIPTION}.completed")
    assert told(client.events) == event["transcript"]
    return event


async def test_a_real_recognizer_hears_live(folder: Path) -> None:
    async with stage("vad") as made, running(whisper(folder, await made.nats.bus("asr"))):
        await ready(made, 1)
        async with made.talk(output_modalities=["text"], audio={"input": HEARD}) as client:
            await speak(client, silence(400) + HELLO, pause=0.05)
            await speak(client, silence(900), pause=0.0)
            event = await completed(client)
            started = one(client.events, "input_audio_buffer.speech_started")["item_id"]
            assert {
                one["item_id"] for one in client.events if one["type"].startswith(TRANSCRIPTION)
            } == {started}
            await client.send("conversation.item.retrieve", item_id=started)
            kept = (await client.until("conversation.item.retrieved"))[-1]["item"]["content"][0][
                "transcript"
            ]
            assert kept == event["transcript"]


@pytest.mark.long
async def test_a_recognizer_is_killed_while_somebody_speaks(folder: Path) -> None:
    """The other one hears the turn from its beginning: its words begin with those that were told."""
    argv = ("--model", str(folder), "--name", "ears", "--no-fallback", "--partial-every", "0.3")
    async with stage("vad") as made, service_process(made.nats, "motet_asr", *argv) as process:
        await ready(made, 1)
        async with made.talk(output_modalities=["text"], audio={"input": HEARD}) as client:
            await speak(client, silence(400) + HELLO, pause=0.05)
            async with running(whisper(folder, await made.nats.bus("asr"))):
                await ready(made, 2)
                process.kill()
                await speak(client, HELLO + silence(900), pause=0.01)
                assert (await completed(client))["transcript"]


async def test_log_probabilities_come_with_a_transcript_of_the_whole_turn(folder: Path) -> None:
    async with stage() as made, running(whisper(folder, await made.nats.bus("asr"))):
        await ready(made, 1)
        include = ["item.input_audio_transcription.logprobs"]
        async with made.talk(audio={"input": HEARD}, include=include) as client:
            await client.audio(HELLO)
            await client.send("input_audio_buffer.commit")
            events = await client.until(f"{TRANSCRIPTION}.completed")
        done = events[-1]
        deltas = [event for event in events if event["type"] == f"{TRANSCRIPTION}.delta"]
        assert "".join(event["delta"] for event in deltas) == done["transcript"]
        assert [one for event in deltas for one in event["logprobs"]] == done["logprobs"]
        text = "".join(one["token"] for one in done["logprobs"])
        assert text.strip() == done["transcript"].strip() != ""
        assert all(bytes(one["bytes"]).decode() == one["token"] for one in done["logprobs"])
        assert all(one["logprob"] <= 0 for one in done["logprobs"])
