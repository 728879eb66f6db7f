"""When an attempt at a stream is followed by another one, and where: on a clock that obeys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest

from motet_shared.errors import (
    BadRequest,
    DeadlineExceeded,
    MotetError,
    Overloaded,
    StreamBroken,
    Unavailable,
    UnknownModel,
)
from motet_shared.messages import ModelCard
from motet_shared.process.actor import Actor
from motet_shared.testing import FakeClock, memory_buses, running, settle
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import MOVES, EndlessFailover, Failover, StreamMoves

MODEL = "quiet"
PATIENCE = 2.0


class Idle(Actor):
    """Is there."""

    role = "tts"

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=MODEL, context=0)]


@dataclass
class Outcome(StreamMoves):
    count: int = 0


@asynccontextmanager
async def stage(actors: int) -> AsyncIterator[tuple[Bus, FakeClock]]:
    """A caller's bus, and instances of the role."""
    clock = FakeClock()
    async with (
        memory_buses("gateway", *["tts"] * actors, clock=clock) as (bus, *others),
        AsyncExitStack() as stack,
    ):
        for other in others:
            await stack.enter_async_context(running(Idle(None, other)))
        await settle()
        yield bus, clock


async def tried(
    moves: EndlessFailover,
    clock: FakeClock,
    error: MotetError,
    *,
    lasts: float = 0.1,
    before: Callable[[], None],
) -> None:
    """Attempts that all fail with `error` after `lasts` seconds."""

    async def attempts() -> None:
        while True:
            async with moves:
                before()
                await clock.sleep(lasts)
                raise error

    task = asyncio.create_task(attempts())
    await settle()
    for _ in range(400):
        if not task.done():
            await clock.advance(0.1)
    if not task.done():
        task.cancel()
    await task


async def test_an_endless_stream_goes_on_while_each_attempt_lasts() -> None:
    async with stage(1) as (bus, clock):
        began: list[float] = []
        moves = EndlessFailover(bus, "tts", MODEL, patience=PATIENCE)
        with pytest.raises(asyncio.CancelledError):
            await tried(
                moves,
                clock,
                StreamBroken("gone"),
                lasts=1.5,
                before=lambda: began.append(clock.now()),
            )
        assert len(began) > 3 * MOVES


async def test_an_endless_stream_that_never_works_is_given_up_when_the_patience_ends() -> None:
    async with stage(1) as (bus, clock):
        start, began = clock.now(), [0.0]
        moves = EndlessFailover(bus, "tts", MODEL, patience=PATIENCE)
        with pytest.raises(StreamBroken):
            await tried(
                moves, clock, StreamBroken("gone"), before=lambda: began.append(clock.now())
            )
        assert PATIENCE - 0.5 < began[-1] - start <= PATIENCE


async def test_progress_renews_the_patience_and_moves_are_bounded() -> None:
    async with stage(1) as (bus, clock):
        outcome, start = Outcome(), clock.now()

        def before() -> None:
            outcome.count += 1

        moves = Failover(bus, "tts", MODEL, outcome, lambda: outcome.count, patience=PATIENCE)
        with pytest.raises(StreamBroken):
            await tried(moves, clock, StreamBroken("gone"), lasts=1.5, before=before)
        assert clock.now() - start > 3 * PATIENCE
        assert outcome.moves == MOVES + 1


@pytest.mark.parametrize("progress", [False, True])
async def test_a_full_instance_is_asked_again_only_once_something_was_sent(progress: bool) -> None:
    async with stage(1) as (bus, clock):
        outcome, attempts = Outcome(), []

        def before() -> None:
            attempts.append(clock.now())
            outcome.count = int(progress)

        moves = Failover(bus, "tts", MODEL, outcome, lambda: outcome.count, patience=PATIENCE)
        with pytest.raises(Overloaded):
            await tried(moves, clock, Overloaded("full"), before=before)
        assert (len(attempts) > 1) is progress
        assert outcome.moves == 0


async def test_what_a_retry_cannot_mend_ends_it_at_once() -> None:
    async with stage(1) as (bus, clock):
        attempts: list[float] = []
        moves = EndlessFailover(bus, "tts", MODEL, patience=PATIENCE)
        with pytest.raises(BadRequest):
            await tried(
                moves,
                clock,
                BadRequest("no such voice"),
                before=lambda: attempts.append(clock.now()),
            )
        assert len(attempts) == 1


async def test_the_next_attempt_is_at_another_instance() -> None:
    async with stage(2) as (bus, clock):
        outcome, seen = StreamMoves(), []
        moves = Failover(bus, "tts", MODEL, outcome, lambda: 0, patience=PATIENCE)
        with pytest.raises(StreamBroken):
            await tried(
                moves, clock, StreamBroken("gone"), before=lambda: seen.append(outcome.instance)
            )
        assert len(seen) == MOVES + 1
        assert all(one != other for one, other in pairwise(seen))


async def test_without_an_instance_the_patience_ends() -> None:
    async with stage(0) as (bus, clock):
        moves = EndlessFailover(bus, "tts", MODEL, patience=PATIENCE)
        with pytest.raises(Unavailable):
            await tried(moves, clock, StreamBroken("gone"), before=lambda: None)


async def test_an_unknown_model_is_refused_by_the_check() -> None:
    async with stage(1) as (bus, clock):
        with pytest.raises(UnknownModel):
            await tried(
                EndlessFailover(bus, "tts", "loud"),
                clock,
                StreamBroken("gone"),
                before=lambda: None,
            )


async def test_the_deadline_is_one_for_all_attempts() -> None:
    async with stage(1) as (bus, clock):
        moves = Failover(bus, "tts", MODEL, StreamMoves(), lambda: 0, deadline=1.0, what="speech")
        await clock.advance(0.4)
        assert moves.left() == pytest.approx(0.6)
        await clock.advance(0.7)
        with pytest.raises(DeadlineExceeded):
            moves.left()
        assert Failover(bus, "tts", MODEL, StreamMoves(), lambda: 0).left() is None
