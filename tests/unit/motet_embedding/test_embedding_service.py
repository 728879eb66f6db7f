"""The embedding actor and its pipeline: order, dimensions, refusals, cancels, moves, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet_embedding.config import EmbeddingConfig
from motet_embedding.service import Embedding
from motet_pipelines.embed import Embedded, embed
from motet_pipelines.parts import PART_TEXTS
from motet_shared.errors import BadRequest, ConfigError, Overloaded, Unavailable, UnknownModel
from motet_shared.messages import Embed, Vectors
from motet_shared.testing import MemoryHub, die, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from support.checkpoints.embedding_checkpoints import ids, means, sentence_transformer
from support.running.refusals import refuses

MODEL = "vectors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_transformer(tmp_path_factory.mktemp("bert"), prompts={"query": "query: "})


@dataclass
class World:
    """A caller, and embedding services that come and go."""

    hub: MemoryHub
    bus: Bus
    stack: AsyncExitStack
    folder: Path
    services: list[Embedding] = field(default_factory=list)

    async def start(self, **options: Any) -> Embedding:
        settings: dict[str, Any] = {"model": str(self.folder), "name": MODEL, "threads": 1}
        service = Embedding(
            EmbeddingConfig(**settings | options), await memory_bus(self.hub, "embedding")
        )
        await self.stack.enter_async_context(running(service))
        await settle()
        self.services.append(service)
        return service

    async def ask(
        self, given: list[Any], outcome: Embedded | None = None, **fields: Any
    ) -> np.ndarray[Any, Any]:
        request = Embed(model=fields.pop("model", MODEL), input=given, **fields)
        async with aclosing(embed(self.bus, request, outcome, deadline=60.0)) as parts:
            return rows([part async for part in parts])

    async def idle(self) -> None:
        """Nothing is left behind, in any service that lives."""
        async with asyncio.timeout(20):
            while any(  # noqa: ASYNC110
                one.bus.calls.active or one.sessions.thread.engine.has_work for one in self.services
            ):
                await asyncio.sleep(0.01)
        for one in self.services:
            one.check_integrity()


def rows(parts: list[Vectors]) -> np.ndarray[Any, Any]:
    return np.concatenate(
        [np.frombuffer(part.data, "<f4").reshape(part.count, -1) for part in parts]
    )


@asynccontextmanager
async def world(folder: Path, *options: dict[str, Any]) -> AsyncIterator[World]:
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        bus = await memory_bus(hub, "gateway")
        stack.push_async_callback(bus.close)
        made = World(hub, bus, stack, folder)
        for settings in options:
            await made.start(**settings)
        yield made
        await made.idle()


async def test_vectors_in_order_whoever_asks_besides(folder: Path) -> None:
    texts = [ids(2 + 7 * number % 60, number) for number in range(24)]
    due = means(folder, texts).numpy()
    async with world(folder, {"max_batch_tokens": 64}) as made:
        outcome = Embedded()
        answers = await asyncio.gather(
            made.ask(texts, outcome),
            *(made.ask([text]) for text in texts[:8]),
            made.ask(texts[::-1], dimensions=8),
        )
        np.testing.assert_allclose(answers[0], due, atol=1e-5)
        assert (outcome.texts, outcome.tokens) == (24, sum(map(len, texts)))
        np.testing.assert_allclose(np.concatenate(answers[1:9]), due[:8], atol=1e-5)
        short = due[::-1, :8] / np.linalg.norm(due[::-1, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(answers[9], short, atol=1e-5)
        assert made.services[0].stats()["padding"] == 0


async def test_texts_and_prompts(folder: Path) -> None:
    async with world(folder, {}) as made:
        with_prompt = await made.ask(["ba be"], prompt="query")
        np.testing.assert_allclose(with_prompt, await made.ask(["query: ba be"]), atol=1e-6)
        assert not np.allclose(with_prompt, await made.ask(["ba be"]), atol=1e-3)


async def test_a_long_list_goes_out_in_parts(folder: Path) -> None:
    async with world(folder, {"max_waiting": PART_TEXTS}) as made:
        texts = [[5 + number % 90] for number in range(2 * PART_TEXTS + 3)]
        outcome = Embedded()
        found = await made.ask(texts, outcome)
        assert (len(found), outcome.texts, outcome.moves) == (len(texts), len(texts), 0)
        np.testing.assert_allclose(found[90:180], found[:90], atol=1e-6)
        with refuses(BadRequest, "input"):
            await made.ask([[5]] * (PART_TEXTS + 1) + [[]])  # its place in the whole list


async def test_what_is_wrong_is_named(folder: Path) -> None:
    async with world(folder, {}) as made:
        for fields, param in (
            ({"dimensions": 33}, "dimensions"),
            ({"dimensions": -1}, "dimensions"),
            ({"prompt": "nobody"}, "prompt_name"),
        ):
            with refuses(BadRequest, param):
                await made.ask(["a"], **fields)
        with refuses(UnknownModel, "model"):
            await made.ask(["a"], model="nobody")
        assert len(await made.ask(["a"])) == 1, "it serves on"


async def test_without_room_a_request_is_refused_and_without_service_too(folder: Path) -> None:
    async with world(folder, {"max_requests": 1, "max_batch_tokens": 2}) as made:
        first = asyncio.create_task(made.ask([[5, 6]] * 400))
        async with asyncio.timeout(10):
            while not made.services[0].bus.calls.active:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        with pytest.raises(Overloaded):
            await made.ask(["a"])
        assert len(await first) == 400
        die(made.services.pop().bus)
        with pytest.raises(Unavailable):
            async with aclosing(
                embed(made.bus, Embed(model=MODEL, input=["a"]), patience=0.2)
            ) as parts:
                await anext(parts)


async def test_leaving_early_frees_the_queue(folder: Path) -> None:
    async with world(folder, {"max_batch_tokens": 2}) as made:
        engine = made.services[0].sessions.thread.engine
        async with aclosing(embed(made.bus, Embed(model=MODEL, input=[[5, 6]] * 500))) as parts:
            await anext(parts)
        await made.idle()
        assert engine.stats()["texts"] < 500


async def test_when_the_service_dies_another_goes_on_where_it_was(folder: Path) -> None:
    texts = [ids(2 + number % 9, number) for number in range(500)]
    async with world(folder, {"max_batch_tokens": 11}, {"max_batch_tokens": 11}) as made:
        whole, outcome = await made.ask(texts), Embedded()
        parts = []
        async with aclosing(embed(made.bus, Embed(model=MODEL, input=[*texts]), outcome)) as items:
            async for item in items:
                parts.append(item)
                if len(parts) == 2 and len(made.services) == 2:
                    victim = next(
                        one for one in made.services if one.bus.instance == outcome.instance
                    )
                    made.services.remove(victim)
                    die(victim.bus)
        np.testing.assert_allclose(rows(parts), whole, atol=1e-5)
        assert (outcome.moves, outcome.texts, outcome.tokens) == (1, 500, sum(map(len, texts)))


async def test_it_drains(folder: Path) -> None:
    async with world(folder, {"max_batch_tokens": 2}) as made:
        asked = asyncio.create_task(made.ask([[5, 6]] * 200))
        await asyncio.sleep(0.05)
        service = made.services.pop()
        await service.bus.calls.drain(20.0)
        assert len(await asked) == 200
        service.check_integrity()


def test_settings_that_cannot_work_are_named(folder: Path) -> None:
    with refuses(ConfigError, "normalize"):
        EmbeddingConfig(model=str(folder), normalize="perhaps").engine()
    with refuses(ConfigError, "dtype"):
        EmbeddingConfig(model=str(folder), dtype="int3").engine()
