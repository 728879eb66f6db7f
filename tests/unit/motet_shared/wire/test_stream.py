"""Streaming calls on the in-memory bus under a fake clock: what is lost, doubled, late or dead."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_shared import errors
from motet_shared.messages import (
    FOREVER,
    PROTOCOL,
    Accepted,
    Body,
    Cancel,
    Controls,
    Credit,
    Echo,
    Embed,
    End,
    Frame,
    Frames,
    Item,
    Open,
    Text,
    Usage,
    decode_controls,
    decode_frames,
    encode,
)
from motet_shared.testing import (
    FakeClock,
    MemoryHub,
    die,
    memory_bus,
    memory_buses,
    running,
    settle,
)
from motet_shared.wire import subjects
from motet_shared.wire.transport import Message
from support.services.stream_world import EchoWorker, LoseOnce, World, ids


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World(MemoryHub(), FakeClock())
    yield world
    await world.close()


def of_kind(message: Message, kind: type) -> bool:
    """Whether a message on an inbox holds a frame of this kind."""
    return message.subject.endswith(".frames") and any(
        isinstance(f, kind) for f in decode_frames(message.data).frames
    )


def overheard(hub: MemoryHub, suffix: str) -> list[Message]:
    """All messages from now on whose subject ends so."""
    heard: list[Message] = []

    def listen(message: Message) -> bool:
        if message.subject.endswith(suffix):
            heard.append(message)
        return False

    hub.lose = listen
    return heard


async def test_items_arrive_in_order_and_end_carries_usage(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    stream = gateway.open("tokenizer", Echo(count=200, text="x"), window=8)
    assert await ids(stream) == list(range(200))
    assert stream.end is not None
    assert (stream.end.status, stream.end.usage) == ("length", Usage(prompt_tokens=200))
    gateway.check_integrity()


async def test_all_frames_of_a_loop_iteration_are_one_message(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    streams = [gateway.open("tokenizer", Echo(count=1, delay_ms=500)) for _ in range(20)]
    reading = [asyncio.create_task(ids(s)) for s in streams]
    await settle()
    before = echo_worker.bus.calls.outbox.messages
    await world.clock.advance(0.5, step=0.5)
    assert await asyncio.gather(*reading) == [[0]] * 20
    assert echo_worker.bus.calls.outbox.messages - before <= 3  # items (and a beat), ends


async def test_a_caller_that_does_not_read_stops_the_sender_at_its_window(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    async with gateway.open("tokenizer", Echo(count=1000), window=10) as stream:
        await settle(200)
        assert stream.received == 10
        other = gateway.open("tokenizer", Echo(count=50), window=10)
        assert len(await ids(other)) == 50, "one slow reader must not slow another"
        taken = await anext(stream.batches())
        await settle(200)
        assert (len(taken), stream.received) == (10, 20)
    await settle()
    assert echo_worker.ended == ["complete", "cancelled"]


@pytest.mark.parametrize("every", [1, 2, 7])
async def test_a_sink_and_the_task_behind_it_share_the_items_in_order(
    world: World, every: int
) -> None:
    """Each offer is everything that has arrived; what the sink leaves, the task takes."""
    gateway, _ = await world.gateway(), await world.echo_worker()
    found: list[int] = []
    offers: list[int] = []
    stream = gateway.open("tokenizer", Echo(count=300), window=8)

    def sink(bodies: list[Body]) -> bool:
        offers.append(len(bodies))
        if len(offers) % every:
            return False
        if len(offers) == 3 * every:
            raise ValueError("the task takes these, too")
        found.extend(body.ids[0] for body in bodies if isinstance(body, Text))
        return True

    stream.sink = sink
    async with stream:
        async for batch in stream.batches():
            for body in batch:
                assert isinstance(body, Text)
                found += body.ids
            await asyncio.sleep(0)  # more arrives meanwhile
    assert found == list(range(300))
    assert len(offers) > 3 * every
    assert max(offers) > 1
    assert stream.end is not None
    gateway.check_integrity()


async def test_a_lost_grant_is_repeated(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    grants = LoseOnce(
        lambda m: (
            m.subject.endswith(".ctl")
            and any(isinstance(c, Credit) for c in decode_controls(m.data).controls)
        )
    )
    world.hub.lose = grants
    reading = asyncio.create_task(ids(gateway.open("tokenizer", Echo(count=30), window=4)))
    await world.clock.advance(2)
    assert (await reading, grants.lost) == (list(range(30)), 1)


async def test_a_lost_open_is_sent_again(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    world.hub.lose = lost = LoseOnce(lambda m: m.subject.endswith(".echo"))
    reading = asyncio.create_task(ids(gateway.open("tokenizer", Echo(count=3))))
    await settle()
    assert (lost.lost, echo_worker.served) == (1, [])
    await world.clock.advance(0.4)
    assert await reading == [0, 1, 2]


async def test_an_open_that_comes_twice_is_served_once(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    world.hub.deliver_twice = lambda m: m.subject.endswith(".echo")
    assert await ids(gateway.open("tokenizer", Echo(count=3))) == [0, 1, 2]
    assert len(echo_worker.served) == 1


async def test_an_open_that_comes_again_after_the_end_is_not_served(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    opens = overheard(world.hub, ".echo")
    await ids(gateway.open("tokenizer", Echo(count=1)))
    world.hub.publish(opens[0])
    await settle()
    assert len(echo_worker.served) == 1


async def test_a_caller_that_lost_all_frames_of_a_call_is_told_that_it_has_ended(
    world: World,
) -> None:
    """Its connection was lost between its open and the end; so it may ask again at once."""
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    world.hub.lose = lambda m: of_kind(m, Accepted) or of_kind(m, Item) or of_kind(m, End)
    stream = gateway.open("tokenizer", Echo(count=3))
    reading = asyncio.create_task(ids(stream))
    await settle()
    assert echo_worker.ended == ["complete"]
    world.hub.lose = lambda m: False
    await world.clock.advance(0.4)
    with pytest.raises(errors.StreamBroken):
        await asyncio.wait_for(reading, 1.0)
    assert len(echo_worker.served) == 1


async def test_of_two_instances_that_took_a_resent_open_one_is_cancelled(world: World) -> None:
    gateway, one, two = await world.gateway(), await world.echo_worker(), await world.echo_worker()
    world.hub.deliver_twice = lambda m: False
    opens = overheard(world.hub, ".echo")
    stream = gateway.open("tokenizer", Echo(count=40, delay_ms=50))
    reading = asyncio.create_task(ids(stream))
    await settle()
    other = two if one.served else one
    other.bus.calls.on_open(opens[0])  # the copy reaches the second instance
    await world.clock.advance(2.5)
    assert await reading == list(range(40)), "frames of the second instance must not mix in"
    assert other.ended == ["cancelled"]
    assert stream.instance != other.bus.instance


async def test_nobody_serves_the_role(world: World) -> None:
    gateway = await world.gateway()
    with pytest.raises(errors.Unavailable):
        await ids(gateway.open("tokenizer", Echo()))


async def test_an_instance_that_swallows_opens_is_given_up(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    world.hub.lose = lambda m: m.subject.endswith(".open")
    reading = asyncio.create_task(
        ids(gateway.open("tokenizer", Echo(), instance=echo_worker.bus.instance))
    )
    await world.clock.advance(10, step=0.25)
    with pytest.raises(errors.Unavailable):
        await reading


@pytest.mark.parametrize("number", [0, 3, 8])
async def test_a_missing_item_is_an_error_not_a_silent_loss(world: World, number: int) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    world.hub.lose = LoseOnce(
        lambda m: (
            of_kind(m, Item)
            and any(getattr(f, "seq", -1) == number for f in decode_frames(m.data).frames)
        )
    )
    stream = gateway.open("tokenizer", Echo(count=10, delay_ms=100))
    reading = asyncio.create_task(ids(stream))
    await world.clock.advance(2, step=0.1)
    with pytest.raises(errors.StreamGap):
        await reading
    assert stream.received == number
    assert echo_worker.bus.calls.active == {}


async def test_an_item_of_another_kind_is_an_error_of_whoever_sent_it() -> None:
    """What cannot be an answer to the request never reaches its caller, who may ask somebody else."""
    hub = MemoryHub()
    async with memory_buses("gateway", "embedding", hub=hub) as (gateway, embedding):
        await embedding.serve({})
        cancels = overheard(hub, f"{embedding.instance}.ctl")
        stream = gateway.open(
            "embedding", Embed(model="m", input=["a"]), instance=embedding.instance
        )
        await stream.start()
        wrong = Frames(PROTOCOL, embedding.instance, [Accepted(1), Item(1, 0, Text("a", [1]))])
        hub.publish(Message(subjects.frames_to(gateway.instance), encode(wrong)))
        with pytest.raises(errors.StreamBroken) as caught:
            await ids(stream)
        assert caught.value.retryable
        await settle()
        assert [part for m in cancels for part in decode_controls(m.data).controls] == [Cancel(1)]


async def test_a_lost_end_is_a_retryable_error(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    world.hub.lose = LoseOnce(lambda m: of_kind(m, End))
    reading = asyncio.create_task(ids(gateway.open("tokenizer", Echo(count=3, delay_ms=50))))
    await world.clock.advance(2)
    with pytest.raises(errors.StreamBroken) as caught:
        await reading
    assert caught.value.retryable


async def test_a_lost_end_is_noticed_while_silence_does_not_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage, or while the broker answers late: the instance says that the call has ended."""
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    monkeypatch.setattr(gateway.broker, "tick", lambda elapsed: 0.0)
    world.hub.lose = LoseOnce(lambda m: of_kind(m, End))
    reading = asyncio.create_task(ids(gateway.open("tokenizer", Echo(count=3, delay_ms=50))))
    await world.clock.advance(1)
    with pytest.raises(errors.StreamBroken):
        await asyncio.wait_for(reading, 1.0)
    assert gateway.directory.ready("tokenizer"), "it is not taken for dead"
    assert len(echo_worker.served) == 1


async def test_a_call_of_which_frames_are_lost_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    monkeypatch.setattr(gateway.broker, "tick", lambda elapsed: 0.0)
    stream = gateway.open("tokenizer", Echo(count=1, delay_ms=3000))
    reading = asyncio.create_task(ids(stream))
    await world.clock.advance(0.3)
    opens = overheard(world.hub, ".open")
    hears = world.hub.lose
    world.hub.lose = lambda m: hears(m) or m.subject.endswith(".frames")
    await world.clock.advance(1)
    assert opens, "it is asked whether it still runs"
    world.hub.lose = lambda m: False
    await world.clock.advance(3)
    assert await asyncio.wait_for(reading, 1.0) == [0]
    assert len(echo_worker.served) == 1


async def test_a_lost_tail_is_noticed_by_the_beat(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    world.hub.lose = LoseOnce(lambda m: of_kind(m, Item))
    stream = gateway.open("tokenizer", Echo(count=2, delay_ms=1500))
    reading = asyncio.create_task(ids(stream))
    await world.clock.advance(1.95, step=0.05)
    with pytest.raises(errors.StreamGap):
        await reading


async def test_silence_is_death_but_beats_are_not_silence(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    stream = gateway.open("tokenizer", Echo(count=1, delay_ms=5000))
    reading = asyncio.create_task(ids(stream))
    await world.clock.advance(3)
    assert not reading.done()
    world.hub.lose = lambda m: m.subject.endswith(
        ".frames"
    )  # a hung loop: probes might still be answered
    await world.clock.advance(1)
    with pytest.raises(errors.WorkerLost):
        await reading
    world.hub.lose = lambda m: False
    await settle()
    assert not gateway.directory.ready("tokenizer"), "a suspect is not offered"
    await world.clock.advance(2.5)
    assert [h.instance for h in gateway.directory.ready("tokenizer")] == [echo_worker.bus.instance]


async def test_a_dead_worker_bounces_the_probe(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    stream = gateway.open("tokenizer", Echo(count=1000, delay_ms=20))
    reading = asyncio.create_task(ids(stream))
    await world.clock.advance(0.5)
    die(echo_worker.bus)
    await world.clock.advance(0.25)
    with pytest.raises(errors.WorkerLost):
        await reading
    assert stream.received > 5


async def test_a_dead_worker_is_noticed_while_echoes_are_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is starved answers late, and still knows who has no subscription."""
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    for transport in (gateway.control, gateway.frames):
        monkeypatch.setattr(transport, "ping", lambda: world.clock.sleep(0.4))
    stream = gateway.open("tokenizer", Echo(count=100, delay_ms=100))
    reading = asyncio.create_task(ids(stream))
    await world.clock.advance(1.5)
    assert not gateway.broker.settled
    assert not reading.done()
    die(echo_worker.bus)
    await world.clock.advance(1.5)
    with pytest.raises(errors.WorkerLost):
        await asyncio.wait_for(reading, 1.0)


async def test_a_probe_that_a_dying_worker_still_took_does_not_hide_its_death(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    stream = gateway.open("tokenizer", Echo(count=1000, delay_ms=20))
    reading = asyncio.create_task(ids(stream))
    await world.clock.advance(0.5)
    control = subjects.control_at(echo_worker.bus.instance)
    taken = LoseOnce(lambda m: m.subject == control and bool(m.reply))
    world.hub.lose = taken
    await world.clock.advance(0.1)
    assert taken.lost == 1
    die(echo_worker.bus)
    await world.clock.advance(0.25)  # three beats have not been missed yet
    assert reading.done()
    with pytest.raises(errors.WorkerLost):
        await reading


async def test_a_dead_caller_frees_its_calls(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    streams = [gateway.open("tokenizer", Echo(count=1000, delay_ms=50)) for _ in range(5)]
    for stream in streams:
        await stream.start()
    await world.clock.advance(0.3)
    assert len(echo_worker.bus.calls.active) == 5
    die(gateway)
    await world.clock.advance(0.3)
    assert echo_worker.bus.calls.active == {}
    assert echo_worker.ended == ["cancelled"] * 5


async def test_leaving_early_cancels_at_once(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    async with gateway.open("tokenizer", Echo(count=1000, delay_ms=10)) as stream:
        await world.clock.advance(0.1)
        assert stream.received
    await settle()
    assert echo_worker.ended == ["cancelled"]
    gateway.check_integrity()
    assert gateway.caller.streams == {}


async def test_an_open_that_cannot_be_sent_leaves_no_stream(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await world.gateway()

    async def publish(*_: object, **__: object) -> None:
        raise RuntimeError("the transport is closed")

    monkeypatch.setattr(gateway.control, "publish", publish)
    with pytest.raises(RuntimeError):
        async with gateway.open("tokenizer", Echo(count=1)):
            pass
    assert gateway.caller.streams == {}


async def test_a_cancel_while_news_come_is_not_lost(world: World) -> None:
    """A heartbeat and a cancel in the same iteration: a pipeline that waits for an instance ends."""
    gateway = await world.gateway()

    async def wait() -> None:
        while True:
            await gateway.directory.changed(60.0)

    waiting = asyncio.create_task(wait())
    await settle()
    gateway.directory._changed.set()
    waiting.cancel()
    await settle()
    assert waiting.cancelled()


async def test_cancel_before_anyone_accepted(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    async with gateway.open("tokenizer", Echo(count=1000, delay_ms=10)):
        pass  # the open is on its way
    await world.clock.advance(0.3)
    assert echo_worker.bus.calls.active == {}


async def test_cancel_that_overtakes_its_open(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    calls = echo_worker.bus.calls
    calls.on_control(Message("ctl", encode(Controls(PROTOCOL, gateway.instance, [Cancel(7)]))))
    late = Open(v=PROTOCOL, caller=gateway.instance, stream=7, credit=1, body=Echo())
    calls.on_open(Message("open", encode(late)))
    await settle()
    assert echo_worker.served == []


async def test_a_cancel_that_comes_with_its_open_leaves_nothing(world: World) -> None:
    """Both in one segment: the handler is cancelled before it has begun, and is not listed for ever."""
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    request = Open(v=PROTOCOL, caller=gateway.instance, stream=7, credit=1, body=Echo(count=10))
    await gateway.control.publish(subjects.open_at(echo_worker.bus.instance), encode(request))
    controls = Controls(PROTOCOL, gateway.instance, [Cancel(7)])
    await gateway.control.publish(subjects.control_at(echo_worker.bus.instance), encode(controls))
    await settle()
    assert not echo_worker.bus.calls.active
    assert not echo_worker.served
    echo_worker.check_integrity()
    await echo_worker.bus.calls.drain(1.0)


async def test_deadlines_end_both_sides(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    reading = asyncio.create_task(
        ids(gateway.open("tokenizer", Echo(count=100, delay_ms=100), deadline=0.55))
    )
    await world.clock.advance(0.8)
    with pytest.raises(errors.DeadlineExceeded):
        await reading
    assert echo_worker.ended == ["cancelled"]


async def test_a_worker_ends_at_the_deadline_by_itself(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    stream = gateway.open("tokenizer", Echo(count=100, delay_ms=100), deadline=0.5)
    await stream.start()
    await settle()
    stream.expires = None  # a caller that has forgotten
    await world.clock.advance(0.8)
    with pytest.raises(errors.DeadlineExceeded):
        await ids(stream)


async def test_errors_keep_their_type_and_param(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    stream = gateway.open("tokenizer", Echo(count=5, fail_at=2))
    with pytest.raises(errors.ContextTooLong) as caught:
        await ids(stream)
    assert (stream.received, caught.value.param) == (2, "messages")


async def test_overload_is_refused_at_the_door(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker(max_active=2)
    running_streams = [gateway.open("tokenizer", Echo(count=100, delay_ms=100)) for _ in range(2)]
    for stream in running_streams:
        await stream.start()
    await settle()
    with pytest.raises(errors.Overloaded):
        await ids(gateway.open("tokenizer", Echo()))
    for stream in running_streams:
        await stream.aclose()
    await settle()
    assert await ids(gateway.open("tokenizer", Echo())) == [0]
    echo_worker.check_integrity()


async def test_draining_refuses_new_work_and_finishes_the_old(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    reading = asyncio.create_task(ids(gateway.open("tokenizer", Echo(count=5, delay_ms=100))))
    await world.clock.advance(0.2)
    stopping = asyncio.create_task(echo_worker.stop())
    await settle()
    with pytest.raises(errors.Draining):
        await ids(gateway.open("tokenizer", Echo()))
    await world.clock.advance(1)
    assert await reading == list(range(5))
    await stopping
    assert gateway.directory.instances("tokenizer") == []


async def test_too_large_an_item_fails_only_its_own_stream(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    world.hub.max_payload = 2000
    big, small = (
        gateway.open("tokenizer", Echo(count=2, text="x" * n, delay_ms=50)) for n in (3000, 5)
    )
    for bus in world.buses:
        bus.frames.max_payload = bus.control.max_payload = 100_000
    for bus in world.buses[1:]:
        bus.frames.max_payload = 2000
    reading = [asyncio.create_task(ids(s)) for s in (big, small)]
    await world.clock.advance(0.3)
    with pytest.raises(errors.PayloadTooLarge) as refused:
        await reading[0]
    assert re.search(r"\b30\d\d\b.*\b2000\b", refused.value.message)
    assert await reading[1] == [0, 1]


async def test_a_deadline_beyond_all_time_is_no_deadline(world: World) -> None:
    """Its milliseconds are a number of 64 bits, whose next neighbour as a float is not."""
    gateway, _ = await world.gateway(), await world.echo_worker()
    stream = gateway.open("tokenizer", Echo(count=3), deadline=(2**64 - 1) / 1000)
    assert await ids(stream) == [0, 1, 2]
    assert stream.request.deadline_ms == FOREVER


async def test_what_cannot_be_written_fails_only_its_own_stream(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    with pytest.raises(errors.InternalError):
        await ids(gateway.open("tokenizer", Echo(count=2**64)))
    assert await ids(gateway.open("tokenizer", Echo(count=2))) == [0, 1]
    gateway.check_integrity()


async def test_too_large_an_open_names_both_sizes(world: World) -> None:
    gateway, _ = await world.gateway(), await world.echo_worker()
    gateway.control.max_payload = 1000
    with pytest.raises(errors.PayloadTooLarge):
        await ids(gateway.open("tokenizer", Echo(text="x" * 2000)))


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"", errors.MalformedMessage),
        (b"\xc1\xff", errors.MalformedMessage),
        (encode({"type": "open", "v": PROTOCOL}), errors.MalformedMessage),
        (
            encode(
                {
                    "type": "open",
                    "v": PROTOCOL,
                    "caller": "Gate Way",
                    "stream": 1,
                    "credit": 1,
                    "body": {"type": "echo"},
                }
            ),
            errors.MalformedMessage,
        ),
        (
            encode(
                {
                    "type": "open",
                    "v": PROTOCOL,
                    "caller": "gateway-1",
                    "stream": -1,
                    "credit": 1,
                    "body": {"type": "echo"},
                }
            ),
            errors.MalformedMessage,
        ),
        (
            encode(
                {
                    "type": "open",
                    "v": PROTOCOL,
                    "caller": "gateway-1",
                    "stream": 1,
                    "credit": 1,
                    "body": {"type": "nope"},
                }
            ),
            errors.MalformedMessage,
        ),
        (encode({"type": "open", "v": 99, "news": 1}), errors.ProtocolMismatch),
        (encode([1, 2]), errors.MalformedMessage),
    ],
)
async def test_a_bad_open_gets_a_typed_error_and_harms_nobody(
    world: World, payload: bytes, error: type
) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    stream = gateway.open("tokenizer", Echo())
    stream.attempts = 1
    stream.next_resend = 1e9
    reply = subjects.open_reply(gateway.instance, stream.number)
    world.hub.publish(Message(subjects.operation("tokenizer", "echo"), payload, reply))
    await settle()
    stream._started = True
    with pytest.raises(error):
        await ids(stream)
    assert sum(echo_worker.bus.calls.dropped.values()) == 1
    assert await ids(gateway.open("tokenizer", Echo())) == [0]


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", encode([1]), encode(["f", 9, "tokenizer-1", []]), encode(["f", 1, "?", []])],
)
async def test_bad_frames_and_controls_are_counted_and_dropped(
    world: World, payload: bytes
) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    world.hub.publish(Message(subjects.frames_to(gateway.instance), payload))
    world.hub.publish(Message(subjects.control_at(echo_worker.bus.instance), payload))
    world.hub.publish(Message(subjects.heartbeat(echo_worker.bus.instance), payload))
    await settle()
    assert sum(gateway.caller.dropped.values()) == 1
    assert sum(echo_worker.bus.calls.dropped.values()) == 1
    assert sum(gateway.directory.dropped.values()) == 1
    assert await ids(gateway.open("tokenizer", Echo(count=2))) == [0, 1]


async def test_stray_frames_are_refused_with_a_cancel(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    seen: list[bytes] = []
    await world.hub.transport().subscribe(
        subjects.control_at(echo_worker.bus.instance), lambda m: seen.append(m.data)
    )
    frames: list[Frame] = [Accepted(99), Item(99, 0, Text("x", [1]))]
    world.hub.publish(
        Message(
            subjects.frames_to(gateway.instance),
            encode(Frames(PROTOCOL, echo_worker.bus.instance, frames)),
        )
    )
    await settle()
    assert [decode_controls(data).controls for data in seen] == [[Cancel(99)]]


@settings(max_examples=30)
@given(
    lost=st.sets(st.integers(0, 60), max_size=8),
    doubled=st.sets(st.integers(0, 60), max_size=8),
    count=st.integers(0, 25),
    window=st.integers(1, 9),
    delay=st.sampled_from([0.0, 30.0]),
)
def test_whatever_the_wire_does_a_stream_is_a_true_prefix(
    lost: set[int], doubled: set[int], count: int, window: int, delay: float
) -> None:
    """Either all items in order and an End, or a typed error after a prefix: never a hole, never a repeat."""

    async def scenario() -> None:
        hub, clock = MemoryHub(), FakeClock()
        gateway = await memory_bus(hub, "gateway", clock)
        async with running(EchoWorker(await memory_bus(hub, "tokenizer", clock))) as echo_worker:
            await settle()
            base = hub.messages
            hub.lose = lambda m: hub.messages - base in lost
            hub.deliver_twice = lambda m: hub.messages - base in doubled
            stream = gateway.open("tokenizer", Echo(count=count, delay_ms=delay), window=window)
            got: list[int] = []

            async def read() -> None:
                async with stream:
                    async for body in stream:
                        assert isinstance(body, Text)
                        got.extend(body.ids)

            reading = asyncio.create_task(read())
            await clock.advance(20, step=0.1)
            assert reading.done(), "a stream must not hang"
            assert got == list(range(len(got)))
            if reading.exception() is None:
                assert len(got) == count
            else:
                assert isinstance(reading.exception(), errors.MotetError)
            await clock.advance(6, step=0.1)
            assert echo_worker.bus.calls.active == {}, "the worker must not go on for nobody"
            gateway.check_integrity()
        await gateway.close()

    asyncio.run(scenario())
