"""A reply that is interrupted: how soon each stage is free, counted in messages, engine steps and sounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e import markov
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_pipelines.voice.voice import reply
from motet_shared.messages import Audio, Cancel, Chat, Sampling, Speak, Text, decode_controls
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import Epoch
from motet_shared.wire.subjects import role_of
from motet_shared.wire.transport import Message
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.media.spoken import say, silence
from support.services.fake_services import words
from support.stages.tts_stage import config as tts_config
from support.stages.voice_stage import stage as stage_with_clients

pytestmark = pytest.mark.long

MODEL = "markov"
STEPS = 2  # the one that computes when the cancel comes, and one that was prepared meanwhile


@dataclass
class Folders:
    llm: Path
    tts: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    return Folders(
        markov.save(root / MODEL, sentences=True),
        tts_checkpoints.pocket_tts(root / "tts", sample=True),
    )


class Meter:
    """How many steps an engine has computed when it is asked to cancel, and how many when nothing of it is left."""

    def __init__(self, thread: Any, patch: pytest.MonkeyPatch):
        self.thread, self.asked = thread, -1
        self._cancel: Callable[[Any], None] = thread.cancel
        patch.setattr(thread, "cancel", self._ask)

    def _ask(self, key: Any) -> None:
        if self.asked < 0:
            self.asked = self.steps
        self._cancel(key)

    @property
    def steps(self) -> int:
        return int(self.thread.engine.stats()["steps"])

    async def steps_until_free(self) -> int:
        async with asyncio.timeout(60):
            while _busy(self.thread):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return self.steps - self.asked if self.asked >= 0 else 0


@dataclass
class Stage:
    """All stages of a reply on a bus in memory, and the cancels that pass on it."""

    hub: MemoryHub
    gateway: Bus
    tokenizer: Tokenizer
    decode: Decode
    tts: Tts
    cancels: list[str] = field(default_factory=list)  # roles, in order

    def overhear(self, message: Message) -> bool:
        if message.subject.endswith(".ctl"):
            controls = decode_controls(message.data).controls
            role = role_of(message.subject.split(".")[4])
            self.cancels += [role for control in controls if isinstance(control, Cancel)]
        return False

    def reply(self, epoch: Epoch, tokens: int = 3000) -> Any:
        sampling = Sampling(temperature=1.0, seed=3, ignore_eos=True)
        think = Chat(
            model=MODEL,
            messages=[{"role": "user", "content": "Go on"}],
            sampling=sampling,
            max_tokens=tokens,
        )
        return reply(self.gateway, think, Speak(model="tiny-tts", text="", seed=5), epoch=epoch)

    async def idle(self) -> None:
        """Nothing is held anywhere."""
        actors, threads = (
            (self.tokenizer, self.decode, self.tts),
            (self.decode.thread, self.tts.sessions.thread),
        )
        async with asyncio.timeout(60):
            while any(actor.bus.calls.active for actor in actors) or any(map(_busy, threads)):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await settle()
        for actor in actors:
            actor.check_integrity()
        self.gateway.check_integrity()
        assert not self.gateway.caller.streams
        assert not self.tokenizer.bus.caller.streams
        assert not self.tts.sessions.queues
        stats = self.decode.stats()
        assert stats["blocks_free"] == stats["blocks_total"]


def _busy(thread: Any) -> float:
    stats = thread.stats()
    return float(stats["running"] + stats["waiting"] + stats["commands"])


@pytest.fixture
async def stage(folders: Folders) -> AsyncIterator[Stage]:
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        gateway = await memory_bus(hub, "gateway")
        stack.push_async_callback(gateway.close)
        settings = TokenizerConfig(model=(f"{MODEL}={folders.llm}",), metrics_port=-1)
        tokenizer = Tokenizer(settings, await memory_bus(hub, "tokenizer"))
        llm = DecodeConfig(
            model=str(folders.llm), name=MODEL, threads=1, metrics_port=-1, prefix_cache=False
        )
        decode = Decode(llm, await memory_bus(hub, "decode"))
        tts = Tts(tts_config(folders.tts, threads=1), await memory_bus(hub, "tts"))
        for actor in (decode, tokenizer, tts):
            await stack.enter_async_context(running(actor))
        await settle()
        made = Stage(hub, gateway, tokenizer, decode, tts)
        hub.lose = made.overhear
        yield made


@pytest.mark.parametrize(("kind", "count"), [(Text, 1), (Text, 5), (Audio, 1), (Audio, 4)])
async def test_each_stage_is_free_within_a_step_of_its_cancel(
    stage: Stage, kind: type, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters = Meter(stage.decode.thread, monkeypatch), Meter(stage.tts.sessions.thread, monkeypatch)
    batches = stage.reply(Epoch("sess_a", 1))
    async for batch in batches:
        count -= isinstance(batch[0], kind)
        if not count:
            break
    assert stage.decode.bus.calls.active
    stage.cancels.clear()
    await batches.aclose()
    assert not stage.gateway.caller.streams, "no frame of it is taken any more"
    steps = [await meter.steps_until_free() for meter in meters]
    await settle()
    assert max(steps) <= STEPS, f"decode, tts: {steps}"
    if kind is Audio:
        assert meters[1].asked >= 0, "a sentence was being spoken"
        assert set(stage.cancels) == {"decode", "tokenizer", "tts"}
    assert stage.cancels.index("tokenizer") < stage.cancels.index("decode"), (
        "who is asked asks decode"
    )
    await stage.idle()


async def test_an_interruption_before_the_first_word(stage: Stage) -> None:
    batches = stage.reply(Epoch("sess_a", 1))
    first = asyncio.ensure_future(anext(batches))
    await settle(3)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await batches.aclose()
    await stage.idle()


async def test_the_next_reply_frees_what_a_lost_cancel_has_left(stage: Stage) -> None:
    """The fence: with every cancel lost, each stage drops the old reply when it sees the new one."""

    def lose_cancels(message: Message) -> bool:
        before = len(stage.cancels)
        stage.overhear(message)
        return len(stage.cancels) > before

    stage.hub.lose = lose_cancels
    old = stage.reply(Epoch("sess_a", 1))
    async for batch in old:
        if isinstance(batch[0], Audio):
            break
    await old.aclose()
    assert stage.cancels
    new = stage.reply(Epoch("sess_a", 2))
    async for batch in new:
        if isinstance(batch[0], Audio):
            break
    stage.hub.lose = lambda message: False
    for actor in (stage.tokenizer, stage.decode, stage.tts):
        assert {call.epoch.number for call in actor.bus.calls.active.values()} <= {2}, actor.role
    await new.aclose()
    await stage.idle()


async def test_no_sound_follows_detected_speech() -> None:
    """Between the event that tells of it and the end of the reply there is nothing to play, however much was made."""
    async with stage_with_clients("asr", "vad", "tts") as made:
        assert made.asr is not None
        assert made.tts is not None
        made.asr.script = ["tell me a story", "stop"]
        made.tokenizer.reply = lambda request: words("Once upon a time. " * 40)
        made.tokenizer.pace = made.tts.pace = 0.002
        turns = {"type": "server_vad", "interrupt_on": "speech"}
        async with made.talk(audio={"input": {"turn_detection": turns}}) as client:
            await client.audio(silence(500) + say("Tell me a story.") + silence(900))
            await client.until("response.output_audio.delta")
            await client.audio(say("Stop it now, please."))
            events = await client.until("response.done")
            after = [event["type"] for event in events]
            after = after[after.index("input_audio_buffer.speech_started") :]
            assert after.count("response.output_audio.delta") <= 1, (
                "one may be on its way to the socket"
            )
            assert events[-1]["response"]["status_details"]["reason"] == "turn_detected"
            await client.audio(silence(900))
            await client.until("input_audio_buffer.committed")
        for actor in (made.tts, made.tokenizer, made.gateway):
            async with asyncio.timeout(60):
                while actor.bus.calls.active:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            actor.check_integrity()
