"""The life of an actor process: states, refusals, crashes, exit codes, stats."""

import asyncio
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from motet_shared import errors
from motet_shared.messages import Echo, ModelCard, Text
from motet_shared.process.actor import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_UNREACHABLE,
    Actor,
    operation,
)
from motet_shared.process.memory_turn import Gate
from motet_shared.process.telemetry import Metrics
from motet_shared.testing import MemoryHub, NatsServer, memory_bus, memory_buses, running, settle
from motet_shared.wire.call import Call


class EchoWorker(Actor):
    role = "tokenizer"

    async def warm(self) -> None:
        await asyncio.sleep(0)

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="echo", context=8)]

    def load(self) -> dict[str, float]:
        return {"queued": 3.0}

    @operation(Echo)
    async def echo(self, call: Call, request: Echo) -> None:
        await call.send(Text(request.text, [1]))


async def test_what_an_actor_serves_and_how_loaded_it_is_travels_in_heartbeats() -> None:
    async with (
        memory_buses("gateway", "tokenizer") as (gateway, bus),
        running(EchoWorker(None, bus)),
    ):
        await settle()
        (beat,) = gateway.directory.ready("tokenizer", model="echo")
        assert (beat.instance, beat.load["queued"]) == (bus.instance, 3.0)
        assert gateway.directory.ready("tokenizer", model="other") == []
        assert gateway.directory.outstanding(bus.instance) == 0
    assert gateway.directory.instances("tokenizer") == []


async def test_a_newcomer_knows_everybody_at_once() -> None:
    hub = MemoryHub()
    async with memory_buses("tokenizer", hub=hub) as (bus,), running(EchoWorker(None, bus)):
        await settle()
        gateway = await memory_bus(hub, "gateway")
        await settle()
        assert len(gateway.directory.ready("tokenizer")) == 1
        await gateway.close()


async def test_an_unknown_operation_is_refused_by_name() -> None:
    class Mute(Actor):
        role = "tokenizer"

    async with memory_buses("gateway", "tokenizer") as (gateway, bus), running(Mute(None, bus)):
        with pytest.raises(errors.BadRequest):
            async with gateway.open("tokenizer", Echo(), instance=bus.instance) as stream:
                await anext(stream.batches())


async def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    async with memory_buses("tokenizer") as (bus,):
        echo_worker = EchoWorker(None, bus)
        (card,) = echo_worker.models()
        echo_worker.check_served(card.name)
        with pytest.raises(errors.UnknownModel):
            echo_worker.check_served("gpt-99")
        with pytest.raises(errors.UnknownModel):
            Actor(None, bus).check_served(card.name)


async def test_waiting_for_the_directory_times_out() -> None:
    async with memory_buses("gateway") as (gateway,):
        with pytest.raises(TimeoutError):
            await gateway.directory.wait_for(lambda d: d.ready("decode"), 0.05)


async def test_stats_become_gauges() -> None:
    async with (
        memory_buses("gateway", "tokenizer") as (gateway, bus),
        running(EchoWorker(None, bus)),
    ):
        await settle()
        async with gateway.open("tokenizer", Echo(text="x")) as stream:
            assert [b async for b in stream] == [Text("x", [1])]
        metrics = Metrics("tokenizer", bus.instance)
        metrics.watch(lambda: bus.stats() | {"dropped": {"malformed": 2}})
        page = metrics.render().decode()
    labels = f'instance="{bus.instance}",role="tokenizer"'
    assert f"motet_requests{{{labels}}} 1.0" in page
    assert (
        f'motet_dropped{{instance="{bus.instance}",kind="malformed",role="tokenizer"}} 2.0' in page
    )


PROCESS = """
import asyncio
from motet_shared.process.actor import Actor, run
from motet_shared.process.config import ProcessConfig
class Doomed(Actor):
    role = "tokenizer"
    async def warm(self):
        {warm}
run(Doomed, ProcessConfig)
"""


async def process(warm: str, *argv: str, **env: str) -> tuple[int | None, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROCESS.format(warm=warm),
        *argv,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MOTET_METRICS_PORT": "-1",
            **env,
        },
        stderr=subprocess.PIPE,
    )
    _, trouble = await asyncio.wait_for(child.communicate(), 60)
    return child.returncode, trouble.decode()


async def test_wrong_settings_end_with_their_own_exit_code() -> None:
    code, trouble = await process("pass", "--metrics-port", "many")
    assert code == EXIT_CONFIG
    assert "metrics-port" in trouble
    code, trouble = await process("pass", "--instance", "decode-1")
    assert code == EXIT_CONFIG
    assert "tokenizer-" in trouble


async def test_a_server_that_does_not_answer_may_be_one_that_has_not_started() -> None:
    code, trouble = await process("pass", "--nats-url", "nats://127.0.0.1:1")
    assert code == EXIT_UNREACHABLE
    assert "nats://127.0.0.1:1" in trouble


async def test_a_crash_ends_the_process_and_says_why() -> None:
    async with NatsServer() as server:
        env = {"MOTET_NATS_URL": server.url, "MOTET_NATS_CREDENTIALS": str(server.credentials)}
        code, trouble = await process(
            "asyncio.get_running_loop().call_later(0.1, self.crash, OSError('disk'))", **env
        )
        assert code == EXIT_CRASH
        assert "disk" in trouble
        code, trouble = await process("raise ValueError('weights are torn')", **env)
        assert code == EXIT_CRASH
        assert "weights are torn" in trouble


LEFT = """
import os
names = {"MOTET_INSTANCE", "MOTET_MEMORY_GATE", "MOTET_WAIT_FOR_EXIT"}
raise SystemExit(" ".join(["left:", *sorted(names & os.environ.keys())]))
"""


async def test_a_process_that_becomes_another_one_leaves_it_nothing_of_its_own_start(
    tmp_path: Path,
) -> None:
    """The gate of the memory is not opened again, as the turn of this process has come."""
    gate = Gate(tmp_path / "gate")
    gate.open([])
    async with NatsServer() as server:
        code, told = await process(
            f"import sys; self.becomes = [sys.executable, '-c', {LEFT!r}]; self.leave.set()",
            MOTET_NATS_URL=server.url,
            MOTET_NATS_CREDENTIALS=str(server.credentials),
            MOTET_INSTANCE="tokenizer-1",
            MOTET_MEMORY_GATE=str(gate.path),
            MOTET_WAIT_FOR_EXIT=f"{os.getpid()}:1",
        )
    gate.close()
    assert (code, told.splitlines()[-1]) == (1, "left:")


async def test_a_process_tells_how_long_its_start_took() -> None:
    async with NatsServer() as server:
        env = {"MOTET_NATS_URL": server.url, "MOTET_NATS_CREDENTIALS": str(server.credentials)}
        warm = "await asyncio.sleep(0.25); self.crash(OSError('enough'))"
        _, told = await process(warm, "--log-format", "json", **env)
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    [ready] = [line for line in lines if line["message"] == "ready"]
    stages = {name: ready[name] for name in ("imports", "connected", "warm-up", "registered")}
    assert stages["warm-up"] > 0.1  # the sleep, less what clocks and rounding take
    assert ready["start"] == pytest.approx(sum(stages.values()), abs=0.01)


def test_what_runs_without_torch_imports_without_torch() -> None:
    modules = (
        "motet_shared.process.actor, motet_gateway.service, motet_tokenizer.service,"
        " motet_pipelines.chat.chat, motet_cli.supervision.up"
    )
    code = f"import sys; sys.modules['torch'] = None; import {modules}"  # None: as if it were not installed
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("too much"), "overloaded"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "overloaded"),
        (RuntimeError("can't start new thread"), "overloaded"),
        (RuntimeError("something else"), "internal"),
        (OSError(errno.EACCES, "Permission denied"), "internal"),
        (errors.BadRequest("no"), "invalid_request"),
    ],
)
def test_what_lacks_memory_may_be_tried_again(error: Exception, code: str) -> None:
    wire = errors.as_motet_error(error)
    assert (wire.code, wire.retryable) == (code, code == "overloaded")
