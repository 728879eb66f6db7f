"""Declare a pipeline as a graph of stages, and run it: each stage is a stream at a service.

    OMNI = Graph(
        "omni",
        yields=("text", "audio"),
        stages=(
            Stage("think", role="tokenizer", run=think, gives={"text": Text, "states": States}),
            Stage("speak", role="tts", run=speak, takes=("states",), gives={"audio": Audio},
                  optional=True),
        ),
    )

What a stage gives is named by the type of its items. An item goes to every stage that takes it and,
if the graph yields it, to the caller, as soon as it is there. Items are small: what is bulky is a
`BlobRef` in them. Each stream has the credit of its stage; what waits between two stages is bounded
by the reply that it belongs to, so that a slow stage does not slow down the one before it.

Stages run side by side, and one that dies fails over by itself (`motet_shared.wire.failover`). An
optional stage that cannot go on is left out: the others end as if nothing had taken what they give.
Any other error ends the graph, and so does a request that a stage refuses. Deadline, epoch and
patience are those of `Call` for all stages; leaving the generator early closes the streams of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from motet_shared.errors import BadRequest, MotetError
from motet_shared.messages import Request
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import NO_EPOCH, Epoch

T = TypeVar("T")
Items = AsyncIterator[list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Hold what one run of a graph is asked for.

    requests: by stage. outcomes: what a stage notes beside its items, by stage. deadline: seconds for
    each stage. patience: seconds without progress in which an instance may appear.
    """

    bus: Bus
    requests: Mapping[str, Request]
    outcomes: Mapping[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    patience: float = 5.0
    epoch: Epoch = NO_EPOCH


# Opens the streams of a stage: what it takes by name in, what it gives out.
Run = Callable[[Call, Mapping[str, Items]], AsyncGenerator[list[Any], None]]


@dataclass(frozen=True, slots=True)
class Stage:
    """Declare one stage.

    role: of the service that computes it. takes: names of what it reads. gives: the type of what it
    yields, by name. optional: if it cannot be had, the others go on.
    """

    name: str
    role: str = field(kw_only=True)
    run: Run = field(kw_only=True)
    gives: Mapping[str, type] = field(kw_only=True)
    takes: tuple[str, ...] = field(default=(), kw_only=True)
    optional: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Graph:
    """Declare a pipeline: its stages in order, and what its caller gets.

    Raises ValueError for a stage that takes what no stage before it gives.
    """

    name: str
    stages: tuple[Stage, ...] = field(kw_only=True)
    yields: tuple[str, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        given: set[str] = set()
        for stage in self.stages:
            if lacking := set(stage.takes) - given:
                raise ValueError(
                    f"graph {self.name!r}: stage {stage.name!r} takes {sorted(lacking)}, which no"
                    " stage before it gives"
                )
            if twice := given & stage.gives.keys():
                raise ValueError(f"graph {self.name!r}: two stages give {sorted(twice)}")
            given |= stage.gives.keys()
        if lacking := set(self.yields) - given:
            raise ValueError(f"graph {self.name!r} yields {sorted(lacking)}, which no stage gives")


@dataclass(slots=True)
class GraphOutcome:
    """Note which optional stages were lost, and why, once `run` has ended."""

    lost: dict[str, MotetError] = field(default_factory=dict)


class _Edge:
    """Carry items from the stage that gives them to one that takes them."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[Any] | None] = asyncio.Queue()

    def put(self, items: list[Any]) -> None:
        self._queue.put_nowait(items)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def items(self) -> AsyncGenerator[list[Any], None]:
        while (items := await self._queue.get()) is not None:
            yield items


async def run(
    graph: Graph, call: Call, outcome: GraphOutcome | None = None
) -> AsyncGenerator[list[Any], None]:
    """Yield what the graph yields, in batches of whatever has arrived from one stage."""
    outcome = outcome or GraphOutcome()
    edges = {stage.name: {name: _Edge() for name in stage.takes} for stage in graph.stages}

    async def computed(stage: Stage) -> AsyncGenerator[list[Any], None]:
        inputs = {name: edge.items() for name, edge in edges[stage.name].items()}
        targets = {
            kind: [taken[name] for taken in edges.values() if name in taken]
            for name, kind in stage.gives.items()
        }
        shown = tuple(kind for name, kind in stage.gives.items() if name in graph.yields)
        try:
            async with aclosing(stage.run(call, inputs)) as batches:
                async for batch in batches:
                    for kind, taking in targets.items():
                        if taking and (items := [one for one in batch if isinstance(one, kind)]):
                            for edge in taking:
                                edge.put(items)
                    if items := [one for one in batch if isinstance(one, shown)]:
                        yield items
        except MotetError as error:
            if not stage.optional or isinstance(error, BadRequest):
                raise
            outcome.lost[stage.name] = error
        finally:
            for taking in targets.values():
                for edge in taking:
                    edge.end()

    async with aclosing(merged(*map(computed, graph.stages))) as batches:
        async for batch in batches:
            yield batch


async def merged(*sources: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources in the order in which they come.

    The first error of any ends them all. Recorded answers depend on the order: what is recorded
    first has its effect first.
    """
    waiting: dict[asyncio.Future[T], AsyncGenerator[T, None]] = {}
    finished: asyncio.Queue[asyncio.Future[T]] = asyncio.Queue()

    def ask(source: AsyncGenerator[T, None]) -> None:
        task = asyncio.ensure_future(anext(source))
        task.add_done_callback(finished.put_nowait)
        waiting[task] = source

    for source in sources:
        ask(source)
    try:
        while waiting:
            task = await finished.get()
            source = waiting.pop(task)
            try:
                item = task.result()
            except StopAsyncIteration:
                continue
            ask(source)
            yield item
    finally:
        async with AsyncExitStack() as closing:  # of each, whatever happens to those before it
            for source in sources:
                closing.push_async_callback(source.aclose)
            tasks = list(waiting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
