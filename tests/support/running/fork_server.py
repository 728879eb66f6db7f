"""Fork services from a process that has loaded their modules, so that a start costs no import.

Importing torch takes seconds of a core, and a test of failures needs many processes. `python -m
support.running.fork_server MODULE …` imports the modules (one with a leading dash is made
unimportable), reads lines of JSON `[module, argv, environment]`, and answers each with the id of a
process in which `python -m module argv` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
from types import TracebackType

from support.running.service_process import Reachable, python_environment, settings

ENDS_WITHIN = 30.0  # seconds after SIGTERM


class ForkServer:
    """Run a fork server: `async with ForkServer("motet_asr.service") as forks:`.

    Its processes end with it.
    """

    def __init__(self, *modules: str, lacking: tuple[str, ...] = ()):
        """Define the modules to load.

        lacking: packages that its processes cannot import.
        """
        self._modules = (*(f"-{name}" for name in lacking), *modules)
        self._pids: list[int] = []
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> ForkServer:
        argv, pipe = ("-m", "support.running.fork_server", *self._modules), asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, env=python_environment(), stdin=pipe, stdout=pipe
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.end_all()
        finally:
            process = self._own()
            process.kill()
            await process.wait()

    async def end_all(self) -> None:
        """End all processes started so far."""
        pids, self._pids = self._pids, []
        await asyncio.gather(*(end(pid) for pid in pids))

    def _own(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the fork server is not running")
        return self._process

    async def start(self, nats: Reachable, module: str, *argv: str) -> int:
        """Start a service on this server and return its process id."""
        process = self._own()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([module, argv, settings(nats)]).encode() + b"\n")
        pid = int(await process.stdout.readline() or b"-1")
        if pid < 0:
            raise RuntimeError(f"the fork server could not import {', '.join(self._modules)}")
        self._pids.append(pid)
        return pid


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def end(pid: int) -> None:
    """Terminate a process, by SIGKILL if necessary; a dead one is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(ENDS_WITHIN):
                while alive(pid):  # noqa: ASYNC110  # it is no child of this process
                    await asyncio.sleep(0.02)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    for module in sys.argv[1:]:
        if module.startswith("-"):
            sys.modules[module[1:]] = None  # type: ignore[assignment]
        else:
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has died is gone
    for line in sys.stdin:
        module, argv, env = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
        else:
            _become(module, argv, env)


def _become(module: str, argv: list[str], env: dict[str, str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.environ.update(env)
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    os._exit(0)


if __name__ == "__main__":
    main()
