"""Every command of README.md is run as it stands there; only ports and the example's path are put in."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.readme import ROOT, Block, blocks
from e2e.stack import fetch, until
from motet_shared.testing import free_port
from support.checkpoints.language_checkpoints import tiny_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(420)]
SECONDS = 240  # torch alone takes a minute to import on a busy machine


class Server:
    """At most one long-running command, in a process group of its own, as a terminal would run it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self, command: str, port: int, models: set[str]) -> None:
        """Returns when all the models are served."""
        self.stop()
        self.port = port
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        try:
            until(lambda: self._models() == models, f"{command!r} serves", SECONDS)
        except (TimeoutError, AssertionError) as error:
            error.add_note(self._log.read_text(errors="replace")[-4000:])
            raise

    def stop(self) -> None:
        """Ctrl-C; then nothing of its process group may be left."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if _group_lives(process.pid):
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
            until(lambda: not _group_lives(process.pid), "all processes have ended", 10)
        finally:
            if _group_lives(process.pid):
                os.killpg(process.pid, signal.SIGKILL)

    def _models(self) -> set[str]:
        assert self._process is not None
        assert self._process.poll() is None, f"ended with {self._process.returncode}"
        try:
            answer = fetch(f"http://127.0.0.1:{self.port}/v1/models")
        except httpx.HTTPError:
            return set()
        return {model["id"] for model in answer.json().get("data", []) if model["kind"] == "chat"}


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("readme") / "log")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "mine")


def models_of(code: str, checkpoint: Path) -> set[str]:
    """The names under which a command serves what it is told to."""
    given = re.findall(r"--llm ([^\s\"]+)", code) or ["pocket-chat"]
    return {checkpoint.name if model == "path/to/checkpoint" else model for model in given}


def adapt(code: str, port: int, checkpoint: Path) -> str:
    """The block with a free port and an existing checkpoint in it. `make test` runs this already: its set-up only."""
    code = (
        code.strip()
        .replace("path/to/checkpoint", str(checkpoint))
        .replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    )
    code = re.sub(r"^make run( ARGS=\")?", rf'make run ARGS="--port {port} ', code)
    if code.startswith("make run") and not code.endswith('"'):
        code += '"'
    code = re.sub(r"^make test$", "make test ARGS=--version", code)
    code = code.replace("/motet up", f"/motet up --port {port}")
    code = re.sub(
        r"/motet (chat|models|top|trace)", rf"/motet \1 --url http://127.0.0.1:{port}", code
    )
    return as_this_user(code)


def as_this_user(code: str) -> str:
    """Packages are installed where that is possible without a question, else apt only says what it would do."""
    if "apt-get" not in code:
        return code
    if shutil.which("apt-get") is None:
        return "true"
    if os.geteuid() == 0:
        return code.replace("sudo ", "")
    if subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0:
        return code
    return code.split("&&")[-1].replace("sudo apt-get", "apt-get --simulate")


COMMANDS = [block for block in blocks() if block.mark != "compose"]


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: f"line {block.line}")
def test_the_command_works(block: Block, server: Server, checkpoint: Path) -> None:
    if block.mark == "serves":
        port = free_port()
        server.start(adapt(block.code, port, checkpoint), port, models_of(block.code, checkpoint))
        return
    code = adapt(block.code, server.port, checkpoint)
    argv = (
        ["bash", "-euo", "pipefail", "-c", code]
        if block.language == "bash"
        else [sys.executable, "-c", code]
    )
    # A model draws its words: what the README shows is a likely answer, not the only one.
    for _ in range(3 if block.shown else 1):
        output = run(argv)
        if block.shown is None or output == block.shown.strip():
            return
    assert output == (block.shown or "").strip()


def run(argv: list[str]) -> str:
    done = subprocess.run(
        argv,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    return done.stdout.strip()


def test_the_table_lists_every_service() -> None:
    text = (ROOT / "README.md").read_text()
    packages = {path.parent.name for path in ROOT.glob("services/*/__main__.py")}
    assert set(re.findall(r"python -m (motet_\w+)", text)) == packages
