"""Import what services need and fork them: `python -m motet_cli.supervision.nursery_process FD`.

The process serves one request at a time of its supervisor over the socket FD, and ends when that is
closed. It only imports, because a forked process has only the thread that forked it: locks that
other threads hold stay locked for ever, and devices that the parent has opened cannot be used.
`ImportModule` is refused if the import of a module has left a thread or an open device behind.
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

from motet_cli.supervision.parent_death import die_with_parent
from motet_shared.process import starts
from motet_shared.process.freed_memory import unmap_libraries

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_MAX_BYTES = 65536  # bytes read at a time


class ImportModule(msgspec.Struct, tag="load"):
    """Request to import what `python -m module` imports.

    Replies: `ModuleImported`, `FileChanged` or `RequestRefused`.
    """

    module: str


class Fork(msgspec.Struct, tag="fork"):
    """Request to run `python -m module` in a forked process.

    env: the complete environment. outlives: the process does not end with the supervisor. The file
    descriptor sent along receives the output. Replies: `Forked` or `RequestRefused`.
    """

    module: str
    argv: list[str]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    outlives: bool = False


class ForkSpare(msgspec.Struct, tag="spare"):
    """Request to fork a process that will run `module`, and waits for its `Fork` request.

    It waits at the socket that is sent along, after a call of the main module's function `prepare`,
    if it has one. Replies: `Forked` or `RequestRefused`.
    """

    module: str


class ModuleImported(msgspec.Struct, tag="loaded"):
    """Report an imported module.

    seconds: duration of the import.
    """

    seconds: float


class FileChanged(msgspec.Struct, tag="changed"):
    """Report that an imported file has changed, so that a new nursery is needed."""

    file: str


class Forked(msgspec.Struct, tag="forked"):
    """Report a new process, a child of the supervisor, which is a subreaper (prctl(2)) meanwhile."""

    pid: int


class RequestRefused(msgspec.Struct, tag="refused"):
    """Report why a request was refused."""

    reason: str


Request = ImportModule | Fork | ForkSpare
Reply = ModuleImported | FileChanged | Forked | RequestRefused

_requests: msgspec.json.Decoder[ImportModule | Fork | ForkSpare] = msgspec.json.Decoder(
    ImportModule | Fork | ForkSpare
)


class ImportedFiles:
    """Track the files of all imported modules, to detect later changes."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int]] = {}

    def record(self) -> None:
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
        """Return a file that was changed or removed, or None."""
        return next((file for file, state in self._files.items() if _state(file) != state), None)


def _state(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


# ------------------------------------------------------------------------------------------------------------ requests
def serve_requests(peer: socket.socket) -> Fork | None:
    """Serve requests until the supervisor closes the socket, then return None.

    In a forked process, return the request that it is to run; None: a spare is not needed.
    """
    imported = ImportedFiles()
    while (received := _receive(peer)) is not None:
        request, output = received
        reply: Reply
        if isinstance(request, ImportModule):
            reply = _load(request.module, imported)
        else:
            try:
                spare = isinstance(request, ForkSpare)
                pid = _fork(() if spare else output, isinstance(request, Fork) and request.outlives)
            except OSError as error:
                pid, reply = -1, RequestRefused(f"no process could be created: {error}")
            if pid == 0:
                peer.close()
                if isinstance(request, ForkSpare):
                    return _wait_as_spare(request.module, output)
                return request
            if pid > 0:
                reply = Forked(pid)
        for fd in output:
            os.close(fd)
        peer.sendall(msgspec.json.encode(reply) + b"\n")
    return None


def _wait_as_spare(module: str, sockets: list[int]) -> Fork | None:
    """Prepare to run a module; return the request to do so, or None if the supervisor has ended it."""
    prepare = getattr(sys.modules.get(main_of(module)), "prepare", None)
    if prepare is not None:
        prepare()
    with socket.socket(fileno=sockets[0]) as peer:
        received = _receive(peer)
    request, output = (None, []) if received is None else received
    if not isinstance(request, Fork):
        return None
    _redirect(output)
    return request


def _receive(peer: socket.socket) -> tuple[Request, list[int]] | None:
    data, fds, _, _ = socket.recv_fds(peer, _MAX_BYTES, 1)
    while data and not data.endswith(b"\n"):
        data += peer.recv(_MAX_BYTES)
    return (_requests.decode(data), fds) if data else None


def _load(module: str, imported: ImportedFiles) -> Reply:
    if (file := imported.changed()) is not None:
        return FileChanged(file)
    began = time.monotonic()
    try:
        importlib.import_module(main_of(module))
    except (
        Exception,
        SystemExit,
    ) as error:  # the service reports it in full when it starts without a fork
        return RequestRefused(f"{module} cannot be imported: {type(error).__name__}: {error}")
    imported.record()
    unmap_libraries()
    reason = reason_not_to_fork()
    return (
        ModuleImported(time.monotonic() - began)
        if reason is None
        else RequestRefused(f"after the import of {module}, {reason}")
    )


def main_of(module: str) -> str:
    """Return the module that `python -m module` runs, such as a package's `__main__`."""
    spec = importlib.util.find_spec(module)
    return (
        module if spec is None or spec.submodule_search_locations is None else f"{module}.__main__"
    )


def reason_not_to_fork() -> str | None:
    """Return why this process must not fork any more, or None."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads are running"
    files = (_link(path) for path in Path("/proc/self/fd").iterdir())
    opened = [file for file in files if file.startswith(_DEVICES)]
    return f"{opened[0]} is open" if opened else None


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the descriptor of the listing itself is closed by now
        return ""


def _fork(output: Iterable[int], outlives: bool) -> int:
    """Fork; return 0 in the new process and its id in this one. Raises OSError.

    Forks twice: the intermediate process ends at once, so that the supervisor, a subreaper, becomes
    the parent of the new process.
    """
    supervisor = os.getppid()
    reading, writing = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        os.close(reading)
        return _fork_grandchild(None if outlives else supervisor, writing, output)
    os.close(writing)
    os.waitpid(intermediate, 0)
    with os.fdopen(reading, "rb") as pipe:
        if not (pid := pipe.read()):
            raise OSError("the intermediate process has failed")
        return int(pid)


def _fork_grandchild(supervisor: int | None, writing: int, output: Iterable[int]) -> int:
    intermediate = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    while os.getppid() == intermediate:
        time.sleep(0.0005)
    if supervisor is not None:
        die_with_parent(supervisor)
    os.setpgid(0, 0)
    _redirect(output)
    return 0


def _redirect(output: Iterable[int]) -> None:
    """Write this process's output into a file descriptor from now on."""
    for fd in output:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)


# ----------------------------------------------------------------------------------------------------------- running
def run_module(request: Fork) -> None:
    """Run the module of a request in this process, as `python -m module` would."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(request.env)
    starts.begin_anew()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads != before and threads is not None and threads.isdecimal() and "torch" in sys.modules:
        # OpenMP read the variable when it was loaded.
        sys.modules["torch"].set_num_threads(int(threads))
    sys.argv = [request.module, *request.argv]
    sys.modules.pop(main_of(request.module), None)
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as peer:
        request = serve_requests(peer)
    if request is not None:
        run_module(request)


if __name__ == "__main__":
    main()
