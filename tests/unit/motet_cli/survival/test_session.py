"""Test the death of a supervisor and the adoption of its processes by another one, with real processes."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from motet_cli.supervision import nats
from motet_cli.supervision.backoff import BackoffPolicy
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.supervisor import Supervisor
from motet_cli.survival import watchdog
from motet_cli.survival.identity import Identity, identify, marked
from motet_cli.survival.leftovers import end_stack
from motet_cli.survival.output import spawn
from motet_cli.survival.record import MARK, Base, ProcessRecord, StackFolder
from motet_cli.survival.session import Survival, surviving
from motet_shared.errors import ConfigError, Unavailable

PORT = 1
BASE = Base(host="127.0.0.1", port=PORT, nats=None, store=None)
QUICK = BackoffPolicy(first=0.01, cap=0.05, burst=3, pause=30.0)
# A supervisor as `motet up --survive` is one, but of the processes of its command line.
SUPERVISOR = """
import asyncio, sys
from types import SimpleNamespace
import msgspec
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.supervisor import Supervisor
from motet_cli.survival.output import spawn
from motet_cli.survival.record import Base
from motet_cli.survival.session import surviving

port, orphan_seconds, specs = msgspec.json.decode(sys.argv[1], type=tuple[int, float, list[ChildSpec]])

async def run(survival):
    log = Log(sys.stdout)
    stack = SimpleNamespace(
        memory=SimpleNamespace(free=1), placement=None, nats_url="nats://127.0.0.1:4222", credentials=None
    )
    survival.begin(stack, Base(host="127.0.0.1", port=port, nats=None, store=None), log)
    supervisor = Supervisor(
        log, spawn=spawn, on_change=lambda: survival.record(supervisor.slots, stopping=False)
    )
    supervisor.start(specs)
    await asyncio.Event().wait()

with surviving(port, orphan_seconds) as survival:
    asyncio.run(run(survival))
"""
BEGINS = """
import os, signal, sys, time
def note(text):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(text + "\\n")
signal.signal(signal.SIGUSR1, lambda number, frame: print(sys.argv[1], flush=True))
"""
SLEEPS = """
note("begun")
while True:
    time.sleep(600)
"""
ANSWERS = BEGINS + SLEEPS
LEAVES_A_NOTE = (
    BEGINS
    + """
def end(number, frame):
    note(sys.argv[1])
    sys.exit()
signal.signal(signal.SIGTERM, end)
"""
    + SLEEPS
)
STUBBORN = BEGINS + "signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SLEEPS


class Output(io.StringIO):
    def has(self, text: str) -> bool:
        return text in self.getvalue()


@pytest.fixture(autouse=True)
def run_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("r")
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv(MARK, raising=False)


@pytest.fixture
def output() -> Output:
    return Output()


@pytest.fixture
def log(output: Output) -> Iterator[Log]:
    log = Log(output)
    yield log
    log.close()


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the file in which processes note that they are ready, and some that they end."""
    path = tmp_path / "notes"
    path.write_text("")
    monkeypatch.setenv("NOTES", str(path))
    return path


@pytest.fixture
def killed(notes: Path) -> Iterator[Callable[..., StackFolder]]:
    """Provide a function that starts a supervisor of some processes and kills it; end all afterwards."""
    folder = StackFolder(PORT)

    def die(*specs: ChildSpec, orphan_seconds: float = 600.0) -> StackFolder:
        given = msgspec.json.encode((PORT, orphan_seconds, specs)).decode()
        fds = [fd for one in specs for fd in one.fds]
        supervisor = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, given], stdout=subprocess.DEVNULL, pass_fds=fds
        )
        until(lambda: len(processes(folder)) == len(specs), "all have begun")
        until(lambda: notes.read_text().count("begun") == len(specs) - len(fds), "all are ready")
        if fds:
            until(folder.listener.exists, "the watchdog watches")
        supervisor.kill()
        supervisor.wait()
        notes.write_text("")
        return folder

    yield die
    for one in marked(MARK, str(folder.path)):
        os.kill(one.pid, signal.SIGKILL)


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    async def wait() -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - the processes are other ones
                await asyncio.sleep(0.01)

    try:
        asyncio.run(wait())
    except TimeoutError:
        raise TimeoutError(what) from None


async def soon(condition: Callable[[], object], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the processes are other ones
            await asyncio.sleep(0.01)


def processes(folder: StackFolder) -> tuple[ProcessRecord, ...]:
    record = folder.read()
    return () if record is None else record.processes


def spec(name: str, code: str = ANSWERS, *argv: str, **changes: object) -> ChildSpec:
    command = (sys.executable, "-c", code, *(argv or (name,)))
    return ChildSpec(name=name, role=name, argv=command, **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- adoption
def test_processes_go_on_under_another_supervisor(
    killed: Callable[..., StackFolder], log: Log, output: Output
) -> None:
    specs = [spec("decode"), spec("vad")]
    folder = killed(*specs)
    before = {one.spec.name: one.identity.pid for one in processes(folder)}
    assert (folder.path / "record.json").stat().st_mode & 0o777 == 0o600

    async def adopt(survival: Survival) -> None:
        supervisor = Supervisor(log, policy=QUICK, spawn=spawn)
        adopted = await survival.adopt(supervisor, specs, log)
        assert (len(adopted.kept), adopted.start, adopted.changed) == (2, [], [])
        assert {slot.spec.name: slot.describe()["pid"] for slot in adopted.kept} == before
        os.kill(before["vad"], signal.SIGUSR1)
        await soon(lambda: output.has("vad │ vad"))
        os.kill(before["decode"], signal.SIGKILL)
        await soon(lambda: supervisor.slots[0].restarts and supervisor.slots[0].state == "running")
        assert supervisor.slots[0].describe()["pid"] != before["decode"]
        assert "an earlier supervisor" in supervisor.slots[0].last_exit
        assert await supervisor.stop()

    with surviving(PORT, 60) as survival:
        asyncio.run(adopt(survival))
    assert marked(MARK, str(folder.path)) == []


def test_changed_ones_serve_until_they_are_replaced(
    killed: Callable[..., StackFolder], log: Log
) -> None:
    killed(spec("decode"), spec("vad"), spec("asr"))
    wanted = [spec("decode", ANSWERS, "other"), spec("vad"), spec("tts")]

    async def adopt(survival: Survival) -> None:
        supervisor = Supervisor(log, policy=QUICK, spawn=spawn)
        adopted = await survival.adopt(supervisor, wanted, log)
        assert [slot.spec.name for slot in adopted.kept] == ["vad"]
        assert [(slot.spec.argv[-1], new) for slot, new in adopted.changed] == [
            ("decode", wanted[0])
        ]
        assert [slot.spec.name for slot in adopted.ended] == ["asr"]
        assert adopted.start == [wanted[2]]
        assert {slot.state for slot in supervisor.slots} == {"running"}
        await supervisor.kill()

    with surviving(PORT, 60) as survival:
        asyncio.run(adopt(survival))


def test_one_that_died_meanwhile_is_started(killed: Callable[..., StackFolder], log: Log) -> None:
    folder = killed(spec("decode"), spec("vad"))
    dead = next(one for one in processes(folder) if one.spec.name == "vad")
    os.kill(dead.identity.pid, signal.SIGKILL)
    until(lambda: identify(dead.identity.pid) != dead.identity, "it is dead")

    async def adopt(survival: Survival) -> None:
        supervisor = Supervisor(log, spawn=spawn)
        adopted = await survival.adopt(supervisor, [spec("decode"), spec("vad")], log)
        assert adopted.start == [spec("vad")]
        await supervisor.kill()

    with surviving(PORT, 60) as survival:
        asyncio.run(adopt(survival))


def test_another_process_with_the_pid_is_left_alone(
    killed: Callable[..., StackFolder], log: Log
) -> None:
    folder = killed(spec("decode"))
    record = folder.read()
    assert record is not None
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        found = record.processes[0]
        reused = replace(found.identity, pid=stranger.pid)
        folder.write(replace(record, processes=(replace(found, identity=reused),)))
        with surviving(PORT, 60) as survival:
            asyncio.run(survival.end_left(log))
        assert stranger.poll() is None
        # The process that the record had before is of the stack, so it did not stay.
        until(lambda: identify(found.identity.pid) is None, "the stray has ended")
    finally:
        stranger.kill()
        stranger.wait()


def test_processes_that_no_record_has_are_killed(
    killed: Callable[..., StackFolder], log: Log
) -> None:
    """The supervisor was killed between the start of a process and its record."""
    folder = killed(spec("decode"), spec("vad"))
    record = folder.read()
    assert record is not None
    kept, stray = record.processes
    folder.write(replace(record, processes=(kept,)))

    async def adopt(survival: Survival) -> None:
        supervisor = Supervisor(log, spawn=spawn)
        adopted = await survival.adopt(supervisor, [kept.spec], log)
        assert len(adopted.kept) == 1
        await soon(lambda: identify(stray.identity.pid) is None)
        assert identify(kept.identity.pid) == kept.identity
        await supervisor.kill()

    with surviving(PORT, 60) as survival:
        asyncio.run(adopt(survival))


def test_a_record_of_another_boot_or_format_does_not_count(
    killed: Callable[..., StackFolder],
) -> None:
    folder = killed(spec("decode"))
    record = folder.read()
    assert record is not None
    for changed in (replace(record, place="another boot"), replace(record, format=0)):
        folder.write(changed)
        assert folder.read() is None
    (folder.path / "record.json").write_text("{")
    assert folder.read() is None


def test_models_that_were_being_unloaded_are_not_loaded_again() -> None:
    def left(name: str, *, leaving: bool) -> ProcessRecord:
        return ProcessRecord(
            identity=Identity(1, 1),
            instance=f"{name}-1",
            spec=spec(name),
            fingerprint="",
            leaving=leaving,
        )

    with surviving(PORT, 60) as survival:
        processes = left("a", leaving=False), left("b", leaving=True), left("a", leaving=True)
        survival.left = SimpleNamespace(processes=processes)  # type: ignore[assignment]
        models = [[spec("a"), spec("encoder")], [spec("b")], [spec("c")]]
        assert survival.loaded(models) == models[0]


def test_there_is_one_supervisor_at_a_time() -> None:
    said = "another process controls the stack on port 1"
    with surviving(PORT, 60), pytest.raises(Unavailable, match=said), surviving(PORT, 60):
        pass
    with surviving(PORT, 60):
        pass


def test_a_port_is_needed_and_a_time_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="--survive: needs a port"), surviving(0, 60):
        pass
    with pytest.raises(ConfigError, match="--orphan-timeout: -1 is negative"), surviving(PORT, -1):
        pass


# --------------------------------------------------------------------------------------------- the watchdog
@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        yield listener


def test_orphans_end_in_order(
    killed: Callable[..., StackFolder], notes: Path, listener: socket.socket
) -> None:
    stages = {"nats": nats.STAGE, "gateway": 0, "decode": 1}
    services = [spec(name, LEAVES_A_NOTE, stage=stage) for name, stage in stages.items()]
    folder = killed(watchdog.spec(PORT, listener.fileno()), *services, orphan_seconds=0.5)
    until(lambda: not marked(MARK, str(folder.path)), "all have ended")
    assert notes.read_text().split() == ["gateway", "decode", "nats"]
    assert folder.read() is None


def test_the_watchdog_gives_away_the_listening_socket(listener: socket.socket, log: Log) -> None:
    folder = StackFolder(PORT)
    with surviving(PORT, 60) as survival:
        asyncio.run(_give(survival, listener, log))
    assert watchdog.fetch_listener(folder) is None


async def _give(survival: Survival, listener: socket.socket, log: Log) -> None:
    stack = SimpleNamespace(
        memory=SimpleNamespace(free=1), placement=None, nats_url="nats://", credentials=None
    )
    survival.begin(stack, BASE, log)  # type: ignore[arg-type]
    supervisor = Supervisor(log, spawn=spawn)
    supervisor.start([watchdog.spec(PORT, listener.fileno())])
    await soon(survival.folder.listener.exists)
    survival.left = survival.folder.read()
    for wrong in (replace(BASE, store="/other"), replace(BASE, nats="nats://other")):
        assert survival.fetch_listener(wrong) is None
    received = await asyncio.to_thread(survival.fetch_listener, BASE)
    assert received is not None
    with received:
        assert received.getsockname() == listener.getsockname()
        with socket.create_connection(received.getsockname()):
            received.accept()[0].close()
    assert await supervisor.stop()


def test_everything_ends_at_once_if_the_supervisor_was_ending_it(
    killed: Callable[..., StackFolder], notes: Path, log: Log
) -> None:
    folder = killed(spec("decode", LEAVES_A_NOTE))
    record = folder.read()
    assert record is not None
    folder.write(replace(record, stopping=True))
    asyncio.run(asyncio.wait_for(watchdog.watch(folder, log), 30))
    assert notes.read_text() == "decode\n"
    assert folder.read() is None


def test_one_that_does_not_end_is_killed(killed: Callable[..., StackFolder], log: Log) -> None:
    folder = killed(spec("decode", STUBBORN, grace=0.2))
    record = folder.read()
    assert record is not None
    assert not asyncio.run(end_stack(folder, record, log))
    assert marked(MARK, str(folder.path)) == []
