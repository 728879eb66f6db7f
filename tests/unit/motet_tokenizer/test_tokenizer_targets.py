"""Chains of targets: which engine serves, what another one takes over, and which one is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet_shared.errors import Overloaded, Unavailable, UnsupportedParameter
from motet_shared.messages import TargetText
from motet_shared.testing import die
from support.checkpoints.tiny_tokenizers import write_folder
from support.running.refusals import refuses
from support.stages.tokenizer_stage import REPLY, SCRIPT, Answer, Stage, chat, stage_in_memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    async with stage_in_memory(folder) as stage:
        yield stage


def targets(answer: Answer) -> list[str]:
    return [item.target for item in answer.items if isinstance(item, TargetText)]


async def test_the_first_target_serves_while_it_can(stage: Stage) -> None:
    second = await stage.decode(target="second", rank=1)
    first = await stage.decode(target="first")
    for _ in range(3):
        assert targets(await stage.ask(chat())) == ["first"]
    first.refuse = Overloaded("full")
    assert targets(await stage.ask(chat())) == ["second"]
    first.refuse = None
    assert targets(await stage.ask(chat())) == ["first"]
    assert len(second.requests) == 1


async def test_a_stream_goes_on_at_the_next_target_and_names_it(stage: Stage) -> None:
    first = await stage.decode(step=2, target="first")
    first.pause_at = 8
    asking = asyncio.create_task(stage.ask(chat()))
    await first.paused.wait()
    second = await stage.decode(target="second", rank=1)
    die(first.bus)
    answer = await asking
    assert (answer.text, answer.ids) == (REPLY, SCRIPT)
    assert second.requests[0].output == SCRIPT[:8]
    assert targets(answer) == ["first", "second"]


async def test_what_a_target_cannot_do_goes_to_one_that_can(stage: Stage) -> None:
    same, first = [await stage.decode(target="first") for _ in range(2)]
    second = await stage.decode(target="second", rank=1)
    for decode in (same, first):
        decode.refuse = UnsupportedParameter("`top_k` 5: leave it out", param="top_k")
    assert targets(await stage.ask(chat())) == ["second"]
    assert len(same.requests) + len(first.requests) == 1
    second.refuse = first.refuse
    with refuses(UnsupportedParameter, "top_k"):
        await stage.ask(chat())


async def test_a_pinned_request_goes_to_its_target_alone(stage: Stage) -> None:
    first = await stage.decode(target="first")
    second = await stage.decode(target="second", rank=1)
    assert targets(await stage.ask(chat(target="second"))) == ["second"]
    second.refuse = Overloaded("full")
    with refuses(Overloaded, None):
        await stage.ask(chat(target="second"))
    die(second.bus)
    with pytest.raises(Unavailable):
        await stage.ask(chat(target="second"))
    assert first.requests == []


async def test_a_model_without_a_chain_names_no_target(stage: Stage) -> None:
    await stage.decode()
    assert targets(await stage.ask(chat())) == []
