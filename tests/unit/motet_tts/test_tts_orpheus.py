"""Speech whose tokens decode generates: over the bus, and when decode is late, dies, is left or missing."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from motet_llm.service import Decode
from motet_shared.errors import ConfigError, DeadlineExceeded, Unavailable, UnknownModel
from motet_shared.testing import die
from motet_shared.wire.bus import Bus
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import Utterance
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.running.refusals import refuses
from support.stages.tts_stage import Speech, ask, decoding, said, stage

TEXT = "One circle is red. Two more are not."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    return tts_checkpoints.orpheus(root / "model", sample=True)


async def heard(bus: Bus, items: int, speech: Speech, **options: Any) -> None:
    """Return when so many items have come; the stream is left."""
    async with bus.open("tts", ask(TEXT, **options)) as stream:
        async for item in stream:
            speech.items.append(item)  # type: ignore[arg-type]
            if len(speech.items) == items:
                return


async def idle(tts: Tts, *decodes: Decode) -> None:
    async with asyncio.timeout(30):
        while tts.bus.calls.active or any(one.bus.calls.active for one in decodes):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    for actor in (tts, *decodes):
        actor.check_integrity()


async def test_it_is_streamed_and_the_same_again(folder: Path) -> None:
    async with (
        stage(folder, language_model="model") as (bus, (tts,), hub),
        decoding(hub, folder) as llm,
    ):
        speech, again = await said(bus, ask(TEXT)), await said(bus, ask(TEXT))
        assert speech.pcm == again.pcm != (await said(bus, ask(TEXT, seed=8))).pcm
        assert speech.items[-1].text == len(TEXT)
        assert len(speech.items) >= 2 * len({item.sentence for item in speech.items})
        usage = speech.outcome.usage
        assert usage.completion_tokens * 32 * 2 == len(speech.pcm)  # frames of 32 samples
        await idle(tts, llm)


async def test_decode_dies_and_another_instance_continues(folder: Path) -> None:
    async with stage(folder) as (bus, _, hub), decoding(hub, folder) as survivor:
        whole = await said(bus, ask(TEXT))
        async with decoding(hub, folder) as other:
            task = asyncio.create_task(said(bus, ask(TEXT)))
            async with asyncio.timeout(60):
                while not (survivor.bus.calls.active or other.bus.calls.active):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            victim, left = (survivor, other) if survivor.bus.calls.active else (other, survivor)
            die(victim.bus)
            assert (await asyncio.wait_for(task, 60)).pcm == whole.pcm
            assert not left.bus.calls.active


async def test_a_caller_that_leaves_stops_decode(folder: Path) -> None:
    async with stage(folder) as (bus, (tts,), hub), decoding(hub, folder) as llm:
        await heard(bus, 1, Speech())
        await idle(tts, llm)


async def test_a_deadline_ends_it_everywhere(folder: Path) -> None:
    async with stage(folder) as (bus, (tts,), hub), decoding(hub, folder) as llm:
        with pytest.raises(DeadlineExceeded):
            await said(bus, ask(TEXT * 20), deadline=0.3)
        await idle(tts, llm)


async def test_without_decode_it_is_refused_with_the_cause(folder: Path) -> None:
    async with stage(folder, patience=0.05) as (bus, (tts,), hub):
        with refuses(Unavailable, "model"):
            await said(bus, ask(TEXT), patience=0.0)
        async with decoding(hub, folder, name="another"):
            with refuses(UnknownModel, "model"):
                await said(bus, ask(TEXT))
        await idle(tts)


async def test_the_context_of_decode_bounds_a_sentence(folder: Path) -> None:
    async with stage(folder) as (bus, _, hub), decoding(hub, folder, context=128):
        speech = await said(bus, ask("One circle."))
        assert 0 < len(speech.pcm) < 64 * 128 // 7


def test_control_tokens_and_wrong_tokens_are_left_out(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder)))
    voice = engine.voices[0]
    for key, words in (
        ("given", ("a", "<custom_<|eot_id|>token_2>", "<b>")),
        ("plain", ("a", "<b>")),
    ):
        engine.add(key, Utterance(words=words, voice=voice))
    asked = {output.key: output.generate for output in engine.step()}
    assert asked["given"]
    assert asked["plain"]
    ids = [asked[key].prompt for key in ("given", "plain")]  # type: ignore[union-attr]
    assert [token for token in ids[0] if token != ord(" ")][:-4] != ids[0]
    assert {token for token in ids[0] if token >= 259} == {
        token for token in ids[1] if token >= 259
    }
    first = next(token for token in ids[0] if token > 259) - 3  # <custom_token_0>
    codes = [first + 10 + 32 * place + place for place in range(7)]
    engine.feed("plain", [5, codes[1], *codes[:3], codes[6], 259, *codes[3:]], last=True)
    engine.feed("given", codes, last=True)
    heard = {output.key: output for output in engine.step()}
    assert heard["plain"].frames == heard["given"].frames == 1
    assert heard["plain"].samples is not None
    assert len(heard["plain"].samples) == 32
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("audio_tokenizer/config.json", {"attn_window_size": 32}),
        ("audio_tokenizer/config.json", {"vq_strides": [4, 3, 1]}),
        ("audio_tokenizer/config.json", {"codebook_size": 64}),
        ("audio_tokenizer/config.json", {"decoder_rates": [4, 2, 2]}),
    ],
)
def test_what_cannot_be_decoded_is_refused_at_load(
    folder: Path, tmp_path: Path, file: str, change: dict[str, Any]
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    path = copy / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refuses(ConfigError, "model"):
        Engine(EngineConfig(model=str(copy)))
