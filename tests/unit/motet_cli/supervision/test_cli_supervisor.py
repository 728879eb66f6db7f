"""Test the supervisor with real processes that crash, hang, and ignore signals."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from motet_cli.supervision.backoff import Backoff, BackoffPolicy
from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.supervisor import AT_ONCE, Supervisor
from motet_shared.process.actor import EXIT_CONFIG
from support.running.until import until

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " print('up', flush=True); time.sleep(60)"
)
QUICK = BackoffPolicy(first=0.01, cap=0.05, burst=3, pause=30.0)


def spec(name: str, code: str, **changes: object) -> ChildSpec:
    return ChildSpec(name=name, role="test", argv=(sys.executable, "-c", code), **changes)  # type: ignore[arg-type]


class Output(io.StringIO):
    def has(self, text: str) -> bool:
        return text in self.getvalue()


@pytest.fixture
def output() -> Output:
    return Output()


@pytest.fixture
def log(output: Output) -> Iterator[Log]:
    log = Log(output)
    yield log
    log.close()


@asynccontextmanager
async def supervised(log: Log, *specs: ChildSpec) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(log, policy=QUICK)
    supervisor.start(specs)
    try:
        yield supervisor
    finally:
        await supervisor.kill()


async def restarted(supervisor: Supervisor, number: int = 0, times: int = 1) -> None:
    await until(
        lambda: (
            supervisor.slots[number].restarts >= times
            and supervisor.slots[number].state == "running"
        )
    )


# ---------------------------------------------------------------------------------------------------------- back-off
def test_delays_grow_to_the_cap_and_reset_after_a_healthy_run() -> None:
    backoff = Backoff(BackoffPolicy(first=1, factor=2, cap=3, healthy_after=10, burst=100))
    assert [backoff.exited(t, ran_for=0) for t in range(4)] == [1, 2, 3, 3]
    assert backoff.exited(20, ran_for=15) == 1


def test_the_delay_of_a_long_streak_is_the_cap() -> None:
    backoff = Backoff(AT_ONCE)
    delays = [backoff.exited(number * AT_ONCE.window, ran_for=0) for number in range(1100)]
    assert delays[-1] == AT_ONCE.cap


def test_too_many_exits_in_a_window_are_a_crash_loop() -> None:
    backoff = Backoff(BackoffPolicy(burst=2, window=10, pause=30))
    assert [backoff.exited(t, 0) == 30 for t in (0, 1, 2, 13)] == [False, False, True, False]
    assert not backoff.crash_loop(13)


# ---------------------------------------------------------------------------------------------------------- restarts
async def test_a_killed_process_restarts_as_another_instance(log: Log, output: Output) -> None:
    async with supervised(log, spec("worker", SLEEPS)) as supervisor:
        await until(lambda: output.has("worker │ up"))
        first = supervisor.describe()[0]
        os.kill(first["pid"], signal.SIGKILL)
        await restarted(supervisor)
        second = supervisor.describe()[0]
        assert second["pid"] != first["pid"]
        assert second["instance"] != first["instance"]
        assert second["last_exit"] == "killed by SIGKILL"
        await until(lambda: output.has("worker ended (killed by SIGKILL); next start in 0.01 s"))


async def test_processes_are_restarted_whatever_becomes_of_on_change(
    log: Log, output: Output
) -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    supervisor = Supervisor(log, policy=QUICK, on_change=fail)
    supervisor.start([spec("worker", SLEEPS)])
    try:
        await until(lambda: output.has("worker │ up"))
        os.kill(supervisor.describe()[0]["pid"], signal.SIGKILL)
        await restarted(supervisor)
        await until(lambda: output.has("OSError: the disk is full"))
        assert await supervisor.remove(supervisor.slots[0])
        assert supervisor.slots == []
    finally:
        await supervisor.kill()


async def test_an_adopted_process_that_returns_is_restarted_at_once(log: Log) -> None:
    async with supervised(log) as supervisor:
        for one, policy in ((spec("a", SLEEPS, returns=True), AT_ONCE), (spec("b", SLEEPS), QUICK)):
            slot = supervisor.adopt(await Child.start(one, lambda line: None))
            assert slot.backoff.policy == policy


async def test_a_crash_loop_is_reported_and_does_not_affect_others(
    log: Log, output: Output
) -> None:
    broken = spec("broken", "print('weights are missing'); raise SystemExit(3)")
    async with supervised(log, broken, spec("fine", SLEEPS)) as supervisor:
        await until(lambda: supervisor.slots[0].state == "failing")
        await until(lambda: supervisor.slots[1].state == "running")
        await until(
            lambda: output.has("broken keeps ending (exit code 3); next start in 30 s; last lines:")
        )
        assert output.getvalue().rstrip().endswith("    weights are missing")
        assert supervisor.slots[1].restarts == 0


async def test_a_wrong_setting_is_reported_and_not_tried_again(log: Log, output: Output) -> None:
    wrong = spec("wrong", f"print('args: no such flag'); raise SystemExit({EXIT_CONFIG})")
    async with supervised(log, wrong, spec("fine", SLEEPS)) as supervisor:
        async with asyncio.timeout(20):
            await asyncio.gather(*(t for t in asyncio.all_tasks() if t.get_name() == "keep wrong"))
        slot = supervisor.slots[0]
        assert (slot.state, slot.refused, slot.restarts) == ("failing", True, 0)
        # The line as it was printed, and again where the end is reported.
        await until(lambda: output.getvalue().count("args: no such flag") == 2)
        assert output.has("wrong ended (exit code 78)")
        await until(lambda: supervisor.slots[1].state == "running")
        assert await supervisor.stop()


async def test_a_command_that_does_not_exist_is_reported(log: Log, output: Output) -> None:
    async with supervised(
        log, ChildSpec(name="ghost", role="test", argv=("/nowhere/at/all",))
    ) as supervisor:
        await until(lambda: output.has("ghost ended (cannot start: "))
        assert supervisor.describe()[0]["pid"] is None


async def test_each_process_receives_its_instance_id(log: Log, output: Output) -> None:
    code = "import os, time; print(os.environ['MOTET_INSTANCE'], os.environ['SECRET'], flush=True); time.sleep(60)"
    async with supervised(log, spec("worker", code, env={"SECRET": "s3"})) as supervisor:
        await until(lambda: supervisor.slots[0].child)
        child = supervisor.slots[0].child
        assert child is not None
        await until(lambda: output.has(f"{child.instance} s3"))
        assert "s3" not in repr(child.spec)


# ------------------------------------------------------------------------------------------------------------- stops
async def test_stop_follows_the_stages(log: Log, output: Output) -> None:
    code = textwrap.dedent("""
        import signal, sys, time
        def stop(*_): time.sleep(0.2); print("bye", flush=True); sys.exit(0)
        signal.signal(signal.SIGTERM, stop); print("up", flush=True); time.sleep(60)
    """)
    last, first = spec("last", code, stage=2), spec("first", code, stage=1)
    async with supervised(log, last, first) as supervisor:
        await until(lambda: output.has("last │ up") and output.has("first │ up"))
        assert await supervisor.stop()
        assert [entry["state"] for entry in supervisor.describe()] == ["stopped", "stopped"]
    log.close()
    assert output.getvalue().index("first │ bye") < output.getvalue().index("last │ bye")


async def test_a_process_that_ignores_sigterm_is_killed(log: Log, output: Output) -> None:
    async with supervised(log, spec("stubborn", IGNORES_TERM, grace=0.2)) as supervisor:
        await until(lambda: output.has("up"))
        pid = supervisor.describe()[0]["pid"]
        assert not await supervisor.stop()
        assert not psutil.pid_exists(pid)


async def test_stop_during_back_off_starts_no_process(log: Log) -> None:
    async with supervised(log, spec("broken", "raise SystemExit(1)")) as supervisor:
        await until(lambda: supervisor.slots[0].state == "failing")
        async with asyncio.timeout(20):
            assert await supervisor.stop()
        assert supervisor.describe()[0]["state"] == "stopped"


async def test_a_gated_process_starts_when_its_gate_is_set(log: Log, output: Output) -> None:
    supervisor, gate = Supervisor(log, policy=QUICK), asyncio.Event()
    supervisor.add(spec("late", SLEEPS), gate=gate)
    supervisor.add(spec("never", SLEEPS), gate=asyncio.Event())
    supervisor.start([spec("early", SLEEPS)])
    try:
        await until(lambda: output.has("early │ up"))
        assert [slot["state"] for slot in supervisor.describe()] == [
            "waiting",
            "waiting",
            "running",
        ]
        gate.set()
        await until(lambda: output.has(" late │ up"))
        assert await supervisor.stop()
        assert supervisor.slots[1].child is None
    finally:
        await supervisor.kill()


async def test_a_stopped_process_can_be_killed(log: Log, output: Output) -> None:
    async with supervised(log, spec("frozen", SLEEPS, grace=0.2)) as supervisor:
        await until(lambda: output.has("up"))
        pid = supervisor.describe()[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        # Of two signals that wait together the kernel delivers SIGTERM first.
        await until(
            lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        )
        assert not await supervisor.stop()


async def test_a_second_sigterm_ends_the_drain(log: Log, output: Output) -> None:
    code = textwrap.dedent("""
        import signal, sys, time
        seen = []
        def stop(*_):
            seen.append(1); print("term", len(seen), flush=True)
            if len(seen) == 2: sys.exit(0)
        signal.signal(signal.SIGTERM, stop); print("up", flush=True)
        while True: time.sleep(0.1)
    """)
    async with supervised(log, spec("slow", code, drain=0.5, grace=20.0)) as supervisor:
        await until(lambda: output.has("up"))
        assert await supervisor.stop()
    await until(lambda: output.has("term 2"))


async def test_a_removed_process_is_not_restarted(log: Log, output: Output) -> None:
    async with supervised(log, spec("worker", SLEEPS)) as supervisor:
        (old,) = supervisor.slots
        await until(lambda: output.has("worker │ up"))
        new = supervisor.add(old.spec, before=old)
        await until(lambda: output.getvalue().count("worker │ up") == 2)
        assert supervisor.slots == [new, old]
        removed = [supervisor.remove(old), supervisor.remove(old)]  # by a restart and the loader
        assert await asyncio.gather(*removed) == [True, True]
        assert await supervisor.remove(old)
        assert supervisor.slots == [new]
        assert (new.state, new.restarts, old.restarts) == ("running", 0, 0)
        assert not output.has("ended")
        assert await supervisor.stop()


async def test_on_change_is_called_before_a_process_is_stopped(log: Log, output: Output) -> None:
    """So that a supervisor that takes over meanwhile does not take it for one that serves."""
    seen: list[str] = []
    supervisor = Supervisor(
        log, on_change=lambda: seen.extend(slot.state for slot in supervisor.slots)
    )
    supervisor.start([spec("worker", SLEEPS)])
    try:
        await until(lambda: output.has("worker │ up"))
        assert await supervisor.remove(supervisor.slots[0])
        assert seen == ["running", "leaving", "stopped"]
    finally:
        await supervisor.kill()


def test_no_process_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = textwrap.dedent(f"""
        import asyncio, json, pathlib, sys
        from motet_cli.supervision.child import ChildSpec
        from motet_cli.supervision.logs import Log
        from motet_cli.supervision.supervisor import Supervisor
        async def main():
            supervisor = Supervisor(Log(sys.stdout))
            argv = (sys.executable, "-c", {IGNORES_TERM!r})
            supervisor.start(ChildSpec(name=name, role="test", argv=argv) for name in "ab")
            while not all(slot.state == "running" and slot.child.tail for slot in supervisor.slots):
                await asyncio.sleep(0.01)
            pathlib.Path({str(pids)!r}).write_text(json.dumps([s["pid"] for s in supervisor.describe()]))
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL
    ) as parent:
        try:
            wait_for(pids.is_file)
            wait_for(lambda: pids.read_text().endswith("]"))
            children = json.loads(pids.read_text())
            assert all(psutil.pid_exists(pid) for pid in children)
        finally:
            parent.kill()
    wait_for(lambda: not any(alive(pid) for pid in children))


def alive(pid: int) -> bool:
    """Return True for a running process; an unreaped zombie counts as ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async def poll() -> None:
        await until(condition, seconds)

    run: Callable[[Awaitable[None]], None] = asyncio.run  # type: ignore[assignment]
    run(poll())


# ------------------------------------------------------------------------------------------------------------ output
async def test_lines_are_assembled_from_any_writes(log: Log, output: Output) -> None:
    code = textwrap.dedent(r"""
        import os, sys, time
        for part in (b"one", b" line\ntwo\n\nth", b"r\xc3", b"\xa9e\n\xff\n", b"x" * 200_000, b"\nlast, no newline"):
            os.write(1, part); time.sleep(0.02)
        os.write(2, b"!"); time.sleep(0.1)
    """)
    async with supervised(log, spec("w", code)) as supervisor:
        await until(lambda: supervisor.slots[0].restarts)
    log.close()
    lines = [
        line.partition("│ ")[2] for line in output.getvalue().splitlines() if "    w │" in line
    ]
    start = lines[: lines.index("last, no newline!") + 1]
    assert start[:4] == ["one line", "two", "thrée", "\N{REPLACEMENT CHARACTER}"]
    assert sum(map(len, start[4:-1])) == 200_000
