"""What is forked from a nursery is to its supervisor like any child; real processes, of small modules."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from motet_cli.supervision.backoff import BackoffPolicy
from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.nursery import NotForked, Nursery
from motet_cli.supervision.supervisor import Supervisor
from motet_shared.process.starts import now

PATIENCE = 30.0
QUICK = BackoffPolicy(first=0.01, cap=0.05, burst=3, pause=30.0)
# Prints what it finds.
TELLS = """
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
    """Holds the modules that a test writes, and all processes find."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return tmp_path


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
async def nursery(folder: Path, told: list[str]) -> AsyncIterator[Nursery]:
    made = Nursery({}, told.append, told.append)
    yield made
    await made.close()


def module(folder: Path, name: str, code: str) -> ChildSpec:
    """What runs it."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    return ChildSpec(name=name, role="test", argv=(sys.executable, "-m", name), forks=True)


def main_of(folder: Path, name: str, code: str) -> ChildSpec:
    """What runs a module that does so when it is run, and nothing when it is imported."""
    return module(
        folder,
        name,
        'import os, sys, time, signal\nif __name__ == "__main__":\n'
        + textwrap.indent(code, "    "),
    )


async def forked(nursery: Nursery, spec: ChildSpec) -> Child:
    async with asyncio.timeout(PATIENCE):
        return await Child.start(spec, lambda line: None, nursery.fork)


async def ended(child: Child) -> int:
    async with asyncio.timeout(PATIENCE):
        return await child.wait()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for is outside of this process
            await asyncio.sleep(0.01)


async def speaking(nursery: Nursery, spec: ChildSpec) -> Child:
    """One that has said something."""
    child = await forked(nursery, spec)
    await until(lambda: child.tail)
    return child


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# --------------------------------------------------------------------------------------------------- as any other child
async def test_it_finds_what_a_program_of_its_own_finds(
    nursery: Nursery, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = module(folder, "tells", TELLS)
    await nursery.load("tells")
    monkeypatch.setenv("SET_LATER", "1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")  # otherwise Python itself may set another variable
    spec = replace(spec, argv=(*spec.argv, "--a", "b"), env={"SECRET": "s3"})
    seen = []
    for spawn in (nursery.fork, None):
        asked = now()
        child = await Child.start(spec, lambda line: None, spawn)
        assert await ended(child) == 0
        found = json.loads(child.tail[0])
        assert found.pop("pid") == found.pop("group") == child.pid
        assert found.pop("parent") == os.getpid()
        assert found["env"].pop("MOTET_INSTANCE") == child.instance
        assert found.pop("began") >= asked - 0.02  # the kernel counts hundredths
        assert found["fds"].pop("1") == found["fds"].pop("2")
        seen.append(found)
    assert seen[0] == seen[1]
    assert seen[0]["argv"] == ["--a", "b"]
    assert (seen[0]["env"]["SECRET"], seen[0]["env"]["SET_LATER"]) == ("s3", "1")
    assert seen[0]["fds"] == {"0": os.devnull}
    assert seen[0]["stages"] == ["interpreter", "imports"]


@pytest.mark.parametrize(
    ("code", "words", "said"),
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
async def test_its_supervisor_knows_how_it_ended(
    code: str, words: str, said: str, nursery: Nursery, folder: Path
) -> None:
    child = await forked(nursery, main_of(folder, "ends", code))
    await ended(child)
    assert child.exit_words == words
    assert (child.tail[-1] if child.tail else "") == said


async def test_it_is_stopped_politely_and_then_by_force(nursery: Nursery, folder: Path) -> None:
    polite = await speaking(
        nursery, main_of(folder, "polite", "print('up', flush=True); time.sleep(600)")
    )
    assert await polite.stop()
    assert polite.exit_words == "killed by SIGTERM"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    stubborn = await speaking(nursery, replace(main_of(folder, "stubborn", deaf), grace=0.2))
    assert not await stubborn.stop()
    assert stubborn.exit_words == "killed by SIGKILL"


async def test_what_it_says_is_heard_to_the_last_word(nursery: Nursery, folder: Path) -> None:
    code = "os.write(2, b'one\\ntwo'); time.sleep(0.1); os.write(1, b' words\\nlast')"
    child = await forked(nursery, main_of(folder, "says", code))
    await ended(child)
    assert list(child.tail) == ["one", "two words", "last"]


def test_none_outlives_a_supervisor_that_is_killed(folder: Path) -> None:
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
async def test_all_share_what_was_imported_once(nursery: Nursery, folder: Path) -> None:
    module(folder, "imported", IMPORTED)
    children = await asyncio.gather(
        *(speaking(nursery, module(folder, "sleeps", SLEEPS)) for _ in range(3))
    )
    assert len({child.pid for child in children}) == 3
    assert {child.tail[0] for child in children} == {str(nursery.pid)}
    await asyncio.gather(*(child.kill() for child in children))


async def test_a_package_is_imported_with_what_runs_it(nursery: Nursery, folder: Path) -> None:
    (folder / "whole").mkdir()
    (folder / "whole" / "__init__.py").touch()
    (folder / "whole" / "__main__.py").write_text(SLEEPS)
    module(folder, "imported", IMPORTED)
    child = await speaking(
        nursery, ChildSpec(name="whole", role="test", argv=(sys.executable, "-m", "whole"))
    )
    assert list(child.tail) == [str(nursery.pid)]
    await child.kill()


@pytest.mark.long
async def test_torch_computes_with_as_many_threads_as_the_child_is_given(folder: Path) -> None:
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
            async with asyncio.timeout(4 * PATIENCE):
                child = await Child.start(spec, lambda line: None, nursery.fork)
                assert await child.wait() == 0
            assert list(child.tail) == [f"{threads} {more}"]
    finally:
        await nursery.close()


async def test_nothing_is_left_open_and_no_one_unburied(nursery: Nursery, folder: Path) -> None:
    spec = main_of(folder, "ends", "pass")

    async def held() -> tuple[int, ...]:
        """Files that are open here and in the nursery, processes that are children of either."""
        assert await ended(await forked(nursery, spec)) == 0
        here, there = psutil.Process(), psutil.Process(nursery.pid)
        return here.num_fds(), there.num_fds(), len(here.children(recursive=True))

    before = await held()
    for _ in range(10):
        after = await held()
    assert after == before


# ------------------------------------------------------------------------------------------------------ what may fail
async def test_who_was_forked_from_one_that_is_killed_lives_on_and_another_follows(
    nursery: Nursery, folder: Path, told: list[str]
) -> None:
    module(folder, "imported", IMPORTED)
    spec = module(folder, "sleeps", SLEEPS)
    first, pid = await speaking(nursery, spec), nursery.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: nursery.pid is None)
    second = await speaking(nursery, spec)
    assert second.tail[0] == str(nursery.pid) != str(pid)
    assert (
        told[-1] == "the process to fork from has ended (killed by SIGKILL): all is imported anew"
    )
    assert first.status is None
    await first.kill()
    assert first.exit_words == "killed by SIGKILL"
    await second.kill()


async def test_an_import_that_kills_it_is_told(nursery: Nursery, folder: Path) -> None:
    with pytest.raises(NotForked, match="it has ended"):
        await forked(nursery, module(folder, "deadly", "import os; os._exit(9)"))
    assert await ended(await forked(nursery, main_of(folder, "ends", "pass"))) == 0


async def test_it_does_not_fork_where_a_thread_runs(nursery: Nursery, folder: Path) -> None:
    code = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    with pytest.raises(NotForked, match="after the import of threads_of_its_own 2 threads run"):
        await forked(nursery, module(folder, "threads_of_its_own", code))


async def test_who_cannot_be_forked_is_started_as_a_program(nursery: Nursery, folder: Path) -> None:
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
            "threads imports what it needs by itself: after the import of threads 2 threads run",
            "threads │ it runs",
            "broken imports what it needs by itself: broken cannot be imported: ModuleNotFoundError",
            "broken │ ModuleNotFoundError: No module named 'nowhere_at_all'",
        ):
            await until(lambda words=words: words in output.getvalue())  # type: ignore[misc]
    finally:
        await supervisor.kill()
        log.close()


async def test_a_file_that_has_changed_is_imported_anew(
    nursery: Nursery, folder: Path, told: list[str]
) -> None:
    module(folder, "settled", "VALUE = 'old'")
    spec = module(
        folder, "reads", "import settled\nif __name__ == '__main__': print(settled.VALUE)"
    )
    for value in ("old", "newer"):
        module(folder, "settled", f"VALUE = {value!r}")
        child, pid = await forked(nursery, spec), nursery.pid
        await ended(child)
        assert list(child.tail) == [value]
    assert told == [f"{folder / 'settled.py'} has changed: all is imported anew"]
    await ended(await forked(nursery, spec))
    assert nursery.pid == pid


async def test_who_no_longer_waits_gets_nobody_elses_answer(nursery: Nursery, folder: Path) -> None:
    slow = module(
        folder,
        "slow",
        "import pathlib, time; pathlib.Path(__file__).with_name('begun').touch(); time.sleep(600)",
    )
    task = asyncio.create_task(forked(nursery, slow))
    await until((folder / "begun").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert nursery.pid is None
    assert await ended(await forked(nursery, main_of(folder, "ends", "sys.exit(3)"))) == 3
