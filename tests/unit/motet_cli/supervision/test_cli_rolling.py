"""Test which processes are replaced and ended, of models that leave and of instances that fail."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.logs import Log
from motet_cli.supervision.orders import Restart, Scale
from motet_cli.supervision.rolling import Rolling
from motet_cli.supervision.supervisor import Slot, Supervisor
from support.running.until import until


def spec(name: str, role: str = "decode") -> ChildSpec:
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    return ChildSpec(name=name, role=role, argv=argv, model="a")


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    log = Log(io.StringIO())
    made = Supervisor(log)
    yield made
    await made.kill()
    log.close()


@pytest.fixture
def rolling(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Rolling:
    """Provide orders for processes that no directory is to know of."""

    @asynccontextmanager
    async def directory() -> AsyncIterator[Any]:
        yield None

    made = Rolling(supervisor, NatsAccess("nats://127.0.0.1:1"), lambda text: None)
    monkeypatch.setattr(made, "_directory", directory)
    return made


async def started(supervisor: Supervisor, *specs: ChildSpec) -> list[Slot]:
    supervisor.start(specs)
    await until(lambda: all(slot.state == "running" for slot in supervisor.slots))
    return list(supervisor.slots)


async def test_what_was_unloaded_meanwhile_is_not_replaced(
    supervisor: Supervisor, rolling: Rolling
) -> None:
    (gone,) = await started(supervisor, spec("a"))
    assert await supervisor.remove(gone)
    leaving = supervisor.adopt(await Child.start(spec("b"), lambda line: None), leaving=True)
    await rolling.update([(gone, gone.spec), (leaving, leaving.spec)], [gone], [])
    await rolling.carry_out(Restart(["decode"], 0.0), lambda text: None)
    assert supervisor.slots == [leaving]


async def test_scaling_down_keeps_what_does_not_fail(
    supervisor: Supervisor, rolling: Rolling
) -> None:
    failing, second, third = await started(supervisor, spec("a"), spec("b"), spec("c"))
    for _ in range(failing.backoff.policy.burst + 1):
        failing.backoff.exited(time.monotonic(), 0.0)
    await rolling.carry_out(Scale({"decode": 2}, 0.0), lambda text: None)
    assert supervisor.slots == [second, third]
    second.state = "waiting"  # it has ended once, and starts again in a moment
    await rolling.carry_out(Scale({"decode": 1}, 0.0), lambda text: None)
    assert supervisor.slots == [third]
    assert second.child is not None
    await second.child.kill()
