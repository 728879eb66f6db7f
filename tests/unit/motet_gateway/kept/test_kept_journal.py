"""What services answered is read again by the next process: in its order, under the same requests, errors included."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import msgspec
import pytest

from motet_gateway.kept import journal as journals
from motet_gateway.kept.journal import Journal
from motet_gateway.kept.memory import ConnectionMemory
from motet_pipelines.answers import Answers, noted, once, record_in
from motet_shared.errors import Unavailable
from motet_shared.wire.epochs import Epoch

_WORDS = msgspec.msgpack.Decoder(str)
_ENDS = msgspec.msgpack.Decoder(int)


class Process:
    """A recorder of one process over the memory; `strayed` counts what it could not go on with."""

    def __init__(self, fd: int | None = None):
        self.memory = (
            ConnectionMemory.create(0, 0) if fd is None else ConnectionMemory.adopt(fd, 0, 0)
        )
        self.strayed = 0
        self.is_closed = False
        self.journal = Journal(self.memory, lambda: None, self._stray)
        record_in(self)

    def _stray(self) -> None:
        self.strayed += 1

    def open(self, digest: bytes) -> journals.JournaledStream:
        return self.journal.open(digest, self._writable)

    def memo(self, name: str) -> bytes | None:
        return self.journal.memo(name)

    def note(self, name: str, value: bytes) -> None:
        self.journal.note(name, value)

    def epoch(self, given: Epoch) -> Epoch:
        return given

    async def _writable(self) -> None:
        await asyncio.sleep(0)

    def next(self) -> Process:
        """The process that adopts the memory after the death of this one."""
        fd = os.dup(self.memory.fd)
        self.close()
        return Process(fd)

    def close(self) -> None:
        """Close its memory, once: the number of its descriptor may be another's then."""
        if not self.is_closed:
            self.is_closed = True
            self.memory.close()


@pytest.fixture
def first() -> Iterator[Process]:
    made = Process()
    yield made
    record_in(None)
    made.close()


def answers(request: str) -> Answers[str, int]:
    return Answers(request, _WORDS, _ENDS)


async def all_of(stream: Answers[str, int]) -> list[str]:
    found = []
    while (word := await stream.recorded()) is not None:
        found.append(word)
    return found


async def test_what_was_answered_is_read_again(first: Process) -> None:
    live = answers("a")
    assert await all_of(live) == []
    for word in ("one", "two"):
        await live.record(word)
    second = first.next()
    again = answers("a")
    assert (await all_of(again), again.end) == (["one", "two"], None)
    await again.record("three")
    await again.finish(3)
    second.next()
    whole = answers("a")
    assert (await all_of(whole), whole.end) == (["one", "two", "three"], 3)


async def test_streams_are_read_in_the_order_in_which_they_were_written(first: Process) -> None:
    one, two = answers("a"), answers("b")
    for stream, word in ((one, "a1"), (two, "b1"), (two, "b2"), (one, "a2")):
        await stream.record(word)
    first.next()
    read: list[str] = []

    async def reader(request: str) -> None:
        stream = answers(request)
        while (word := await stream.recorded()) is not None:
            read.append(word)

    await asyncio.gather(reader("b"), reader("a"))
    assert read == ["a1", "b1", "b2", "a2"]


async def test_something_new_comes_behind_everything_recorded(first: Process) -> None:
    await answers("a").record("a1")
    second = first.next()
    old, new = answers("a"), answers("new")
    assert await new.recorded() is None
    recording = asyncio.create_task(new.record("n1"))
    await asyncio.sleep(0.01)
    assert not recording.done()
    assert await old.recorded() == "a1"
    await recording
    second.next()
    assert [await answers("a").recorded(), await answers("new").recorded()] == ["a1", "n1"]


async def test_equal_requests_are_told_apart_by_their_order(first: Process) -> None:
    one, two = answers("a"), answers("a")
    await one.record("first")
    await two.record("second")
    first.next()
    one, two = answers("a"), answers("a")
    assert [await one.recorded(), await two.recorded()] == ["first", "second"]


async def test_a_batch_is_recorded_at_once_once_nothing_of_an_earlier_process_is_left(
    first: Process,
) -> None:
    live = answers("a")
    assert live.is_live
    live.record_now("a1")
    await live.record("a2")
    second = first.next()
    again = answers("a")
    assert not again.is_live
    assert await again.recorded() == "a1"
    assert not again.is_live
    assert await again.recorded() == "a2"
    assert again.is_live
    again.record_now("a3")
    second.next()
    assert await all_of(answers("a")) == ["a1", "a2", "a3"]


async def test_a_batch_is_not_recorded_at_once_behind_a_response_or_in_a_session(
    first: Process,
) -> None:
    late = answers("a")
    late.record_now("a1")
    first.journal.reset()
    first.memory.next_request()
    assert not late.is_live
    first.journal.begin_session(0)
    assert not answers("b").is_live


async def test_an_error_is_raised_again(first: Process) -> None:
    live = answers("a")
    await live.record("a1")
    with pytest.raises(Unavailable):
        async with live.live():
            raise Unavailable("no instance", param="model")
    first.next()
    again = answers("a")
    assert await again.recorded() == "a1"
    with pytest.raises(Unavailable, match="no instance") as caught:
        await again.recorded()
    assert caught.value.param == "model"


async def test_a_stream_of_a_response_that_ended_records_nothing(first: Process) -> None:
    late = answers("a")
    await late.record("a1")
    first.journal.reset()
    first.memory.next_request()
    await late.record("a2")
    await late.finish(2)
    assert first.memory.records() == []


async def test_a_handler_that_asks_for_something_else_strays(
    first: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    await answers("a").record("a1")
    second = first.next()
    monkeypatch.setattr(journals, "_REPLAY", 0.05)
    await answers("other").record("o1")
    assert second.strayed == 1


async def test_without_a_recorder_nothing_is_recorded() -> None:
    record_in(None)
    live = answers("a")
    assert await live.recorded() is None
    await live.record("a1")
    await live.finish(1)
    assert live.end is None


async def test_what_was_noted_is_the_same_in_the_next_process(first: Process) -> None:
    async def one() -> str:
        return "computed"

    async def other() -> str:
        raise AssertionError("it was noted")

    assert noted("a", [1.5, "x"]) == [1.5, "x"]
    assert await once("b", one) == "computed"
    second = first.next()
    assert noted("a", [2.5]) == [1.5, "x"]
    assert await once("b", other) == "computed"
    assert noted("c", 3) == 3
    second.close()


async def test_a_session_handles_its_messages_where_they_came_among_the_answers(
    first: Process,
) -> None:
    """A message waits for the answers before it, and for as many events as had been rendered."""
    first.journal.begin_session(0)
    live = answers("a")
    await first.journal.input()
    await live.record("one")
    first.journal.render(1, [("reply", False), ("reply", True)])
    first.journal.tick(2, 1)
    await first.journal.input()
    await live.record("two")

    second = first.next()
    journal = second.journal
    assert journal.events == {1: ("reply", False), 2: ("reply", True)}
    journal.begin_session(2)
    found: list[str] = []

    async def messages() -> None:
        for number in range(3):
            await journal.input()
            found.append(f"message {number}")

    async def replies() -> None:
        stream = answers("a")
        while (word := await stream.recorded()) is not None:
            found.append(word)
            await asyncio.sleep(0.01)
            if word == "one":
                journal.tick(2, 1)
        await stream.record("three")
        found.append("three")

    handling = asyncio.create_task(messages())
    await asyncio.sleep(0.01)
    assert found == ["message 0"], "the answer before the second one is not read"
    await asyncio.gather(handling, asyncio.create_task(replies()))
    assert found[:4] == ["message 0", "one", "message 1", "two"]
    assert sorted(found[4:]) == ["message 2", "three"]
    assert not journal.is_replaying
    second.close()


async def test_a_session_passes_over_the_answers_of_what_was_cancelled(first: Process) -> None:
    first.journal.begin_session(0)
    live, other = answers("a"), answers("b")
    for word in ("one", "two", "three"):
        await live.record(word)
    await other.record("other")

    second = first.next()
    second.journal.begin_session(0)
    again = answers("a")
    assert await again.recorded() == "one"
    del again
    assert await asyncio.wait_for(answers("b").recorded(), 5) == "other"
    assert not second.journal.is_replaying
    second.close()


async def test_a_session_asks_no_service_before_it_is_where_it_was(first: Process) -> None:
    """A stream without an end may be cancelled by a message that comes later in the journal."""
    first.journal.begin_session(0)
    await answers("a").record("one")
    await first.journal.input()

    second = first.next()
    second.journal.begin_session(0)
    stream = answers("a")
    assert await stream.recorded() == "one"
    waiting = asyncio.create_task(stream.recorded())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await second.journal.input()
    assert await asyncio.wait_for(waiting, 5) is None
    second.close()
