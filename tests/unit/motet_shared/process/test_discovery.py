"""Who is alive: heartbeats, silence, suspicion, and what hangs on an instance's life."""

import asyncio
import json
import math
from types import SimpleNamespace

import pytest

from motet_shared.blobs.store import BlobStore
from motet_shared.messages import PROTOCOL, Detokenize, Heartbeat, ModelCard, encode
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import FakeClock, MemoryHub, die, memory_bus, memory_buses, settle
from motet_shared.wire import subjects
from motet_shared.wire.discovery import ANSWERED, HEARD, HEARTBEAT_EVERY, Directory
from motet_shared.wire.instances import pick
from motet_shared.wire.transport import Message
from support.services.fake_services import FakeTokenizer


async def test_silence_is_noticed_and_frees_the_leases_of_the_dead() -> None:
    hub, clock = MemoryHub(), FakeClock()
    writer, reader = (
        await memory_bus(hub, "gateway", clock),
        await memory_bus(hub, "tokenizer", clock),
    )
    await settle()
    async with BlobStore.of(ProcessConfig(), writer, 1 << 20) as store:
        store.put(b"for one reader", readers=[reader.instance])
        await clock.advance(5)
        assert store.stats()["blobs"] == 1, "a reader that beats keeps its lease"
        die(reader)
        await clock.advance(5)
        assert writer.directory.instances("tokenizer") == []
        assert store.stats()["blobs"] == 0
        store.check_integrity()
    await writer.close()
    await reader.close()


async def test_a_goodbye_is_heard_at_once() -> None:
    gone: list[str] = []
    async with memory_buses("gateway", "tokenizer") as (gateway, tokenizer):
        gateway.directory.on_gone.append(gone.append)
        tokenizer.set_state("stopped")
        await settle()
        assert gone == [tokenizer.instance]
        assert gateway.directory.instances("tokenizer") == []


async def test_a_suspect_is_offered_again_once_it_beats() -> None:
    hub, clock = MemoryHub(), FakeClock()
    gateway, tokenizer = (
        await memory_bus(hub, "gateway", clock),
        await memory_bus(hub, "tokenizer", clock),
    )
    tokenizer.set_state("ready")
    await settle()
    gateway.directory.suspect(tokenizer.instance)
    assert gateway.directory.ready("tokenizer") == []
    assert [beat.instance for beat in gateway.directory.ready("tokenizer", suspects=True)] == [
        tokenizer.instance
    ]
    waiting = asyncio.create_task(gateway.directory.wait_for(lambda d: d.ready("tokenizer"), 60))
    await clock.advance(1.5)
    assert [beat.instance for beat in await waiting] == [tokenizer.instance]
    for bus in (gateway, tokenizer):
        await bus.close()


async def test_nobody_can_speak_for_another() -> None:
    hub = MemoryHub()
    async with memory_buses("gateway", hub=hub) as (gateway,):
        forged = Heartbeat(v=PROTOCOL, role="decode", instance="decode-1", state="ready", seq=0)
        hub.publish(Message(subjects.heartbeat("tokenizer-1"), encode(forged)))
        hub.publish(
            Message(
                subjects.heartbeat("decode-1"), encode(Heartbeat(**{**_fields(forged), "v": 99}))
            )
        )
        await settle()
        assert gateway.directory.instances("decode") == []
        assert gateway.directory.dropped["forged_heartbeat"] == 2


async def test_streams_of_others_count_as_announced_and_ours_as_they_are() -> None:
    ours: dict[str, list[int]] = {"tts-1": [1, 2, 3]}
    directory = Directory(SimpleNamespace(by_peer=ours))  # type: ignore[arg-type]
    beat = Heartbeat(
        v=PROTOCOL, role="tts", instance="tts-1", state="ready", seq=0, load={"active": 5.0}
    )
    assert directory.active("tts-1") == 3, "nothing is announced yet"
    directory.on_heartbeat(Message(subjects.heartbeat("tts-1"), encode(beat)))
    assert directory.active("tts-1") == 5, "three of the five are ours"
    ours["tts-1"].append(4)
    assert directory.active("tts-1") == 6
    ours["tts-1"].clear()
    assert directory.active("tts-1") == 2


async def test_in_a_large_stack_heartbeats_come_less_often_and_instances_expire_later() -> None:
    directory = Directory(SimpleNamespace(by_peer={}))  # type: ignore[arg-type]
    newcomers: list[None] = []
    directory.on_newcomer = lambda: newcomers.append(None)
    assert directory.period == HEARTBEAT_EVERY
    for number in range(600):
        beat = Heartbeat(
            v=PROTOCOL, role="tts", instance=f"tts-{number}", state="ready", seq=0, every=2.0
        )
        directory.on_heartbeat(Message(subjects.heartbeat(beat.instance), encode(beat)))
    assert directory.period == 600 / HEARD
    assert len(newcomers) == ANSWERED, "later ones are not answered by everybody at once"
    await directory.tick(4.9)
    assert len(directory.instances("tts")) == 600
    await directory.tick(0.3)
    assert not directory.instances("tts"), "2.5 periods have passed"


async def test_the_least_busy_instance_is_picked_whoever_keeps_it_busy() -> None:
    async with memory_buses("gateway", "tts", "tts") as (gateway, busy, idle):
        busy.presence = lambda: ([ModelCard(name="voice", context=0)], {"active": 2.0})
        idle.presence = lambda: ([ModelCard(name="voice", context=0)], {"active": 1.0})
        for bus in (busy, idle):
            bus.set_state("ready")
        await settle()
        assert {await pick(gateway, "tts", "voice") for _ in range(8)} == {idle.instance}
        assert await pick(gateway, "tts", "voice", avoid=idle.instance) == busy.instance


@pytest.mark.parametrize("load", [math.nan, math.inf, -math.inf])
async def test_a_load_that_nobody_can_compute_with_is_not_heard(load: float) -> None:
    hub = MemoryHub()
    async with memory_buses("gateway", hub=hub) as (gateway,):
        beat = Heartbeat(
            v=PROTOCOL,
            role="decode",
            instance="decode-1",
            state="ready",
            seq=0,
            load={"queued": load},
        )
        hub.publish(Message(subjects.heartbeat("decode-1"), encode(beat)))
        await settle()
        assert gateway.directory.instances("decode") == []
        assert gateway.directory.dropped["malformed_heartbeat"] == 1


async def test_a_duty_that_fails_holds_up_no_other() -> None:
    hub, clock = MemoryHub(), FakeClock()
    gateway, tokenizer = (
        await memory_bus(hub, "gateway", clock),
        await memory_bus(hub, "tokenizer", clock),
    )

    async def fail(elapsed: float) -> None:
        raise ValueError("a duty")

    gateway.monitor.duties.insert(0, fail)
    await clock.advance(5)
    assert tokenizer.directory.instances("gateway"), "it still beats"
    for bus in (gateway, tokenizer):
        await bus.close()


async def test_stats_say_whether_the_state_is_sound() -> None:
    hub = MemoryHub()
    async with memory_buses("gateway", "tokenizer", hub=hub) as (_, tokenizer):
        client = hub.transport()
        subject = subjects.service("STATS", "motet-tokenizer", tokenizer.instance)
        actor = FakeTokenizer(None, tokenizer)
        await actor.start()

        async def integrity() -> str:
            return str(
                json.loads(await client.request(subject, b"", timeout=20))["metadata"]["integrity"]
            )

        assert await integrity() == "ok"
        tokenizer.calls.active["gateway-1", 1] = None  # type: ignore[assignment]
        assert await integrity() == "busy"
        del tokenizer.calls.active["gateway-1", 1]
        async with tokenizer.open("decode", Detokenize("model", [1]), instance="decode-1"):
            assert (await integrity()).startswith("busy Detokenize@")
        actor.check_integrity = lambda: 1 // 0  # type: ignore[method-assign,assignment]
        assert (await integrity()).startswith("ZeroDivisionError")


def _fields(beat: Heartbeat) -> dict:
    return {name: getattr(beat, name) for name in beat.__struct_fields__}


async def test_the_service_api_answers_in_json() -> None:
    hub = MemoryHub()
    async with memory_buses("gateway", "tokenizer", hub=hub) as (gateway, tokenizer):
        del gateway
        client = hub.transport()
        subject = subjects.service("PING", "motet-tokenizer", tokenizer.instance)
        answer = json.loads(await client.request(subject, b"", timeout=20))
        assert answer["id"] == tokenizer.instance
        assert answer["metadata"]["state"] == "starting"
