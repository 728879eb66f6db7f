"""Import what services need, and fork them: `python -m motet_cli.supervision.nursery_process FD`.

The process takes one order at a time from its supervisor over the socket FD, and ends when that is
closed. It does nothing but import, because a fork has only the thread that forks: a lock that
another thread holds stays locked for ever, and a device that the parent has opened is useless to
the child. `Load` refuses where a module's import has left either behind.
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

from motet_cli.supervision.leash import leash
from motet_shared.process import starts

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_MOST = 65536  # bytes read at a time


class Load(msgspec.Struct, tag="load"):
    """Import what `python -m module` imports. Answered with `Loaded`, `Changed` or `Refused`."""

    module: str


class Fork(msgspec.Struct, tag="fork"):
    """Run `python -m module` in a new process. Answered with `Forked` or `Refused`.

    The process writes its output to the file that is sent along.
    """

    module: str
    argv: list[str]
    env: dict[str, str] = msgspec.field(default_factory=dict)  # the whole environment


class Loaded(msgspec.Struct, tag="loaded"):
    """The module is imported."""

    seconds: float  # that the import took


class Changed(msgspec.Struct, tag="changed"):
    """An imported file has changed since: only a new nursery could import it again."""

    file: str


class Forked(msgspec.Struct, tag="forked"):
    """The new process is a child of the supervisor, which is a subreaper (prctl(2)) meanwhile."""

    pid: int


class Refused(msgspec.Struct, tag="refused"):
    """The order was not carried out."""

    why: str


Order = Load | Fork
Answer = Loaded | Changed | Forked | Refused

_orders: msgspec.json.Decoder[Load | Fork] = msgspec.json.Decoder(Load | Fork)


class Imported:
    """Record the files of all imported modules, as they were when they were imported."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Record the files of newly imported modules."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if (
                isinstance(file, str)
                and file not in self._files
                and (state := _state(file)) is not None
            ):
                self._files[file] = state

    def changed(self) -> str | None:
        """Return a file that has changed or is gone, or None."""
        return next((file for file, state in self._files.items() if _state(file) != state), None)


def _state(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


# ------------------------------------------------------------------------------------------------------------ obeying
def obey(peer: socket.socket) -> Fork | None:
    """Carry out orders until the supervisor has gone; then return None.

    In a forked process, return the order for it.
    """
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
    except (
        Exception,
        SystemExit,
    ) as error:  # started without a fork, the service reports it in full
        return Refused(f"{module} cannot be imported: {type(error).__name__}: {error}")
    imported.note()
    unfit = unfit_to_fork()
    return (
        Loaded(time.monotonic() - began)
        if unfit is None
        else Refused(f"after the import of {module} {unfit}")
    )


def main_of(module: str) -> str:
    """Return the module that `python -m module` runs.

    A service's `__main__` only imports when it is imported.
    """
    spec = importlib.util.find_spec(module)
    return (
        module if spec is None or spec.submodule_search_locations is None else f"{module}.__main__"
    )


def unfit_to_fork() -> str | None:
    """Return why this process must not fork any more, or None."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads run"
    files = (_link(path) for path in Path("/proc/self/fd").iterdir())
    opened = [file for file in files if file.startswith(_DEVICES)]
    return f"{opened[0]} is open" if opened else None


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the descriptor of the listing itself is closed by now
        return ""


def _fork(output: Iterable[int]) -> int:
    """Fork; return 0 in the new process and its id in this one. Raises OSError.

    A process in between ends at once, so that the supervisor becomes the new process's parent.
    """
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
    """Run the order's module as `python -m module` would."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(order.env)
    starts.begin_anew()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads != before and threads is not None and threads.isdecimal() and "torch" in sys.modules:
        # OpenMP read the variable when it was loaded.
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
