"""The speech pipeline: speech that moves to another instance loses and repeats nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from motet_pipelines.voice.speak import Outcome, narrate, speak
from motet_shared.errors import DeadlineExceeded, Unavailable, UnknownModel, WorkerLost
from motet_shared.messages import Speak
from motet_shared.testing import die, settle
from motet_shared.wire.bus import Bus
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.running.refusals import refuses
from support.stages.tts_stage import TEXT, Speech, ask, said, stage, start

LONG = f"{TEXT} {TEXT}"
# Tiny models by family, whose sentences end before long.
ENDING: dict[str, dict[str, Any]] = {
    "dia": {"sample": True},
    "csm": {"sample": True, "positions": 80},
    "gradium_phonon_tts": {"sample": True, "threshold": 0.2},
    "higgs_audio_v2": {"sample": True, "ends": True},
    "pocket_tts": {"sample": True, "threshold": 0.2},
    "speecht5": {},
    "vits": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tts_checkpoints.pocket_tts(
        tmp_path_factory.mktemp("tts") / "model", sample=True, threshold=0.2
    )


async def broken_off(
    bus: Bus, actors: list[Tts], after: int, text: str = LONG
) -> tuple[Speech, int]:
    """Speech whose instance dies once so many items are there, and the frames that were counted by then."""
    speech, counted = Speech(), -1
    async with aclosing(speak(bus, ask(text), speech.outcome)) as batches:
        async for batch in batches:
            speech.items += batch
            if len(speech.items) >= after and counted < 0:
                counted = speech.outcome.usage.completion_tokens
                busy = [
                    actor
                    for actor in actors
                    if actor.bus.control.connected and actor.bus.calls.active
                ]
                for actor in busy:  # one, or none if it has sent all
                    die(actor.bus)
    return speech, counted


async def test_nothing_is_lost_or_repeated_when_the_instance_dies(folder: Path) -> None:
    async with stage(folder, 2) as (bus, actors, hub), AsyncExitStack() as later:
        whole = await said(bus, ask(LONG))
        counts = []  # frames, when the instance died
        for after in (1, 8, len(whole.items) * 3 // 4):
            for _ in range(5):
                actors.append(await start(hub, later, folder))
                await settle()
                speech, counted = await broken_off(bus, actors, after)
                assert speech.pcm == whole.pcm
                assert speech.words == whole.words
                assert speech.outcome.usage == whole.outcome.usage
                if speech.outcome.moves:  # else all had been sent before it died
                    break
            assert speech.outcome.moves == 1
            counts.append(counted)
        assert counts[0] == 0 < counts[-1] < whole.outcome.usage.completion_tokens


@pytest.mark.extended("families", after=2)
@pytest.mark.long(after=1)
@pytest.mark.parametrize(("family", "options"), ENDING.items())
async def test_every_family_moves_and_is_cancelled(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    folder = tts_checkpoints.MAKERS[family](tmp_path / "model", **options)
    text = "No one knows. The blue circle is left of the star."
    async with stage(folder, 2) as (bus, actors, hub), AsyncExitStack() as later:
        whole = await said(bus, ask(text))
        assert whole.pcm
        for _ in range(5):
            actors.append(await start(hub, later, folder))
            await settle()
            speech, _ = await broken_off(bus, actors, 1, text)
            assert speech.pcm == whole.pcm
            if speech.outcome.moves:  # else all had been sent before it died
                break
        assert speech.outcome.moves == 1
        async with aclosing(speak(bus, ask(text))) as batches:
            await anext(batches)
        living = [actor for actor in actors if actor.bus.control.connected]
        async with asyncio.timeout(20):
            while any(actor.bus.calls.active for actor in living):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        for actor in living:
            await asyncio.to_thread(actor.sessions.thread.stop)
            engine = actor.sessions.thread.engine
            engine.check_integrity()
            assert not engine.has_work


async def test_a_lone_instance_may_come_back(folder: Path) -> None:
    async with stage(folder) as (bus, actors, hub), AsyncExitStack() as later:
        whole = await said(bus, ask(LONG))
        task = asyncio.create_task(said(bus, ask(LONG), patience=60.0))
        await _begun(actors[0])
        die(actors[0].bus)
        await asyncio.sleep(0.2)
        await start(hub, later, folder)
        assert (await asyncio.wait_for(task, 60)).pcm == whole.pcm


async def _begun(actor: Tts) -> None:
    while not any(call.sent > 2 for call in actor.bus.calls.active.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_patience_ends(folder: Path) -> None:
    async with stage(folder) as (bus, actors, _):
        with refuses(UnknownModel, "model"):
            await said(bus, Speak(model="none", text="x"))
        task = asyncio.create_task(said(bus, ask(LONG), patience=0.3))
        await _begun(actors[0])
        die(actors[0].bus)
        with pytest.raises((WorkerLost, Unavailable)):
            await asyncio.wait_for(task, 5)


async def test_the_deadline_holds(folder: Path) -> None:
    async with stage(folder) as (bus, _, _):
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(said(bus, ask(LONG * 90), deadline=0.2), 5)
        await settle(50)
        assert not bus.caller.streams


async def test_leaving_is_a_remote_cancel(folder: Path) -> None:
    async with stage(folder) as (bus, (actor,), _):
        async with aclosing(speak(bus, ask(LONG * 20))) as batches:
            async for _batch in batches:
                break
        async with asyncio.timeout(20):
            while actor.bus.calls.active:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not bus.caller.streams


# ------------------------------------------------------------------------------------------------- while it is written
async def written(text: str, size: int) -> AsyncIterator[str]:
    for at in range(0, len(text), size):
        await asyncio.sleep(0)
        yield text[at : at + size]


async def narrated(text: str, size: int, stage_: Path, **fields: str) -> tuple[Speech, Speech]:
    async with stage(stage_) as (bus, _, _):
        whole, speech = await said(bus, ask(text)), Speech()
        async with aclosing(narrate(bus, ask(""), written(text, size), speech.outcome)) as batches:
            async for batch in batches:
                speech.items += batch
        return whole, speech


@pytest.mark.parametrize("size", [3, 1000])
async def test_a_text_that_is_still_written_sounds_the_same(folder: Path, size: int) -> None:
    whole, speech = await narrated(TEXT, size, folder)
    assert speech.pcm == whole.pcm
    # Milliseconds of each sentence are rounded on their own.
    assert [word for word, _, _ in speech.words] == [word for word, _, _ in whole.words]
    for (_, *times), (_, *wanted) in zip(speech.words, whole.words, strict=True):
        assert times == pytest.approx(wanted, abs=2)
    assert [item.text for item in speech.items if item.text] == [
        item.text for item in whole.items if item.text
    ]
    assert speech.outcome.usage == whole.outcome.usage


async def test_the_first_sentence_is_heard_while_the_rest_is_unwritten(folder: Path) -> None:
    heard = asyncio.Event()

    async def slow() -> AsyncIterator[str]:
        yield "The blue circle is small. A"
        await asyncio.wait_for(heard.wait(), 10)
        yield "nd so on."

    async with stage(folder) as (bus, _, _):
        words: list[str] = []
        async with aclosing(narrate(bus, ask(""), slow(), Outcome())) as batches:
            async for batch in batches:
                heard.set()
                words += [item.words[-1][0] for item in batch if item.words]
        assert words[0] == "small."
        assert words[-1] == "on."
