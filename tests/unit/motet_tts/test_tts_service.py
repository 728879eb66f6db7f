"""The speech service over a bus in memory: what it says, when, and what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import BadRequest, MotetError, Overloaded, PayloadTooLarge, UnknownModel
from motet_shared.messages import Audio, Speak, SpeechResume
from motet_shared.testing import settle
from motet_shared.text.sentences import cut
from support.checkpoints import tts_checkpoints
from support.running.refusals import refuses
from support.stages.tts_stage import TEXT, Speech, ask, said, stage

MS = 48  # bytes of PCM per millisecond


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tts_checkpoints.pocket_tts(
        tmp_path_factory.mktemp("tts") / "model", sample=True, threshold=0.2
    )


@pytest.fixture(scope="module")
def vits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tts_checkpoints.vits(tmp_path_factory.mktemp("vits") / "model")


def check_items(speech: Speech, text: str, speed: float = 1.0) -> None:
    """Words in order and each once, times within the sound, places in the text that only grow."""
    assert [word for word, _, _ in speech.words] == text.split()
    times = [time for _, start, end in speech.words for time in (start, end)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(len(speech.pcm) / MS, abs=2)
    places = [item.text for item in speech.items if item.text]
    assert places == sorted(places)
    assert speech.items[-1].text == cut(text)[-1].end
    assert [item.sentence for item in speech.items] == sorted(
        item.sentence for item in speech.items
    )


async def test_a_text_with_its_words(folder: Path) -> None:
    async with stage(folder) as (bus, (actor,), _):
        speech = await said(bus, ask())
        check_items(speech, TEXT)
        assert {item.sentence for item in speech.items} == set(range(len(cut(TEXT)))) != {0}
        first = speech.items[0]
        assert len(first.data) < len(speech.pcm) / 8, "the first sound waits for the whole"
        assert [word for word, _, _ in first.words] == cut(TEXT)[0].text.split(), (
            "no estimate of the words comes first"
        )
        assert speech.outcome.usage.prompt_tokens > 0
        assert speech.outcome.usage.completion_tokens * 96 * 2 == len(
            speech.pcm
        )  # frames of 96 samples
        assert speech.pcm == (await said(bus, ask())).pcm
        assert speech.pcm != (await said(bus, ask(seed=8))).pcm
        assert speech.pcm != (await said(bus, ask(voice="ben"))).pcm
        assert (await said(bus, ask(voice="alloy"))).pcm == speech.pcm
        assert (await said(bus, ask(voice="ash"))).pcm == (await said(bus, ask(voice="ben"))).pcm
        actor.check_integrity()
        (card,) = actor.models()
        assert card.voices == ["anna", "ben"]


async def test_a_model_that_knows_its_words_and_has_another_rate(vits: Path) -> None:
    async with stage(vits) as (bus, _, _):
        text = "one two three. four five"
        speech = await said(bus, ask(text))
        check_items(speech, text)
        lengths = [end - start for _, start, end in speech.words]
        letters = [len(word) for word in text.split()]
        assert (
            len({round(length / count, 1) for length, count in zip(lengths, letters, strict=True)})
            > 2
        )


@pytest.mark.parametrize("speed", [0.5, 2.0])
async def test_speed(folder: Path, speed: float) -> None:
    async with stage(folder) as (bus, _, _):
        plain, other = await said(bus, ask()), await said(bus, ask(speed=speed))
        assert len(other.pcm) == pytest.approx(len(plain.pcm) / speed, abs=16)
        check_items(other, TEXT)


async def test_speech_is_taken_up_again_anywhere(folder: Path) -> None:
    """What another instance adds to any beginning of the speech makes it whole, and its times go on."""
    async with stage(folder) as (bus, _, _):
        whole = await said(bus, ask())
        for at in range(0, len(whole.items), 3):
            before = whole.items[:at]
            text, ended = max(
                [(item.text, number) for number, item in enumerate(before, 1)], default=(0, 0)
            )
            ended = ended if text else 0
            samples = sum(len(item.data) for item in before[:ended]) // 2
            skip = sum(len(item.data) for item in before[ended:]) // 2
            rest = await said(bus, ask(resume=SpeechResume(text, samples, skip)))
            both = Speech([*before, *rest.items])
            assert both.pcm == whole.pcm
            assert both.words == whole.words


async def test_symbols_alone_are_silent(folder: Path) -> None:
    async with stage(folder) as (bus, _, _):
        speech = await said(bus, ask("🎉 ... —"))
        assert speech.pcm == b""
        assert (await said(bus, ask("Hello! 🎉 There."))).items[-1].text == 15


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (
            Speak(model="other", text="hi"),
            UnknownModel,
            "model",
        ),
        (ask(" \n"), BadRequest, "input"),
        (ask("x" * 2001), PayloadTooLarge, "input"),
        (ask(voice="zoe"), BadRequest, "voice"),
        (ask(speed=0.2), BadRequest, "speed"),
        (ask(speed=float("nan")), BadRequest, "speed"),
    ],
)
async def test_refusals(folder: Path, request_: Speak, error: type[MotetError], param: str) -> None:
    async with stage(folder, longest_text=2000) as (bus, (actor,), _):
        with refuses(error, param):
            await said(bus, request_)
        actor.check_integrity()


async def test_overload_is_refused_at_the_door(folder: Path) -> None:
    async with stage(folder, max_running=1, max_waiting=1) as (bus, (actor,), _):
        tasks = [asyncio.create_task(said(bus, ask())) for _ in range(3)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in done if isinstance(result, Overloaded)]
        spoken = [result.pcm for result in done if isinstance(result, Speech)]
        assert (len(refused), len(spoken), len(set(spoken))) == (1, 2, 1)
        actor.check_integrity()


async def test_many_at_a_time_are_each_their_own(folder: Path) -> None:
    async with stage(folder) as (bus, _, _):
        texts = [f"Number {n} speaks. It says {'very ' * n} little." for n in range(6)]
        alone = [(await said(bus, ask(text))).pcm for text in texts]
        together = await asyncio.gather(*(said(bus, ask(text)) for text in texts))
        for one, other in zip(alone, together, strict=True):
            # The order of float additions differs with the company: by a step or two of 16 bits.
            assert len(one) == len(other.pcm)
            values = (memoryview(data).cast("h") for data in (one, other.pcm))
            assert max(abs(a - b) for a, b in zip(*values, strict=True)) <= 4


async def test_a_caller_that_leaves_stops_it_at_once(folder: Path) -> None:
    async with stage(folder) as (bus, (actor,), _):
        engine = actor.sessions.thread.engine
        async with bus.open("tts", ask(TEXT * 20)) as stream:
            async for batch in stream.batches():
                assert isinstance(batch[0], Audio)
                break
        async with asyncio.timeout(20):
            while engine.has_work or actor.bus.calls.active:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        steps = engine.steps
        await settle(50)
        assert engine.steps == steps
        actor.check_integrity()


async def test_a_caller_that_does_not_read_holds_it_up(folder: Path) -> None:
    """Without credit no further sentence is begun."""
    async with stage(folder) as (bus, (actor,), _):
        engine = actor.sessions.thread.engine
        async with bus.open("tts", ask(TEXT * 20), window=2):
            async with asyncio.timeout(20):
                while not engine.steps or engine.has_work:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            steps = engine.steps
            await asyncio.sleep(0.1)
            assert engine.steps == steps < 100


async def test_a_broken_engine_ends_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(folder) as (bus, (actor,), _):
        model: Any = actor.sessions.thread.engine.model
        monkeypatch.setattr(model, "step", lambda: 1 / 0)
        asking = asyncio.create_task(said(bus, ask(), patience=0.1))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(actor.wait_crashed(), 20)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
