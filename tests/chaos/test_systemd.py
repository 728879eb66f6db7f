"""The unit of `motet install-service` under a real systemd: kill -9 of the supervisor, a reload, and the end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos.streams import Outcome, Streams, request
from e2e import markov
from e2e.stack import START_SECONDS, fetch, until
from motet_cli.supervision import address
from support.running.systemd_manager import SystemdManager, why_not

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.xdist_group("systemd")]

MODEL = "markov"
NOT_NEEDED = "--asr none --tts none --vad 0 --draw none --embed none --no-store".split()


class Unit:
    """The unit `motet` of a manager."""

    def __init__(self, manager: SystemdManager, port: int, state: Path, log: Path):
        self.manager, self.url, self._state = manager, f"http://127.0.0.1:{port}", state
        self.log = log

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._state.read_text())
        return found

    def services(self) -> dict[str, int]:
        return {child["name"]: child["pid"] for child in self.state()["children"]}

    def main(self) -> int:
        return int(self.manager.show("motet", "MainPID"))

    def ready(self) -> bool:
        try:
            return fetch(f"{self.url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def takeovers(self) -> int:
        """Return how often a supervisor has taken over services that ran."""
        return self.log.read_text().count("took over")

    def leads(self, before: int) -> bool:
        """Return True if another process than `before` leads the services."""
        return self.main() not in (0, before) and self.state()["pid"] == self.main()


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unit]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("systemd")
    run_folder = Path(tempfile.mkdtemp(prefix="motet-"))
    port, state = address.free_port("127.0.0.1"), folder / "state.json"
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths, "XDG_CONFIG_HOME": str(folder / "config")}
    flags = [
        *("--llm", str(markov.save(folder / MODEL)), *NOT_NEEDED, "--orphan-timeout", "900"),
        *("--port", str(port), "--state-file", str(state)),
    ]
    command = [sys.executable, "-m", "motet_cli", "install-service", "--user", "--", *flags]
    subprocess.run(command, env=env, cwd=folder, check=True, timeout=120)
    log = folder / "motet.log"  # there is no journal
    more = folder / "config/systemd/user/motet.service.d"
    more.mkdir()
    (more / "log.conf").write_text(
        f"[Service]\nStandardOutput=append:{log}\nStandardError=append:{log}\n"
    )
    try:
        with SystemdManager(run_folder, env) as manager:
            told = manager.control("start", "motet", seconds=START_SECONDS)
            assert manager.show("motet", "ActiveState") == "active", told
            yield Unit(manager, port, state, log)
    finally:
        shutil.rmtree(run_folder)


async def told(unit: Unit, *, kill: bool) -> list[Outcome]:
    """The replies to four streams; the supervisor is killed while they come."""
    bodies = [request(number, MODEL, 300) for number in range(4)]
    async with Streams(unit.url, bodies) as streams:
        if kill:
            await asyncio.to_thread(
                unit.manager.control, "kill", "--signal=KILL", "--kill-who=main", "motet"
            )
        return await streams.finish()


def test_it_has_started_what_it_is_to_run(unit: Unit) -> None:
    """systemd has waited for it: it is ready when `systemctl start` returns."""
    assert unit.ready()
    assert unit.manager.show("motet", "Type") == "notify"
    assert unit.state()["pid"] == unit.main()


def test_a_killed_supervisor_is_restarted_over_the_same_services(unit: Unit) -> None:
    undisturbed = asyncio.run(told(unit, kill=False))
    services, before = unit.services(), unit.main()
    outcomes = asyncio.run(told(unit, kill=True))
    assert all(a.same_as(b) for a, b in zip(outcomes, undisturbed, strict=True))
    until(lambda: unit.leads(before), "systemd has restarted it", START_SECONDS)
    # Until it says so, a reload has no effect.
    until(lambda: unit.manager.show("motet", "ActiveState") == "active", "it is ready")
    until(unit.ready, "it serves")
    assert unit.services() == services
    assert unit.manager.show("motet", "NRestarts") == "1"


def test_a_reload_leaves_the_services(unit: Unit) -> None:
    services, before, took = unit.services(), unit.main(), unit.takeovers()
    unit.manager.control("reload", "motet", seconds=START_SECONDS)
    until(lambda: unit.takeovers() > took, "it has begun anew", START_SECONDS)
    until(unit.ready, "it serves")
    assert unit.main() == before
    assert unit.services() == services


def test_it_ends_with_all_services(unit: Unit) -> None:
    unit.manager.control("stop", "motet", seconds=START_SECONDS)
    ended = [
        unit.manager.show("motet", name) for name in ("ActiveState", "Result", "ExecMainStatus")
    ]
    assert ended == ["inactive", "success", "0"], unit.log.read_text()[-4000:]

    def left() -> list[str]:
        shown = [" ".join(one.cmdline()) for one in unit.manager.processes()]
        return [line for line in shown if "motet" in line or "nats-server" in line]

    until(lambda: not left(), f"none is left of {left()}")
    assert not unit.ready()
