"""What callers feed into running streams, on the in-memory bus under a fake clock: late, lost, doubled, too much."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_shared import errors
from motet_shared.messages import (
    FEED_SIZE,
    FEED_WINDOW,
    PROTOCOL,
    Chunk,
    Echo,
    Feed,
    FeedCredit,
    Feeds,
    Usage,
    decode_feeds,
    decode_frames,
    encode,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.testing import FakeClock, MemoryHub, die, memory_bus, running, settle
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.stream import Stream
from motet_shared.wire.transport import Message
from motet_shared.wire.uplink import split


class Ear(Actor):
    """Sends back what it hears. `heard` is what each call has read, `ended` how each ended.

    delay_ms: it takes so long over each feed. count: it reads so many feeds and ends; 0: to the end.
    text="deaf": it never reads; "once": it answers the first only.
    """

    role = "vad"

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.heard: dict[str, list[bytes]] = {}
        self.ended: list[str] = []

    @operation(Echo)
    async def listen(self, call: Call, request: Echo) -> None:
        heard = self.heard.setdefault(call.id, [])
        try:
            if request.text == "deaf":
                await asyncio.Event().wait()
            async for data in call.received():
                heard.append(data)
                if request.delay_ms:
                    await self.bus.clock.sleep(request.delay_ms / 1000)
                if request.text != "once" or len(heard) == 1:
                    await call.send(Chunk(data))
                if len(heard) == request.count:
                    break
        except (asyncio.CancelledError, errors.MotetError) as error:
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("complete")
        call.finish("stop", Usage(prompt_tokens=len(heard)))


class World:
    """A hub under a fake clock, a gateway that calls, and ears that listen."""

    def __init__(self) -> None:
        self.hub, self.clock = MemoryHub(), FakeClock()
        self.buses: list[Bus] = []

    async def bus(self, role: str) -> Bus:
        bus = await memory_bus(self.hub, role, self.clock)
        self.buses.append(bus)
        await settle()
        return bus

    async def ear(self) -> Ear:
        ear = Ear(await self.bus("vad"))
        await ear.start()
        await settle()
        return ear


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    for bus in world.buses:
        await bus.close()


class Overheard:
    """Keeps the messages for which `when` holds, and loses the first `lose` of them."""

    def __init__(self, when: Callable[[Message], bool], lose: int = 0):
        self.when, self.lose = when, lose
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> bool:
        if not self.when(message):
            return False
        self.messages.append(message)
        return len(self.messages) <= self.lose


def listening(
    bus: Bus, *, count: int = 0, delay_ms: float = 0.0, text: str = "", **options: float
) -> Stream:
    return bus.open("vad", Echo(count=count, delay_ms=delay_ms, text=text), **options)  # type: ignore[arg-type]


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(2, "big") for number in range(count)]


async def feed(stream: Stream, parts: list[bytes]) -> None:
    for part in parts:
        await stream.send(part)
    await stream.end_input()


async def echoes(stream: Stream) -> list[bytes]:
    found: list[bytes] = []
    async with stream:
        async for body in stream:
            assert isinstance(body, Chunk)
            found.append(body.data)
    return found


def with_data(message: Message, seq: int) -> bool:
    """Whether a message holds the feed with this number."""
    feeds = decode_feeds(message.data).feeds if message.subject.endswith(".feed") else []
    return any(feed.seq == seq and feed.data for feed in feeds)


async def test_what_is_sent_arrives_in_order_and_ends(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    stream = listening(gateway)
    parts = numbered(1000)
    _, back = await asyncio.gather(feed(stream, parts), echoes(stream))
    assert back == parts
    assert stream.end is not None
    assert stream.end.usage == Usage(prompt_tokens=1000)
    assert ear.ended == ["complete"]


async def test_large_data_is_split_at_whole_samples(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    stream = listening(gateway)
    data = bytes(range(256)) * 1000
    await asyncio.gather(feed(stream, [data, b""]), echoes(stream))
    (heard,) = ear.heard.values()
    assert b"".join(heard) == data
    assert [len(part) % 2 for part in heard] == [0] * len(heard)
    assert max(len(part) for part in heard) == FEED_SIZE
    assert list(split(b"")) == []


async def test_a_worker_that_does_not_read_holds_the_sender_up(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    deaf, other = listening(gateway, text="deaf"), listening(gateway)
    async with deaf:
        sending = asyncio.create_task(feed(deaf, numbered(500)))
        await settle(200)
        (call,) = ear.bus.calls.active.values()
        assert not sending.done()
        assert call.intake.received == FEED_WINDOW
        reading = asyncio.create_task(echoes(other))
        await feed(other, numbered(200))
        assert await reading == numbered(200), "one slow worker must not slow another stream"
        await world.clock.advance(3)
        assert call.intake.received == FEED_WINDOW, "telling where it is must not widen the window"
    with pytest.raises(errors.StreamBroken):
        await sending


async def test_a_slow_worker_is_never_more_than_a_window_behind(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    stream = listening(gateway, delay_ms=50)
    sending = asyncio.create_task(feed(stream, numbered(300)))
    reading = asyncio.create_task(echoes(stream))
    await settle()
    (call,) = ear.bus.calls.active.values()
    (heard,) = ear.heard.values()
    for _ in range(200):
        await world.clock.advance(0.1)
        assert call.intake.received - len(heard) <= FEED_WINDOW
    await sending
    assert await reading == numbered(300)


async def test_nothing_is_lost_that_was_sent_before_anyone_accepted(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    world.hub.lose = Overheard(lambda m: m.subject.endswith(".echo"), lose=2)
    stream = listening(gateway)
    sending = asyncio.create_task(feed(stream, numbered(FEED_WINDOW * 2)))
    reading = asyncio.create_task(echoes(stream))
    await settle()
    assert not sending.done(), "it waits at a window of data that nobody has accepted"
    assert ear.heard == {}
    await world.clock.advance(2)
    assert await reading == numbered(FEED_WINDOW * 2)


async def test_data_goes_to_the_instance_whose_accepted_came_first(world: World) -> None:
    gateway, one, two = await world.bus("gateway"), await world.ear(), await world.ear()
    world.hub.lose = opens = Overheard(lambda m: m.subject.endswith(".echo"))
    stream = listening(gateway)
    reading = asyncio.create_task(echoes(stream))
    await stream.send(b"early")
    for ear in (one, two):  # both take it, whichever had it before
        ear.bus.calls.on_open(opens.messages[0])
    await world.clock.advance(0.5)
    await feed(stream, [b"late"])
    await world.clock.advance(0.5)
    assert await reading == [b"early", b"late"]
    other = two if stream.instance == one.bus.instance else one
    assert [len(heard) for heard in other.heard.values()] == [0]
    assert other.ended == ["CancelledError"]


async def test_an_open_and_feeds_that_come_twice_change_nothing(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    world.hub.deliver_twice = lambda m: m.subject.endswith((".echo", ".feed", ".frames"))
    stream = listening(gateway)
    _, back = await asyncio.gather(feed(stream, numbered(200)), echoes(stream))
    assert back == numbered(200)
    assert len(ear.heard) == 1


@pytest.mark.parametrize("number", [0, 3, 9])
async def test_a_missing_feed_is_an_error_that_both_sides_see(world: World, number: int) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    world.hub.lose = Overheard(lambda m: with_data(m, number), lose=1)
    stream = listening(gateway)
    reading = asyncio.create_task(echoes(stream))
    with contextlib.suppress(errors.StreamGap):  # the tenth is noticed later than the others
        for part in numbered(10):
            await stream.send(part)
            await settle()
    await world.clock.advance(1)
    with pytest.raises(errors.StreamGap):
        await reading
    assert ear.ended == ["StreamGap"]
    assert list(ear.heard.values()) == [numbered(number)]
    with pytest.raises(errors.StreamGap):
        await stream.send(b"more")


async def test_a_lost_end_of_input_is_told_again(world: World) -> None:
    gateway, _ = await world.bus("gateway"), await world.ear()
    stream = listening(gateway)
    reading = asyncio.create_task(echoes(stream))
    await stream.send(b"x")
    await settle()
    world.hub.lose = lambda m: m.subject.endswith(".feed")
    await stream.end_input()
    await settle()
    world.hub.lose = lambda m: False
    await world.clock.advance(0.5)
    assert await reading == [b"x"]


async def test_a_lost_grant_is_repeated(world: World) -> None:
    gateway, _ = await world.bus("gateway"), await world.ear()

    def a_grant_alone(message: Message) -> bool:
        frames = decode_frames(message.data).frames if message.subject.endswith(".frames") else []
        return bool(frames) and all(isinstance(frame, FeedCredit) for frame in frames)

    world.hub.lose = lost = Overheard(a_grant_alone, lose=1000)
    stream = listening(gateway, delay_ms=1)
    sending = asyncio.create_task(feed(stream, numbered(FEED_WINDOW * 3)))
    reading = asyncio.create_task(echoes(stream))
    await world.clock.advance(5)
    assert len(lost.messages) > 1
    assert not sending.done()
    world.hub.lose = lambda m: False
    await world.clock.advance(10)
    await sending
    assert await reading == numbered(FEED_WINDOW * 3)


@pytest.mark.parametrize("feed_too_many", [True, False])
async def test_a_caller_that_ignores_the_rules_is_refused(
    world: World, feed_too_many: bool
) -> None:
    gateway, _ = await world.bus("gateway"), await world.ear()
    stream = listening(gateway, delay_ms=1000)
    reading = asyncio.create_task(echoes(stream))
    await settle()
    feeds = [Feed(stream.number, seq, b"x") for seq in range(FEED_WINDOW + 2)]
    if not feed_too_many:
        feeds = [Feed(stream.number, 0, b"", True), Feed(stream.number, 0, b"x" * (FEED_SIZE + 1))]
    assert stream.instance is not None
    subject = subjects.feeds_to(stream.instance)
    world.hub.publish(Message(subject, encode(Feeds(PROTOCOL, gateway.instance, feeds))))
    await world.clock.advance(200 if feed_too_many else 1, step=0.5)
    with pytest.raises(
        errors.BadRequest, match="credit of 64" if feed_too_many else "after the last"
    ):
        await reading


@pytest.mark.parametrize("payload", [b"", b"\xc1", encode([1]), encode(["U", 9, "gateway-1", []])])
async def test_bad_feeds_are_counted_and_dropped(world: World, payload: bytes) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    world.hub.publish(Message(subjects.feeds_to(ear.bus.instance), payload))
    stray = Feeds(PROTOCOL, gateway.instance, [Feed(99, 0, b"x")])
    world.hub.publish(Message(subjects.feeds_to(ear.bus.instance), encode(stray)))
    await settle()
    assert sum(ear.bus.calls.dropped.values()) == 2
    assert ear.bus.calls.dropped["stray_feeds"] == 1


async def test_cancel_deadline_and_death_end_both_sides(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    left, late, orphan = listening(gateway), listening(gateway, deadline=0.5), listening(gateway)
    for stream in (left, late, orphan):
        await stream.send(b"x")
    await settle()
    await left.aclose()
    await settle()
    assert ear.ended == ["CancelledError"]
    await world.clock.advance(0.8)
    assert ear.ended == ["CancelledError"] * 2
    with pytest.raises(errors.DeadlineExceeded):
        await late.send(b"y")
    die(gateway)
    await world.clock.advance(0.5)
    assert ear.ended == ["CancelledError"] * 3
    assert ear.bus.calls.active == {}


async def test_a_sender_that_waits_is_told_of_the_death_of_its_worker(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    stream = listening(gateway, text="deaf")
    sending = asyncio.create_task(feed(stream, numbered(100)))
    await settle()
    die(ear.bus)
    await world.clock.advance(0.5)
    with pytest.raises(errors.WorkerLost):
        await sending


async def test_a_refusal_reaches_the_sender(world: World) -> None:
    gateway = await world.bus("gateway")
    stream = listening(gateway)
    await stream.send(b"x")
    await settle()
    with pytest.raises(errors.Unavailable):
        await stream.send(b"y")


async def test_after_the_end_nothing_can_be_sent(world: World) -> None:
    gateway, ear = await world.bus("gateway"), await world.ear()
    stream = listening(gateway, count=2)
    reading = asyncio.create_task(echoes(stream))
    await stream.send(b"a")
    await stream.send(b"b")
    assert await reading == [b"a", b"b"]
    with pytest.raises(errors.StreamBroken):
        await stream.send(b"c")
    await stream.end_input()
    ended = listening(gateway)
    await ended.end_input()
    await ended.end_input()
    with pytest.raises(RuntimeError):
        await ended.send(b"x")
    assert await echoes(ended) == []
    assert ear.ended == ["complete"] * 2


async def test_a_worker_that_grants_all_the_time_still_beats(world: World) -> None:
    """A grant tells nothing of items: if it stood in for a beat, a lost item would go unnoticed."""
    gateway, _ = await world.bus("gateway"), await world.ear()
    stream = listening(gateway, text="once")
    reading = asyncio.create_task(echoes(stream))
    await settle()
    world.hub.lose = Overheard(lambda m: m.subject.endswith(".frames"), lose=1)
    await stream.send(b"its echo is lost")
    await settle()
    with contextlib.suppress(errors.StreamGap):
        for _ in range(10):
            for part in numbered(FEED_WINDOW // 2):
                await stream.send(part)
            await world.clock.advance(0.1)
    with pytest.raises(errors.StreamGap):
        await asyncio.wait_for(reading, 1)


@settings(max_examples=30)
@given(
    lost=st.sets(st.integers(0, 80), max_size=8),
    doubled=st.sets(st.integers(0, 80), max_size=8),
    count=st.integers(0, 90),
    window=st.integers(1, 90),
    delay=st.sampled_from([0.0, 30.0]),
    pause=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_whatever_the_wire_does_the_worker_reads_a_true_prefix(
    lost: set[int], doubled: set[int], count: int, window: int, delay: float, pause: float
) -> None:
    """Either all that was sent, in order and once, and the end of it; or a typed error on both sides. Never a hang."""

    async def scenario() -> None:
        hub, clock = MemoryHub(), FakeClock()
        gateway = await memory_bus(hub, "gateway", clock)
        async with running(Ear(await memory_bus(hub, "vad", clock))) as ear:
            assert isinstance(ear, Ear)
            await settle()
            base = hub.messages
            hub.lose = lambda m: hub.messages - base in lost
            hub.deliver_twice = lambda m: hub.messages - base in doubled
            stream = gateway.open("vad", Echo(count=0, delay_ms=delay), window=window)

            async def send() -> None:
                for part in numbered(count):
                    await stream.send(part)
                    if pause:
                        await clock.sleep(pause)
                await stream.end_input()

            reading, sending = asyncio.create_task(echoes(stream)), asyncio.create_task(send())
            await clock.advance(60, step=0.1)
            assert reading.done(), "a stream must not hang"
            assert sending.done(), "nor may its sender"
            for heard in ear.heard.values():
                assert heard == numbered(len(heard))
            if reading.exception() is None:
                assert reading.result() == numbered(count)
                assert sending.exception() is None
            else:
                assert isinstance(reading.exception(), errors.MotetError)
                assert isinstance(sending.exception(), (errors.MotetError, type(None)))
            await clock.advance(6, step=0.1)
            assert ear.bus.calls.active == {}, "the worker must not go on for nobody"
            gateway.check_integrity()
        await gateway.close()

    asyncio.run(scenario())
