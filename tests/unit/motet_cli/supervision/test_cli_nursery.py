"""Test that processes forked from a nursery behave like executed ones, with real processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from motet_cli.supervision.backoff import BackoffPolicy
from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.nursery import NotForked, Nursery
from motet_cli.supervision.supervisor import Supervisor
from motet_shared.process.starts import now
from support.running.until import until

TIMEOUT = 30.0
QUICK = BackoffPolicy(first=0.01, cap=0.05, burst=3, pause=30.0)
# Prints what it finds.
PRINTS_STATE = """
import json, os, pathlib, signal, sys
if __name__ == "__main__":
    from motet_shared.process import starts
    with starts.importing():
        pass
    fds = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{fd}")}
    print(json.dumps({
        "argv": sys.argv[1:], "name": pathlib.Path(sys.argv[0]).name, "env": dict(os.environ), "fds": fds,
        "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0),
        "threads": len(os.listdir("/proc/self/task")),
        "handled": [int(n) for n in signal.valid_signals() if callable(signal.getsignal(n))],
        "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "stages": list(starts.START.stages), "began": starts.now() - starts.START.seconds, "stdin": sys.stdin.read(),
    }), flush=True)
"""


# Which process has imported it, which it then tells, to sleep afterwards.
SLEEPS = """
import os, time
import imported
if __name__ == "__main__":
    print(imported.BY, flush=True)
    time.sleep(600)
"""
IMPORTED = "import os; BY = os.getpid()"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the folder of the modules that a test writes, on the path of all processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return tmp_path


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
async def nursery(folder: Path, reports: list[str]) -> AsyncIterator[Nursery]:
    made = Nursery({}, reports.append, reports.append)
    yield made
    await made.close()


@pytest.fixture
def others() -> set[psutil.Process]:
    """Child processes that earlier tests have left to this process."""
    return set(psutil.Process().children())


def module(folder: Path, name: str, code: str) -> ChildSpec:
    """Write a module and return the spec that runs it."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    return ChildSpec(name=name, role="test", argv=(sys.executable, "-m", name), forks=True)


def main_of(folder: Path, name: str, code: str) -> ChildSpec:
    """Write a module that runs `code` as a program and does nothing when imported."""
    return module(
        folder,
        name,
        'import os, sys, time, signal\nif __name__ == "__main__":\n'
        + textwrap.indent(code, "    "),
    )


async def fork(nursery: Nursery, spec: ChildSpec) -> Child:
    async with asyncio.timeout(TIMEOUT):
        return await Child.start(spec, lambda line: None, nursery.fork)


async def wait_for(child: Child) -> int:
    async with asyncio.timeout(TIMEOUT):
        return await child.wait()


async def started_child(nursery: Nursery, spec: ChildSpec) -> Child:
    """Return a forked process after its first line of output."""
    child = await fork(nursery, spec)
    await until(lambda: child.tail)
    return child


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# --------------------------------------------------------------------------------------------------- as any other child
async def test_a_forked_process_finds_the_state_of_an_executed_one(
    nursery: Nursery, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = module(folder, "tells", PRINTS_STATE)
    await nursery.load("tells")
    monkeypatch.setenv("SET_LATER", "1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")  # otherwise Python itself may set another variable
    spec = replace(spec, argv=(*spec.argv, "--a", "b"), env={"SECRET": "s3"})
    states = []
    for spawn in (nursery.fork, None):
        started = now()
        child = await Child.start(spec, lambda line: None, spawn)
        assert await wait_for(child) == 0
        found = json.loads(child.tail[0])
        assert found.pop("pid") == found.pop("group") == child.pid
        assert found.pop("parent") == os.getpid()
        assert found["env"].pop("MOTET_INSTANCE") == child.instance
        assert found.pop("began") >= started - 0.02  # the kernel counts hundredths
        assert found["fds"].pop("1") == found["fds"].pop("2")
        states.append(found)
    assert states[0] == states[1]
    assert states[0]["argv"] == ["--a", "b"]
    assert (states[0]["env"]["SECRET"], states[0]["env"]["SET_LATER"]) == ("s3", "1")
    assert states[0]["fds"] == {"0": os.devnull}
    assert states[0]["stages"] == ["interpreter", "imports"]


@pytest.mark.parametrize(
    ("code", "description", "last_line"),
    [
        ("pass", "exit code 0", ""),
        ("sys.exit(3)", "exit code 3", ""),
        ("sys.exit('no weights')", "exit code 1", "no weights"),
        ("raise ValueError('no weights')", "exit code 1", "ValueError: no weights"),
        ("os._exit(78)", "exit code 78", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", ""),
        ("os.abort()", "killed by SIGABRT", ""),
    ],
)
async def test_exit_statuses_are_reported(
    code: str, description: str, last_line: str, nursery: Nursery, folder: Path
) -> None:
    child = await fork(nursery, main_of(folder, "ends", code))
    await wait_for(child)
    assert child.exit_description == description
    assert (child.tail[-1] if child.tail else "") == last_line


async def test_sigterm_and_then_sigkill_end_it(nursery: Nursery, folder: Path) -> None:
    compliant = await started_child(
        nursery, main_of(folder, "polite", "print('up', flush=True); time.sleep(600)")
    )
    assert await compliant.stop()
    assert compliant.exit_description == "killed by SIGTERM"
    ignores_term = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    stubborn = await started_child(
        nursery, replace(main_of(folder, "stubborn", ignores_term), grace=0.2)
    )
    assert not await stubborn.stop()
    assert stubborn.exit_description == "killed by SIGKILL"


async def test_output_is_complete(nursery: Nursery, folder: Path) -> None:
    code = "os.write(2, b'one\\ntwo'); time.sleep(0.1); os.write(1, b' words\\nlast')"
    child = await fork(nursery, main_of(folder, "says", code))
    await wait_for(child)
    assert list(child.tail) == ["one", "two words", "last"]


def test_no_process_outlives_a_killed_supervisor(folder: Path) -> None:
    module(folder, "imported", IMPORTED)
    module(folder, "sleeps", SLEEPS)
    code = """
        import asyncio, sys
        from motet_cli.supervision.child import Child, ChildSpec
        from motet_cli.supervision.nursery import Nursery
        async def main():
            nursery = Nursery({}, print, print)
            spec = ChildSpec(name="sleeps", role="test", argv=(sys.executable, "-m", "sleeps"))
            children = [await Child.start(spec, lambda line: None, nursery.fork) for _ in range(2)]
            print(nursery.pid, *(child.pid for child in children), flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        supervisor.kill()
    asyncio.run(until(lambda: not any(alive(pid) for pid in pids)))


# ------------------------------------------------------------------------------------------------------- what it saves
async def test_modules_are_imported_once_for_all(nursery: Nursery, folder: Path) -> None:
    module(folder, "imported", IMPORTED)
    children = await asyncio.gather(
        *(started_child(nursery, module(folder, "sleeps", SLEEPS)) for _ in range(3))
    )
    assert len({child.pid for child in children}) == 3
    assert {child.tail[0] for child in children} == {str(nursery.pid)}
    await asyncio.gather(*(child.kill() for child in children))


async def test_a_package_is_imported_with_its_main_module(nursery: Nursery, folder: Path) -> None:
    (folder / "whole").mkdir()
    (folder / "whole" / "__init__.py").touch()
    (folder / "whole" / "__main__.py").write_text(SLEEPS)
    module(folder, "imported", IMPORTED)
    child = await started_child(
        nursery, ChildSpec(name="whole", role="test", argv=(sys.executable, "-m", "whole"))
    )
    assert list(child.tail) == [str(nursery.pid)]
    await child.kill()


@pytest.mark.long
async def test_torch_uses_the_number_of_threads_of_the_child(folder: Path) -> None:
    code = """
        import os, threading, torch
        def compute():
            torch.ones(512, 512) @ torch.ones(512, 512)
            print(torch.get_num_threads(), len(os.listdir("/proc/self/task")) > 2)
        if __name__ == "__main__":
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
    """
    nursery = Nursery({"OMP_NUM_THREADS": "2"}, lambda text: None)
    try:
        for threads, more in ((1, False), (2, True), (3, True)):
            spec = replace(module(folder, "computes", code), env={"OMP_NUM_THREADS": str(threads)})
            async with asyncio.timeout(4 * TIMEOUT):
                child = await Child.start(spec, lambda line: None, nursery.fork)
                assert await child.wait() == 0
            assert list(child.tail) == [f"{threads} {more}"]
    finally:
        await nursery.close()


async def test_no_descriptor_or_zombie_is_left(nursery: Nursery, folder: Path) -> None:
    spec = main_of(folder, "ends", "pass")

    async def resources() -> tuple[int, ...]:
        """Return open files here and in the nursery, and the number of child processes."""
        assert await wait_for(await fork(nursery, spec)) == 0
        here, there = psutil.Process(), psutil.Process(nursery.pid)
        return here.num_fds(), there.num_fds(), len(here.children(recursive=True))

    before = await resources()
    for _ in range(10):
        after = await resources()
    assert after == before


# ------------------------------------------------------------------------------------------------- forked in advance
PREPARED = """
import os, sys, time
import records
def prepare():
    records.BY.append(os.getpid())
if __name__ == "__main__":
    print(os.getpid(), records.BY, sys.argv[1:], os.environ["SET"], flush=True)
    time.sleep(600)
"""


def waiting(folder: Path) -> ChildSpec:
    module(folder, "records", "BY = []")
    return replace(module(folder, "waits", PREPARED), env={"SET": "1"})


async def test_a_process_that_was_forked_in_advance_runs_the_next_request(
    nursery: Nursery, folder: Path, others: set[psutil.Process]
) -> None:
    spec = waiting(folder)
    await nursery.prepare("waits")
    await nursery.prepare("waits")  # there is one
    assert len(set(psutil.Process().children()) - others) == 2
    children = []
    for number in range(2):
        given = replace(spec, argv=(*spec.argv, str(number)), env={"SET": f"s{number}"})
        children.append(await started_child(nursery, given))
    first, second = children
    assert list(first.tail) == [f"{first.pid} [{first.pid}] ['0'] s0"]
    assert list(second.tail) == [f"{second.pid} [] ['1'] s1"]
    for child in children:
        await child.kill()
        assert child.exit_description == "killed by SIGKILL"


async def test_a_spare_that_takes_its_request_at_once_runs_it(
    nursery: Nursery, folder: Path, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes its socket before the supervisor goes on."""
    spec = waiting(folder)
    await nursery.prepare("waits")
    send_fds = socket.send_fds
    closed: list[list[tuple[int, int]]] = []

    def send(peer: socket.socket, *rest: Any) -> int:
        sent = send_fds(peer, *rest)
        if not closed:
            poll = select.poll()
            poll.register(peer, select.POLLHUP)
            closed.append(poll.poll(1000 * TIMEOUT))
        return sent

    monkeypatch.setattr(socket, "send_fds", send)
    child = await started_child(nursery, spec)
    assert list(child.tail) == [f"{child.pid} [{child.pid}] [] 1"]
    assert len(closed) == 1
    assert closed[0]
    assert reports == []
    await child.kill()


async def test_a_spare_that_has_ended_is_replaced_by_a_new_process(
    nursery: Nursery, folder: Path, others: set[psutil.Process], reports: list[str]
) -> None:
    spec = waiting(folder)
    await nursery.prepare("waits")
    (spare,) = set(psutil.Process().children()) - others - {psutil.Process(nursery.pid)}
    spare.kill()
    await until(lambda: not psutil.pid_exists(spare.pid))  # no zombie is left
    assert "forked in advance for waits has ended (killed by SIGKILL)" in reports[-1]
    child = await started_child(nursery, spec)
    assert list(child.tail) == [f"{child.pid} [] [] 1"]
    await child.kill()


async def test_a_spare_that_ends_unnoticed_is_replaced_too(
    nursery: Nursery, folder: Path, others: set[psutil.Process], reports: list[str]
) -> None:
    """Its end is seen only when the request is sent: nothing is awaited in between."""
    spec = waiting(folder)
    await nursery.prepare("waits")
    await nursery.load("waits")
    (spare,) = set(psutil.Process().children()) - others - {psutil.Process(nursery.pid)}
    os.kill(spare.pid, signal.SIGKILL)
    while spare.status() != psutil.STATUS_ZOMBIE:
        pass
    child = await started_child(nursery, spec)
    assert list(child.tail) == [f"{child.pid} [] [] 1"]
    assert len(reports) == 1
    await child.kill()


async def test_spares_end_with_their_nursery_and_when_a_file_has_changed(
    nursery: Nursery, folder: Path, others: set[psutil.Process]
) -> None:
    spec = waiting(folder)
    await nursery.prepare("waits")
    (old,) = set(psutil.Process().children()) - others - {psutil.Process(nursery.pid)}
    module(folder, "waits", PREPARED.replace("print(", "print('newer', "))
    child = await started_child(nursery, spec)
    assert list(child.tail) == [f"newer {child.pid} [] [] 1"]
    assert not psutil.pid_exists(old.pid)
    await child.kill()
    await nursery.prepare("waits")
    await nursery.close()
    assert not set(psutil.Process().children()) - others


# ------------------------------------------------------------------------------------------------------ what may fail
async def test_children_outlive_a_killed_nursery_which_is_replaced(
    nursery: Nursery, folder: Path, reports: list[str]
) -> None:
    module(folder, "imported", IMPORTED)
    spec = module(folder, "sleeps", SLEEPS)
    first, pid = await started_child(nursery, spec), nursery.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: nursery.pid is None)
    second = await started_child(nursery, spec)
    assert second.tail[0] == str(nursery.pid) != str(pid)
    assert "killed by SIGKILL" in reports[-1]
    assert first.status is None
    await first.kill()
    assert first.exit_description == "killed by SIGKILL"
    await second.kill()


async def test_an_import_that_ends_the_nursery_is_reported(nursery: Nursery, folder: Path) -> None:
    with pytest.raises(NotForked) as caught:
        await fork(nursery, module(folder, "exits", "import os; os._exit(9)"))
    assert caught.value.process_ended
    assert await wait_for(await fork(nursery, main_of(folder, "ends", "pass"))) == 0


async def test_fork_is_refused_while_threads_run(nursery: Nursery, folder: Path) -> None:
    code = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    with pytest.raises(NotForked, match=r"starts_threads.* 2 threads") as caught:
        await fork(nursery, module(folder, "starts_threads", code))
    assert not caught.value.process_ended


async def test_a_process_that_cannot_be_forked_is_executed(nursery: Nursery, folder: Path) -> None:
    code = """
        import threading, time
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        if __name__ == "__main__":
            print("it runs", flush=True)
    """
    specs = [module(folder, "threads", code), module(folder, "broken", "import nowhere_at_all")]
    output = io.StringIO()
    log = Log(output)
    supervisor = Supervisor(log, policy=QUICK, nursery=nursery)
    supervisor.start(specs)
    try:
        for words in (
            "threads starts without the nursery: after the import of threads, 2 threads are running",
            "threads │ it runs",
            "broken starts without the nursery: broken cannot be imported: ModuleNotFoundError",
            "broken │ ModuleNotFoundError: No module named 'nowhere_at_all'",
        ):
            await until(lambda words=words: words in output.getvalue())  # type: ignore[misc]
    finally:
        await supervisor.kill()
        log.close()


async def test_what_clients_wait_for_is_executed_once_and_then_forked_at_once_and_always(
    nursery: Nursery, folder: Path
) -> None:
    """Five deaths within seconds are no crash loop."""
    module(folder, "imported", IMPORTED)
    spec = replace(module(folder, "sleeps", SLEEPS), forks=False, returns=True)
    log = Log(io.StringIO())
    supervisor = Supervisor(log, policy=QUICK, nursery=nursery)
    slot = supervisor.add(spec)
    importers: dict[int, int] = {}  # of each process, by its id

    def started() -> bool:
        child = slot.child
        return child is not None and child.pid not in importers and bool(child.tail)

    try:
        for _ in range(6):
            await until(started)
            assert slot.child is not None
            importers[slot.child.pid] = int(slot.child.tail[0])
            os.kill(slot.child.pid, signal.SIGKILL)
    finally:
        await supervisor.kill()
        log.close()
    (first, importer), *others = importers.items()
    assert first == importer
    assert {importer for _, importer in others} == {nursery.pid}


async def test_a_changed_file_is_imported_again(
    nursery: Nursery, folder: Path, reports: list[str]
) -> None:
    module(folder, "settled", "VALUE = 'old'")
    spec = module(
        folder, "reads", "import settled\nif __name__ == '__main__': print(settled.VALUE)"
    )
    for value in ("old", "newer"):
        module(folder, "settled", f"VALUE = {value!r}")
        child, pid = await fork(nursery, spec), nursery.pid
        await wait_for(child)
        assert list(child.tail) == [value]
    (report,) = reports
    assert str(folder / "settled.py") in report
    await wait_for(await fork(nursery, spec))
    assert nursery.pid == pid


async def test_a_cancelled_request_receives_no_other_reply(nursery: Nursery, folder: Path) -> None:
    slow = module(
        folder,
        "slow",
        "import pathlib, time; pathlib.Path(__file__).with_name('begun').touch(); time.sleep(600)",
    )
    task = asyncio.create_task(fork(nursery, slow))
    await until((folder / "begun").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert nursery.pid is None
    assert await wait_for(await fork(nursery, main_of(folder, "ends", "sys.exit(3)"))) == 3
