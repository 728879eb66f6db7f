"""`Profile` on the decode actor: a torch trace of the engine's steps, while requests go on."""

import asyncio
import errno
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_llm.serving.profile import MAX_STEPS
from motet_llm.serving.trace_file import TraceFile
from motet_shared import errors
from motet_shared.messages import Chunk, Generate, Profile, Sampling, Tokens
from motet_shared.testing import memory_buses, running
from motet_shared.wire.bus import Bus
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.running.refusals import refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "tiny"
    path.mkdir()
    return tiny_checkpoint("llama", path)


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[tuple[Bus, Bus, Decode]]:
    config = DecodeConfig(model=str(folder), num_blocks=64, threads=1, metrics_port=-1)
    async with (
        memory_buses("tokenizer", "operator", "decode") as (tokenizer, operator, bus),
        running(Decode(config, bus)) as actor,
    ):
        yield tokenizer, operator, actor


async def profile(operator: Bus, **fields: Any) -> Any:
    """The trace, unpacked."""
    data = b""
    async with operator.open("decode", Profile(**{"model": "tiny", **fields}), window=4) as stream:
        async for body in stream:
            assert isinstance(body, Chunk)
            data += body.data
    return json.loads(gzip.decompress(data))


async def generate(tokenizer: Bus, count: int) -> list[int]:
    sampling = Sampling(temperature=0, max_tokens=count, ignore_eos=True)
    found: list[int] = []
    async with tokenizer.open(
        "decode", Generate(model="tiny", prompt=[5, 6, 7], sampling=sampling)
    ) as stream:
        async for body in stream:
            assert isinstance(body, Tokens)
            found += body.ids
    return found


def names(trace: Any, prefix: str) -> list[str]:
    return [
        event["name"] for event in trace["traceEvents"] if str(event.get("name")).startswith(prefix)
    ]


async def test_a_trace_holds_the_steps_and_their_operators(world: tuple[Bus, Bus, Decode]) -> None:
    tokenizer, operator, actor = world
    alone = await generate(tokenizer, 60)
    trace, tokens = await asyncio.gather(
        profile(operator, steps=5, shapes=True), generate(tokenizer, 60)
    )
    assert tokens == alone, "a profile changes no token"
    assert names(trace, "engine step") == [f"engine step {number}" for number in range(5)]
    steps = [
        event for event in trace["traceEvents"] if str(event.get("name")).startswith("engine step")
    ]
    products = [
        event for event in trace["traceEvents"] if event.get("name") == "motet_linear_float"
    ]
    assert any(s["ts"] <= m["ts"] < s["ts"] + s["dur"] for s in steps for m in products), (
        "native kernels are named"
    )
    torch_s = [
        event for event in trace["traceEvents"] if str(event.get("name")).startswith("aten::")
    ]
    assert any("Input Dims" in event["args"] for event in torch_s)
    assert actor.thread.around_step is None, "nothing is left behind"
    named = [
        (e["name"], e["pid"], e["tid"], str(e["args"]))
        for e in trace["traceEvents"]
        if e["ph"] == "M"
    ]
    assert len(named) == len(set(named)) > 0, "recordings are joined without their repetitions"


async def test_time_ends_a_recording_too(world: tuple[Bus, Bus, Decode]) -> None:
    tokenizer, operator, _ = world
    trace, _ = await asyncio.gather(
        profile(operator, steps=0, seconds=0.5), generate(tokenizer, 20)
    )
    assert 1 <= len(names(trace, "engine step")) <= 21  # the last one may only hand over tokens


async def test_an_idle_engine_has_nothing_to_show(world: tuple[Bus, Bus, Decode]) -> None:
    _, operator, _ = world
    with pytest.raises(errors.Unavailable, match=r"0\.1 s"):
        await profile(operator, seconds=0.1)


async def test_one_recording_at_a_time(world: tuple[Bus, Bus, Decode]) -> None:
    tokenizer, operator, _ = world
    running = asyncio.create_task(profile(operator, steps=3, seconds=20))
    await asyncio.sleep(0.1)
    with pytest.raises(errors.Overloaded):
        await profile(operator, seconds=0.1)
    await generate(tokenizer, 10)
    assert len(names(await running, "engine step")) == 3


async def test_leaving_ends_the_recording(world: tuple[Bus, Bus, Decode]) -> None:
    tokenizer, operator, actor = world
    leaving = asyncio.create_task(profile(operator, seconds=60))
    await asyncio.sleep(0.2)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await generate(tokenizer, 5)
    trace, _ = await asyncio.gather(profile(operator, steps=2), generate(tokenizer, 10))
    assert len(names(trace, "engine step")) == 2
    assert actor.thread.around_step is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"steps": -1}, "steps"),
        ({"steps": MAX_STEPS + 1}, "steps"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": 1e9}, "seconds"),
    ],
)
async def test_limits_out_of_range_are_named(
    world: tuple[Bus, Bus, Decode], fields: dict[str, Any], param: str
) -> None:
    _, operator, _ = world
    with pytest.raises(errors.BadRequest, match=f"{param}=") as caught:
        await profile(operator, **fields)
    assert caught.value.param == param


async def test_a_model_that_it_does_not_serve(world: tuple[Bus, Bus, Decode]) -> None:
    _, operator, _ = world
    with refuses(errors.UnknownModel, "model"):
        await profile(operator, model="other")


def test_a_full_disk_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What closes the file runs on the engine's thread."""
    file = TraceFile()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file._file, "close", full)
    file.close()
    assert file._raw.closed


async def test_a_recording_that_cannot_begin_does_not_block_the_next(
    world: tuple[Bus, Bus, Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, operator, _ = world

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("motet_llm.serving.trace_file.tempfile.TemporaryFile", full)
        with pytest.raises(errors.MotetError):
            await profile(operator, steps=2)
    trace, _ = await asyncio.gather(profile(operator, steps=2), generate(tokenizer, 20))
    assert names(trace, "engine step")


async def test_an_output_that_cannot_be_sent_ends_its_own_call(
    world: tuple[Bus, Bus, Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, _, actor = world
    alone = await generate(tokenizer, 20)
    passed_on, calls = actor._pass_on, list[str]()

    def pass_on(output: Any, call: Any, done: Any) -> None:
        calls.append(call.id)
        if call.id == calls[0] and len(calls) > 5:
            raise MemoryError
        passed_on(output, call, done)

    monkeypatch.setattr(actor, "_pass_on", pass_on)
    ended = await asyncio.gather(
        *(generate(tokenizer, 20) for _ in range(3)), return_exceptions=True
    )
    assert [type(one) for one in ended].count(errors.Overloaded) == 1
    assert [one for one in ended if not isinstance(one, BaseException)] == [alone, alone]
    assert not actor.thread.engine.has_work
