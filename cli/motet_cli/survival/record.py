"""Record the processes of a running stack, for the supervisor that takes them over.

The folder of a stack, which only its user can read, holds the record, a lock that the supervisor
has as long as it lives, and the socket of the watchdog. It is in the folder of
`motet_cli.supervision.connection`, under the HTTP port.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from motet_cli.placement.gpus import VISIBLE, GpuListing
from motet_cli.supervision import connection
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.state_file import WriteWarning
from motet_cli.supervision.supervisor import Slot
from motet_cli.survival.identity import Identity, identify, place

FORMAT = 1
MARK = "MOTET_STACK"  # variable of all processes of a stack: its folder
# Variables that reach services from the environment of `motet up`, and change what they do.
_SETTINGS = ("MOTET_", "CUDA_", "HF_", "HSA_", "MKL_", "NCCL_", "OMP_", "TORCH", "TRITON_", "VLLM_")
# They import nothing of these: another version of them is no reason to replace a service.
_FOREIGN = ("motet_cli", "motet_evaluation")


@dataclass(frozen=True, kw_only=True)
class Base:
    """Hold what cannot change while services go on: otherwise all of them begin anew.

    nats: URL of the user's own server; None: the stack has one.
    """

    host: str
    port: int
    nats: str | None
    store: str | None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Hold what was free before the stack began, from which the arguments of services follow."""

    memory: int
    gpus: GpuListing | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """Describe a running process.

    fingerprint: of its arguments, environment and code. leaving: it is being stopped.
    """

    identity: Identity
    instance: str
    spec: ChildSpec
    fingerprint: str
    leaving: bool = False


@dataclass(frozen=True, kw_only=True)
class StackRecord:
    """Describe a running stack.

    place: boot and namespace of the pids. stopping: the supervisor was asked to end everything.
    """

    format: int = FORMAT
    place: str = field(default_factory=place)
    supervisor: Identity
    base: Base
    nats_url: str
    credentials: str | None
    measured: Measured
    orphan_seconds: float
    stopping: bool = False
    processes: tuple[ProcessRecord, ...] = ()


class StackFolder:
    """Give access to the files of the stack on an HTTP port. Raises ConfigError."""

    def __init__(self, port: int) -> None:
        self.path = connection.private(connection.folder()) / f"{port}-stack"
        self.path.mkdir(mode=0o700, exist_ok=True)
        connection.private(self.path)

    @property
    def listener(self) -> Path:
        """Return the Unix socket at which the watchdog gives away the listening socket."""
        return self.path / "listener.sock"

    @contextlib.contextmanager
    def claimed(self) -> Iterator[bool]:
        """Yield True if this process is the only one that controls the stack, for the context.

        The kernel ends the claim with the process, so it is never left behind.
        """
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def read(self) -> StackRecord | None:
        """Return the record; None if there is none of this boot and of this version's format."""
        try:
            found = msgspec.json.decode((self.path / "record.json").read_bytes(), type=StackRecord)
        except (OSError, msgspec.MsgspecError):
            return None
        return found if (found.format, found.place) == (FORMAT, place()) else None

    def write(self, record: StackRecord) -> None:
        """Replace the record at once: a reader sees the old one or the new one. Raises OSError."""
        part = self.path / f"record.{os.getpid()}.part"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(record))
        part.replace(self.path / "record.json")

    def clear(self) -> None:
        """Remove everything but the lock, which another process may be about to take."""
        for path in self.path.iterdir():
            if path.name != "lock":
                path.unlink(missing_ok=True)


class Recorder:
    """Keep the record of a stack up to date with its processes."""

    def __init__(
        self, folder: StackFolder, record: StackRecord, report: Callable[[str, str], None]
    ) -> None:
        """Configure the recorder without writing.

        record: what is written beside the processes; its processes are those that are adopted.
        report: receives a message and its level if the record cannot be written.
        """
        self._folder, self._record, self._warning = folder, record, WriteWarning(report)
        self._known = {one.identity.pid: one for one in record.processes}

    def write(self, slots: Iterable[Slot], *, stopping: bool = False) -> None:
        """Write the processes that run now."""
        found = [one for slot in slots if (one := self._describe(slot)) is not None]
        self._known = {one.identity.pid: one for one in found}
        record = replace(self._record, processes=tuple(found), stopping=stopping)
        with self._warning.on_failure(self._described):
            self._folder.write(record)

    def _described(self, error: OSError) -> str:
        where = self._folder.path
        return f"services cannot outlive this supervisor: {error}; free space in {where}"

    def _describe(self, slot: Slot) -> ProcessRecord | None:
        child = slot.child
        if child is None or child.status is not None or slot.state not in ("running", "leaving"):
            return None
        known = self._known.get(child.pid)
        if known is None or known.instance != child.instance:
            identity = identify(child.pid)
            if identity is None:
                return None
            known = ProcessRecord(
                identity=identity,
                instance=child.instance,
                spec=slot.spec,
                fingerprint=fingerprint(slot.spec),
            )
        return replace(known, leaving=slot.state == "leaving")


def fingerprint(spec: ChildSpec) -> str:
    """Return a digest of what a process does: its arguments, settings and code, but not its place.

    Descriptors have other numbers in each supervisor, and instances of a role are on other GPUs.
    """
    argv = list(spec.argv)
    if "--listen-fd" in argv:
        argv[argv.index("--listen-fd") + 1] = ""
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    env = settings | dict(spec.env)
    for name in (VISIBLE, MARK, "MOTET_INSTANCE", "MOTET_WAIT_FOR_EXIT"):
        env.pop(name, None)
    told = repr((argv, sorted(env.items()), _code(int(time.monotonic())))).encode()
    return hashlib.blake2b(told, digest_size=16).hexdigest()


@functools.lru_cache(maxsize=1)
def _code(second: int) -> list[tuple[str, int, int]]:
    """Return the files of the packages that services import, with their times and sizes.

    second: the list is made once for the processes that start within one.
    """
    found: list[tuple[str, int, int]] = []
    for package in pkgutil.iter_modules():
        if not package.name.startswith("motet_") or package.name in _FOREIGN:
            continue
        spec = package.module_finder.find_spec(package.name, None)
        for folder in (spec and spec.submodule_search_locations) or ():
            found += _modules(folder)
    return sorted(found)


def _modules(folder: str) -> Iterator[tuple[str, int, int]]:
    """Yield the files of a package, without those that are removed just now by an upgrade."""
    for path, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".py"):
                continue
            file = os.path.join(path, name)
            try:
                state = os.stat(file)
            except OSError:
                continue
            yield file, state.st_mtime_ns, state.st_size
