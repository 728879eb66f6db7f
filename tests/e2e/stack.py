"""A real `motet up` as a subprocess, on free ports, seen from outside; nothing of it may be left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
import psutil

from motet_shared.credentials import USERS

T = TypeVar("T")
START_SECONDS = 240.0  # torch alone takes many seconds to import on a busy machine
ENDLESS = "endless"  # a model of the end-to-end stack that goes on until it is stopped
ASR_MODEL, VOICE = "ears", "voice"  # models of random weights that hear and speak
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.05  # what polls more often takes processor time from what it waits for


def speech(folder: Path) -> tuple[str, ...]:
    """Arguments of `motet up` for models that hear and speak, made in `folder`: tiny ones with random weights."""
    from support.checkpoints import tts_checkpoints  # they need torch, which most tests do without
    from support.checkpoints.asr_checkpoints import tiny_whisper

    ears = tiny_whisper(folder / ASR_MODEL)
    voice = tts_checkpoints.pocket_tts(folder / VOICE, sample=True, threshold=0.2)
    return "--asr", str(ears), "--tts", str(voice)


def until(condition: Callable[[], T], what: str, seconds: float = WAIT_SECONDS) -> T:
    """The first true value of `condition`. For what happens in other processes and cannot be awaited."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_SECONDS)
    return value


def fetch(url: str, headers: Mapping[str, str] | None = None, **params: str) -> httpx.Response:
    """Answer to a GET over plain HTTP. Loads no certificates, which would take longer than all else."""
    return httpx.get(
        url, params=params, headers=headers, trust_env=False, verify=False, timeout=WAIT_SECONDS
    )


def running(pid: int) -> bool:
    """Whether the process does anything: one that is dead but not yet reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class MotetStack:
    """`with MotetStack(folder, "--decode", "2") as stack:` is ready when entered and gone without trace when left.

    It draws, films and embeds nothing unless it is told what with."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        model: str = "",
        start_seconds: float = START_SECONDS,
        prefix: Sequence[str] = (),
    ) -> None:
        self._mark = secrets.token_hex(16)  # of every process of this stack, in its environment
        self._model = model  # whose readiness counts; "": that of all that was asked for
        self._start_seconds = start_seconds
        self._state_file = folder / "state.json"
        self.log_file = folder / "motet.log"
        self._command = [
            *prefix,  # of the command, such as that of another host
            sys.executable,
            "-m",
            "motet_cli",
            "up",
            "--port",
            "0",
            "--state-file",
            str(self._state_file),
        ]
        left_out = [kind for kind in ("--draw", "--film", "--embed") if kind not in args]
        self._command += [*args, *(part for kind in left_out for part in (kind, "none"))]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.env = {**os.environ, "PYTHONPATH": paths, "MOTET_TEST_MARK": self._mark, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    # --------------------------------------------------------------------------------------------------- start and end
    def __enter__(self) -> MotetStack:
        self.start()
        try:
            until(self.ready, "the stack is ready", self._start_seconds)
        except BaseException as error:
            error.add_note(self.log()[-8000:])
            self._clean_up()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self.log()[-8000:])
        try:
            self.stop()
            until(lambda: not self.leftovers(), f"no process is left of {self.leftovers()}", 10)
        finally:
            self._clean_up()

    def start(self) -> None:
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks the command to end; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)

    def _clean_up(self) -> None:
        for process in self._of_this_stack():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)

    def _of_this_stack(self) -> list[psutil.Process]:
        """Every process that carries this stack's mark in its environment, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("MOTET_TEST_MARK") == self._mark:
                    found.append(process)
        return [process for process in found if running(process.pid)]

    def leftovers(self) -> list[str]:
        """Processes of this stack other than the command itself."""
        words = []
        for process in self._of_this_stack():
            with contextlib.suppress(psutil.Error):
                if process.pid != self.process.pid:
                    words.append(f"{process.pid} {' '.join(process.cmdline())}")
        return words

    # ------------------------------------------------------------------------------------------------------- its state
    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the stack was not started")
        return self._process

    def state(self) -> dict[str, Any]:
        """What the supervisor says; empty before it said anything."""
        try:
            state: dict[str, Any] = json.loads(self._state_file.read_text())
        except FileNotFoundError:
            return {}
        return state

    @property
    def url(self) -> str:
        return str(self.state()["url"])

    @property
    def nats_url(self) -> str:
        return str(self.state()["nats_url"])

    @property
    def passwords(self) -> dict[str, str]:
        """Of this run's NATS users."""
        folder = Path(self.state()["nats_credentials"])
        return {user: (folder / user / user).read_text().strip() for user in USERS}

    def children(self, role: str = "") -> list[dict[str, Any]]:
        """Entries of the state file: name, role, model, state, pid, instance, restarts, last_exit."""
        return [child for child in self.state().get("children", []) if role in ("", child["role"])]

    def child(self, name: str) -> dict[str, Any]:
        return next(child for child in self.children() if child["name"] == name)

    def ready(self) -> bool:
        """Whether the gateway says so; raises if the command has ended instead."""
        if self.process.poll() is not None:
            raise RuntimeError(f"motet up ended with exit code {self.process.returncode}")
        if not self.state():
            return False
        try:
            asked = {"model": self._model} if self._model else {}
            return fetch(f"{self.url}/health/ready", None, **asked).status_code == 200
        except httpx.HTTPError:
            return False

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    # ---------------------------------------------------------------------------------------------------------- faults
    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(int(self.child(name)["pid"]), number)

    def kill(self, name: str) -> Callable[[], dict[str, Any]]:
        """SIGKILL; the result waits for the process that replaces it."""
        before = self.child(name)
        os.kill(int(before["pid"]), signal.SIGKILL)

        def restarted() -> dict[str, Any] | None:
            now = self.child(name)
            return now if now["state"] == "running" and now["pid"] != before["pid"] else None

        def wait() -> dict[str, Any]:
            found = until(restarted, f"{name} is restarted")
            assert found is not None
            return found

        return wait

    def wait_until_all_ready(self) -> None:
        """Ready, and every process runs and takes work."""
        until(lambda: self.ready() and self._all_ready(), "all instances are ready", START_SECONDS)

    def _all_ready(self) -> bool:
        from e2e.engines.peer import (
            states,  # it needs an event loop and NATS, which most tests do without
        )

        others = ("nats", "fdstore", "watchdog")  # they are not on the bus
        wanted = {child["instance"] for child in self.children() if child["role"] not in others}
        seen = states(self.nats_url, self.passwords)
        return None not in wanted and all(seen.get(instance) == "ready" for instance in wanted)
