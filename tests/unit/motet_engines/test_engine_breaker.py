"""An engine that fails its requests: the host stops sending, and tries again with one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from motet_engines.breaker import Breaker
from motet_engines.config import EnginesConfig
from motet_engines.engine import Features, Served, StepOutput
from motet_engines.service import EngineHost
from motet_shared.errors import ConfigError, Unavailable
from motet_shared.messages import Generate, Sampling
from motet_shared.testing import memory_buses, running
from support.checkpoints.tiny_tokenizers import write_folder
from support.running.refusals import refuses


class Engine:
    """Answer with one token, or fail while `fails`."""

    features = Features()

    def __init__(self) -> None:
        self.fails = False
        self.asked: list[str] = []

    async def start(self, on_health: Callable[[bool], None], on_crash: Any) -> Served:
        self.on_health = on_health
        return Served(context=64)

    async def generate(
        self, key: str, request: Generate, expires: float | None, pictures: object = ()
    ) -> AsyncGenerator[StepOutput, None]:
        self.asked.append(key)
        if self.fails:
            raise Unavailable("broken")
        yield StepOutput([7], finish="length")

    def load(self) -> dict[str, float]:
        return {}

    def describe(self) -> dict[str, object]:
        return {}

    async def close(self) -> None: ...

    @property
    def trials(self) -> int:
        return sum(key.startswith("trial-") for key in self.asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def config(folder: Path, **settings: Any) -> EnginesConfig:
    defaults: dict[str, Any] = {
        "engine": "openai",
        "engine_url": "http://127.0.0.1:1/v1",
        "metrics_port": -1,
    }
    return EnginesConfig(model=str(folder), name="tiny", **(defaults | settings))


async def ask(bus: Any) -> list[Any]:
    request = Generate(model="tiny", prompt=[5], sampling=Sampling(max_tokens=1))
    async with bus.open("decode", request) as stream:
        return [item async for item in stream]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_failures_in_a_row_open_the_breaker_and_a_trial_closes_it(folder: Path) -> None:
    engine = Engine()
    settings = config(folder, breaker_failures=2, breaker_pause=0.02)
    async with (
        memory_buses("tokenizer", "decode") as (tokenizer, bus),
        running(EngineHost(settings, bus, engine)) as host,
    ):
        engine.fails = True
        for _ in range(2):
            assert bus.state == "ready"
            with pytest.raises(Unavailable):
                await ask(tokenizer)
        assert bus.state == "warming"
        assert host.stats()["breaker_open"] is True
        await until(lambda: engine.trials >= 2)
        assert bus.state == "warming"
        engine.on_health(False)
        engine.fails = False
        await until(lambda: not host.stats()["breaker_open"])
        assert bus.state == "warming"  # the probe has not answered yet
        engine.on_health(True)
        assert bus.state == "ready"
        assert len(await ask(tokenizer)) == 1
        assert host.stats()["breaker_opened"] == 1


class StreamingEngine(Engine):
    """Stream a reply of several tokens as the test gives them; the first trial takes too long."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = asyncio.Queue[int]()

    async def generate(
        self, key: str, request: Generate, expires: float | None, pictures: object = ()
    ) -> AsyncGenerator[StepOutput, None]:
        while request.sampling.max_tokens > 1:
            yield StepOutput([await self.tokens.get()])
        if key.startswith("trial-") and not self.trials:
            self.asked.append(key)
            raise TimeoutError
        async for output in super().generate(key, request, expires, pictures):
            yield output


async def test_a_reply_that_goes_on_does_not_close_the_breaker(folder: Path) -> None:
    engine = StreamingEngine()
    settings = config(folder, breaker_failures=2, breaker_pause=0.2)
    async with (
        memory_buses("tokenizer", "decode") as (tokenizer, bus),
        running(EngineHost(settings, bus, engine)) as host,
    ):
        request = Generate(model="tiny", prompt=[5], sampling=Sampling(max_tokens=9))
        async with tokenizer.open("decode", request) as stream:
            batches = stream.batches()
            engine.tokens.put_nowait(7)
            await anext(batches)
            engine.fails = True
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await ask(tokenizer)
            assert bus.state == "warming"
            engine.fails = False
            engine.tokens.put_nowait(7)
            await anext(batches)
            assert host.stats()["breaker_open"] is True
            await until(lambda: bus.state == "ready")
        assert engine.trials == 2


async def test_a_reply_ends_the_failures_in_a_row(folder: Path) -> None:
    engine = Engine()
    async with (
        memory_buses("tokenizer", "decode") as (tokenizer, bus),
        running(EngineHost(config(folder, breaker_failures=2), bus, engine)),
    ):
        for _ in range(2):
            engine.fails = True
            with pytest.raises(Unavailable):
                await ask(tokenizer)
            engine.fails = False
            await ask(tokenizer)
        assert bus.state == "ready"


async def test_an_engine_is_kept_warm_while_nothing_is_asked(folder: Path) -> None:
    engine = Engine()
    async with (
        memory_buses("tokenizer", "decode") as (_, bus),
        running(EngineHost(config(folder, keep_warm=0.05), bus, engine)),
    ):
        await until(lambda: engine.trials >= 2)
        assert bus.state == "ready"


def test_the_pause_between_trials_doubles_up_to_a_minute() -> None:
    breaker = Breaker(1, 4.0)
    assert breaker.failed()
    assert not breaker.failed()
    assert [breaker.next_pause() for _ in range(6)] == [4, 8, 16, 32, 60, 60]
    breaker.succeeded()
    assert (breaker.is_open, breaker.next_pause()) == (False, 4.0)
    assert not Breaker(0, 1.0).failed()


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"engine": "vllm"}, "engine_url"),
        ({"engine_python": "/usr/bin/python3"}, "engine_python"),
        ({"engine": "llama.cpp", "engine_python": "/usr/bin/python3"}, "engine_python"),
        ({"engine_url": "ftp://a/v1"}, "engine_url"),
        ({"engine_url": ""}, "engine_url"),
    ],
)
def test_an_engine_is_at_one_place(folder: Path, settings: dict[str, Any], param: str) -> None:
    with refuses(ConfigError, param):
        config(folder, **settings)
