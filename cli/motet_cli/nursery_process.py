"""A process that imports what services need, and becomes them: `python -m motet_cli.nursery_process FD`.

It obeys its supervisor over the socket FD, an order at a time, and ends when that is closed. It does nothing but
import, for a fork has only the thread that forks: a lock that another thread holds stays locked for ever, and a device
that the parent has opened is useless to the child. `Load` refuses where a module's import has left either behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from motet_cli.leash import leash
from motet_shared import starts

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_MOST = 65536  # bytes read at a time


class Load(msgspec.Struct, tag="load"):
    """Import what `python -m module` imports. Answered with `Loaded`, `Changed` or `Refused`."""

    module: str


class Fork(msgspec.Struct, tag="fork"):
    """Run `python -m module` in a new process, whose output is the file that comes along. `Forked` or `Refused`."""

    module: str
    argv: list[str]
    env: dict[str, str] = msgspec.field(default_factory=dict)  # all of it


class Loaded(msgspec.Struct, tag="loaded"):
    seconds: float  # that it took


class Changed(msgspec.Struct, tag="changed"):
    """A file of what is imported is another one now: only a new nursery could import it."""

    file: str


class Forked(msgspec.Struct, tag="forked"):
    """The new process is a child of the supervisor, which has to be a subreaper (see prctl(2)) meanwhile."""

    pid: int


class Refused(msgspec.Struct, tag="refused"):
    why: str


Order = Load | Fork
Answer = Loaded | Changed | Forked | Refused

_orders: msgspec.json.Decoder[Load | Fork] = msgspec.json.Decoder(Load | Fork)


class Imported:
    """The files of all modules that are imported, as they were then."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Take in those that are new."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file not in self._files and (state := _state(file)) is not None:
                self._files[file] = state

    def changed(self) -> str | None:
        """One that is another now, or gone."""
        return next((file for file, state in self._files.items() if _state(file) != state), None)


def _state(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


# ------------------------------------------------------------------------------------------------------------ obeying
def obey(peer: socket.socket) -> Fork | None:
    """Until the supervisor has gone (None); in a process that was forked: the order for it."""
    imported = Imported()
    while (received := _receive(peer)) is not None:
        order, output = received
        answer: Answer
        if isinstance(order, Load):
            answer = _load(order.module, imported)
        else:
            try:
                pid = _fork(output)
            except OSError as error:
                pid, answer = -1, Refused(f"no process could be made: {error}")
            if pid == 0:
                return order
            if pid > 0:
                answer = Forked(pid)
        for fd in output:
            os.close(fd)
        peer.sendall(msgspec.json.encode(answer) + b"\n")
    return None


def _receive(peer: socket.socket) -> tuple[Order, list[int]] | None:
    data, fds, _, _ = socket.recv_fds(peer, _MOST, 1)
    while data and not data.endswith(b"\n"):
        data += peer.recv(_MOST)
    return (_orders.decode(data), fds) if data else None


def _load(module: str, imported: Imported) -> Answer:
    if (file := imported.changed()) is not None:
        return Changed(file)
    began = time.monotonic()
    try:
        importlib.import_module(main_of(module))
    except (Exception, SystemExit) as error:  # whoever runs it alone will say it in full
        return Refused(f"{module} cannot be imported: {type(error).__name__}: {error}")
    imported.note()
    unfit = unfit_to_fork()
    return Loaded(time.monotonic() - began) if unfit is None else Refused(f"after the import of {module} {unfit}")


def main_of(module: str) -> str:
    """What `python -m module` runs: a service's `__main__` does nothing but import when it is imported."""
    spec = importlib.util.find_spec(module)
    return module if spec is None or spec.submodule_search_locations is None else f"{module}.__main__"


def unfit_to_fork() -> str | None:
    """Why this process must not fork any more; None: it may."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads run"
    files = (_link(path) for path in Path("/proc/self/fd").iterdir())
    opened = [file for file in files if file.startswith(_DEVICES)]
    return f"{opened[0]} is open" if opened else None


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # that of the listing itself is closed by now
        return ""


def _fork(output: Iterable[int]) -> int:
    """0 in the new process; here its id. One in between dies at once, so that the supervisor adopts it. OSError."""
    supervisor = os.getppid()
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(reading)
        return _be_between(supervisor, writing, output)
    os.close(writing)
    os.waitpid(between, 0)
    with os.fdopen(reading, "rb") as pipe:
        if not (pid := pipe.read()):
            raise OSError("the process in between has failed")
        return int(pid)


def _be_between(supervisor: int, writing: int, output: Iterable[int]) -> int:
    between = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    while os.getppid() == between:
        time.sleep(0.0005)
    leash(supervisor)
    os.setpgid(0, 0)
    for fd in output:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    return 0


# ----------------------------------------------------------------------------------------------------------- becoming
def become(order: Fork) -> None:
    """Be `python -m module`, as far as the module can tell."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(order.env)
    starts.begin_anew()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads != before and threads is not None and threads.isdecimal() and "torch" in sys.modules:
        # OpenMP has read the variable when it was loaded.
        sys.modules["torch"].set_num_threads(int(threads))
    sys.argv = [order.module, *order.argv]
    sys.modules.pop(main_of(order.module), None)
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as peer:
        order = obey(peer)
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
