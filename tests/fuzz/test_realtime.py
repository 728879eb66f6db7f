"""Events of all kinds in any order, damaged ones among them: a session refuses what is wrong, and lives on."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from fuzz.mutations import Fuzzer
from motet_shared.testing import memory_bus, running, settle
from motet_vad.config import VadConfig
from motet_vad.service import Vad
from support.clients.gateway_client import Socket, World, world
from support.clients.realtime_client import check_event
from support.media.spoken import say, silence
from support.services.voice_services import ScriptedAsr, ScriptedTts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

T = TypeVar("T")
SESSIONS = int(os.environ.get("MOTET_FUZZ_SESSIONS", "15"))
EVENTS = 40  # of a session
PATIENCE = 30.0  # seconds for the last reply


@cache
def sound_of(number: int) -> str:
    """Half a turn, the other half, all of it, or what is no sound."""
    spoken = silence(300) + say("Two red circles.") + silence(600)
    return base64.b64encode(
        [spoken[:9600], spoken[9600:], spoken, bytes(4800), bytes(3), b""][number]
    ).decode()


texts = st.text(max_size=20)
ids = st.sampled_from(["item_1", "item_2", "none", "root", ""])
contents = st.one_of(
    st.fixed_dictionaries({"type": st.just("input_text"), "text": texts}),
    st.fixed_dictionaries({"type": st.just("output_text"), "text": texts}),
    st.fixed_dictionaries({"type": st.just("input_audio"), "transcript": texts}),
    st.fixed_dictionaries(
        {"type": st.just("input_audio"), "audio": st.integers(0, 5).map(sound_of)}
    ),
)
messages = st.fixed_dictionaries(
    {
        "type": st.just("message"),
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.lists(contents, max_size=3),
    },
    optional={"id": ids},
)
calls = st.fixed_dictionaries(
    {"type": st.just("function_call"), "name": st.just("draw"), "arguments": texts, "call_id": ids}
)
outputs = st.fixed_dictionaries(
    {"type": st.just("function_call_output"), "call_id": ids, "output": texts}
)
items = messages | calls | outputs
common = {
    "instructions": texts,
    "output_modalities": st.sampled_from([["text"], ["audio"], []]),
    "max_output_tokens": st.sampled_from([1, 50, "inf"]),
    "temperature": st.floats(0, 2),
    "tools": st.just([{"type": "function", "name": "draw", "parameters": {}}]),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
}
turns = st.sampled_from(
    [
        None,
        {"type": "server_vad", "silence_duration_ms": 100},
        {"type": "server_vad", "create_response": False, "interrupt_response": False},
        {"type": "semantic_vad", "eagerness": "high"},
    ]
)
sound = st.fixed_dictionaries(
    {},
    optional={
        "input": st.fixed_dictionaries(
            {},
            optional={
                "turn_detection": turns,
                "transcription": st.sampled_from([None, {"language": "en"}]),
            },
        ),
        "output": st.fixed_dictionaries(
            {}, optional={"voice": st.sampled_from(["alto", "nobody"])}
        ),
    },
)
videos = st.none() | st.fixed_dictionaries(
    {"type": st.sampled_from(["window", "stride", "merged"])},
    optional={"frames": st.integers(0, 4), "groups": st.integers(1, 2)},
)
patches = st.fixed_dictionaries(
    {"type": st.just("realtime")}, optional=common | {"audio": sound, "video": videos}
)
replies = st.fixed_dictionaries(
    {},
    optional=common
    | {
        "conversation": st.sampled_from(["auto", "none"]),
        "input": st.lists(
            items | st.fixed_dictionaries({"type": st.just("item_reference"), "id": ids}),
            max_size=2,
        ),
        "metadata": st.dictionaries(texts, texts, max_size=2),
    },
)


def event(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields}, optional={"event_id": texts})


events = st.one_of(
    event("session.update", session=patches),
    event("conversation.item.create", item=items),
    event("conversation.item.create", item=items, previous_item_id=ids),
    event("conversation.item.retrieve", item_id=ids),
    event("conversation.item.delete", item_id=ids),
    event(
        "conversation.item.truncate",
        item_id=ids,
        content_index=st.just(0),
        audio_end_ms=st.integers(0, 900),
    ),
    event("response.create"),
    event("response.create", response=replies),
    event("response.cancel"),
    event("input_audio_buffer.append", audio=st.integers(0, 5).map(sound_of)),
    event("input_image_buffer.append", image=st.sampled_from(["", "AAAA", "data:image/png,"])),
    event("input_audio_buffer.commit"),
    event("input_audio_buffer.clear"),
    event("output_audio_buffer.clear"),
)


class Conversation(RuleBasedStateMachine):
    """One session. `stage` has the loop, the gateway and its services, which all sessions share."""

    def __init__(self, stage: Stage):
        super().__init__()
        self._stage = stage
        self._socket = stage.run(_connected(stage.world))
        self._ids: list[str] = []

    @rule(event=events)
    def say(self, event: dict[str, Any]) -> None:
        self._send(json.dumps(event))

    @rule(event=events, seed=st.integers(0, 2**32))
    def say_something_damaged(self, event: dict[str, Any], seed: int) -> None:
        self._send(json.dumps(Fuzzer(seed).damaged(event), default=repr))

    @rule(event=events, cut=st.integers(0, 40), noise=st.text(max_size=5))
    def say_what_is_no_json(self, event: dict[str, Any], cut: int, noise: str) -> None:
        text = json.dumps(event)
        self._send(text[:cut] + noise + text[cut + 1 :])

    @rule(data=st.binary(max_size=50))
    def send_bytes(self, data: bytes) -> None:
        self._send(data)

    @rule(index=st.integers(0, 9), kind=st.sampled_from(["retrieve", "delete"]))
    def ask_for_an_item(self, index: int, kind: str) -> None:
        item = self._ids[index % len(self._ids)] if self._ids else "none"
        self._send(json.dumps({"type": f"conversation.item.{kind}", "item_id": item}))

    def _send(self, text: str | bytes) -> None:
        self._socket.send_raw(text)
        self._stage.run(settle(40))
        self._take()

    def _take(self) -> None:
        """All that has come is as it should be, and the session is open."""
        while self._socket.pending():
            told = self._stage.run(self._socket.receive())
            check_event(told)
            if told["type"] == "error":
                assert told["error"]["type"] != "server_error", told
            if told["type"] == "response.done":
                assert told["response"]["status"] != "failed", told["response"]
            if told["type"] == "conversation.item.added" and told["item"].get("id"):
                self._ids.append(told["item"]["id"])
        assert self._socket.closed is None
        assert not self._socket.task.done()

    def teardown(self) -> None:
        self._stage.run(self._end())
        super().teardown()

    async def _end(self) -> None:
        """Whatever was said before, the next question is answered."""
        turns = {"audio": {"input": {"turn_detection": None}}, "output_modalities": ["text"]}
        async with asyncio.timeout(PATIENCE):
            self._socket.send("session.update", session={"type": "realtime", **turns})
            self._socket.send("response.cancel", event_id="stop")
            await self._socket.until("session.updated")
            self._socket.say("are you there")
            self._socket.send(
                "response.create", response={"conversation": "none", "metadata": {"last": "yes"}}
            )
            while (done := (await self._socket.until("response.done"))[-1]["response"])[
                "metadata"
            ] != {"last": "yes"}:
                pass
        assert done["status"] == "completed", done
        assert "are you there" in done["output"][0]["content"][0]["text"]
        await self._socket.leave()


async def _connected(made: World) -> Socket:
    return Socket(made.app)


class Stage:
    """A world and the loop that it lives in, for tests that are no coroutines."""

    def __init__(self, runner: asyncio.Runner, made: World):
        self._runner, self.world = runner, made

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


@asynccontextmanager
async def _speaking_world() -> AsyncIterator[World]:
    async with world(patience=1.0) as made, AsyncExitStack() as stack:
        buses = {role: await memory_bus(made.hub, role) for role in ("asr", "tts", "vad")}
        vad = Vad(VadConfig(metrics_port=-1), buses["vad"])
        for actor in (ScriptedAsr(buses["asr"]), ScriptedTts(buses["tts"]), vad):
            await stack.enter_async_context(running(actor))
        await settle()
        yield made
        await made.service.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with asyncio.Runner() as runner:
        opened = _speaking_world()
        made = runner.run(opened.__aenter__())
        yield Stage(runner, made)
        runner.run(settle(200))
        assert not made.service.limits.active, "nothing is left of any session"
        made.service.authenticator.check_integrity()
        runner.run(opened.__aexit__(None, None, None))


def test_no_events_break_a_session(stage: Stage) -> None:
    machine: Any = lambda: Conversation(stage)  # noqa: E731  # declared as a class, called as a factory
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=SESSIONS,
            stateful_step_count=EVENTS,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
