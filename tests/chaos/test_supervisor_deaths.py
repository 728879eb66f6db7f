"""Kill -9 of `motet up --survive`: streams go on, and the next one has the same processes.

Without `--survive` nothing is left: `test_orphans.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.streams import Outcome, Streams, request
from e2e import markov
from e2e.stack import START_SECONDS, MotetStack, fetch, running, until
from motet_cli.supervision import address

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("supervisor_deaths"),
]

MODEL = "markov"
NOT_NEEDED = ("--asr", "none", "--tts", "none", "--vad", "0", "--no-store")


@pytest.fixture(scope="module")
def run_folder() -> Iterator[Path]:
    """Provide a folder whose path is short enough for sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="motet-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return markov.save(tmp_path_factory.mktemp("model") / MODEL)


def surviving(folder: Path, run_folder: Path, model: Path, *args: str) -> MotetStack:
    port = address.free_port("127.0.0.1")
    return MotetStack(
        folder,
        *("--llm", str(model), *NOT_NEEDED, "--survive", "--port", str(port), *args),
        env={"XDG_RUNTIME_DIR": str(run_folder)},
    )


@pytest.fixture(scope="module")
def survivor(
    tmp_path_factory: pytest.TempPathFactory, run_folder: Path, model: Path
) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("survivor")
    # A start of `motet up` may take minutes on a busy machine.
    patient = ("--orphan-timeout", "900")
    with surviving(folder, run_folder, model, "--decode", "2", *patient) as stack:
        stack.wait_until_all_ready()
        yield stack


def pids(stack: MotetStack) -> dict[str, int]:
    return {child["name"]: child["pid"] for child in stack.children()}


def supervisor_of(stack: MotetStack) -> int:
    return int(stack.state()["pid"])


def kill_supervisor(stack: MotetStack) -> None:
    stack.process.kill()
    stack.process.wait()


def adopt(stack: MotetStack) -> None:
    """Start another supervisor, and wait until it has taken over."""
    stack.start()
    until(
        lambda: supervisor_of(stack) == stack.process.pid, "another has taken over", START_SECONDS
    )
    until(stack.ready, "it serves")


def command(stack: MotetStack, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "motet_cli", *args],
        env=stack.env,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )


def undisturbed(stack: MotetStack, bodies: list[dict[str, object]]) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with Streams(stack.url, bodies) as streams:
            return await streams.finish()

    return asyncio.run(run())


def test_streams_and_services_go_on(survivor: MotetStack) -> None:
    bodies = [request(number, MODEL, 300) for number in range(8)]
    expected = undisturbed(survivor, bodies)
    assert all(outcome.finish for outcome in expected)
    before = pids(survivor)

    async def run() -> tuple[list[Outcome], list[Outcome]]:
        async with Streams(survivor.url, bodies) as streams:
            await streams.reached(20)
            kill_supervisor(survivor)
            async with Streams(survivor.url, bodies) as late:
                outcomes = await streams.finish(), await late.finish()
        return outcomes

    first, late = asyncio.run(run())
    assert [a.same_as(b) for a, b in zip(first, expected, strict=True)] == [True] * len(bodies)
    assert [a.same_as(b) for a, b in zip(late, expected, strict=True)] == [True] * len(bodies)
    adopt(survivor)
    assert pids(survivor) == before
    until(lambda: f"took over {len(before)} processes" in survivor.log(), "it says so")


def test_what_was_adopted_is_restarted_stopped_and_scaled(survivor: MotetStack) -> None:
    kill_supervisor(survivor)
    adopt(survivor)
    before = pids(survivor)
    for name in ("decode-1", "gateway", "nats", "watchdog"):
        survivor.kill(name)()
    survivor.wait_until_all_ready()
    changed = {name for name, pid in pids(survivor).items() if before[name] != pid}
    assert changed == {"decode-1", "gateway", "nats", "watchdog"}, survivor.log()[-8000:]
    done = command(survivor, "scale", "tokenizer=2", "--url", survivor.url)
    assert done.returncode == 0, done.stderr
    scaled = pids(survivor)
    kill_supervisor(survivor)
    adopt(survivor)
    assert pids(survivor) == scaled
    assert "tokenizer-2" in scaled
    done = command(survivor, "scale", "tokenizer=1", "--url", survivor.url)
    assert done.returncode == 0, done.stderr
    assert not running(scaled["tokenizer-2"])


def test_a_reload_takes_a_new_program_and_new_settings(survivor: MotetStack) -> None:
    """The supervisor keeps its pid; only the tokenizer is replaced, and no stream notices."""
    bodies = [request(number, MODEL, 300) for number in range(8)]
    expected = undisturbed(survivor, bodies)
    before = pids(survivor)
    kill_supervisor(survivor)
    survivor._command += ["--generation-config", "none"]

    async def run() -> list[Outcome]:
        async with Streams(survivor.url, bodies) as streams:
            await streams.reached(10)
            survivor.start()
            return await streams.finish()

    outcomes = asyncio.run(run())
    assert [a.same_as(b) for a, b in zip(outcomes, expected, strict=True)] == [True] * len(bodies)
    until(
        lambda: (
            pids(survivor).get("tokenizer", before["tokenizer"]) != before["tokenizer"]
            and len(pids(survivor)) == len(before)
        ),
        "the tokenizer is replaced",
        START_SECONDS,
    )
    changed = {name for name, pid in pids(survivor).items() if pid != before[name]}
    assert changed == {"tokenizer"}
    assert fetch(f"{survivor.url}/health/ready").status_code == 200

    after = pids(survivor)
    survivor.process.send_signal(signal.SIGUSR1)
    until(lambda: "reloading: services go on" in survivor.log(), "it begins anew")
    taken = f"took over {len(after)} processes"
    until(lambda: taken in survivor.log(), "it has taken over", START_SECONDS)
    assert survivor.process.poll() is None
    until(survivor.ready, "it serves")
    assert pids(survivor) == after
    survivor.kill("decode-2")()


# ------------------------------------------------------------------------------------------- everything ends
@pytest.fixture
def begun(tmp_path: Path, run_folder: Path, model: Path) -> Iterator[MotetStack]:
    """Provide a stack whose processes have begun, whether or not they are ready."""
    stack = surviving(tmp_path, run_folder, model, "--no-nursery", "--orphan-timeout", "3")
    stack.start()
    try:
        until(lambda: have_begun(stack), "all have begun", START_SECONDS)
        yield stack
    finally:
        stack._clean_up()


def have_begun(stack: MotetStack) -> bool:
    return len(stack.children()) == 5 and all(pids(stack).values())


def test_down_ends_everything(begun: MotetStack) -> None:
    done = command(begun, "down", "--url", begun.url)
    assert done.returncode == 0, done.stderr
    assert begun.process.wait(10) == 0
    assert not begun.leftovers()
    done = command(begun, "down", "--url", begun.url)
    assert (done.returncode, "no `motet up` of this user serves" in done.stderr) == (2, True)


def test_down_ends_what_has_no_supervisor(begun: MotetStack) -> None:
    kill_supervisor(begun)
    done = command(begun, "down", "--url", begun.url)
    assert done.returncode == 0, done.stderr
    assert not begun.leftovers()


def test_orphans_end_after_their_time(begun: MotetStack, run_folder: Path) -> None:
    kill_supervisor(begun)
    killed = time.monotonic()
    assert len(begun.leftovers()) == 5
    until(lambda: not begun.leftovers(), "all have ended")
    assert time.monotonic() - killed >= 3
    port = begun.url.rpartition(":")[2]
    assert [path.name for path in (run_folder / "motet").glob(f"{port}*")] == [f"{port}-stack"]
    assert [path.name for path in (run_folder / "motet" / f"{port}-stack").iterdir()] == ["lock"]


def test_ctrl_c_leaves_nothing(begun: MotetStack) -> None:
    assert begun.stop(signal.SIGINT) == 0
    assert not begun.leftovers()


def test_a_closed_terminal_leaves_nothing(tmp_path: Path, run_folder: Path, model: Path) -> None:
    stack = surviving(tmp_path, run_folder, model, "--no-nursery")
    leader, follower = pty.openpty()
    stack._process = subprocess.Popen(
        stack._command,
        env=stack.env,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the terminal
    )
    os.close(follower)
    os.set_blocking(leader, False)

    def read_and_look() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(leader, 1 << 20)
        return have_begun(stack)

    try:
        until(read_and_look, "all have begun", START_SECONDS)
        os.close(leader)
        assert stack.process.wait(60) == 0
        assert not stack.leftovers()
    finally:
        stack._clean_up()
