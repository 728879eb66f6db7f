"""Run a user's systemd of one's own, in namespaces and a control group of its own; it needs root and systemd."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

from e2e.stack import until

_SYSTEMD = Path("/lib/systemd/systemd")
_GROUPS = Path("/sys/fs/cgroup")
# Its mount of /run is empty but for the folder by which systemd knows that it is used.
_INSIDE = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system || exit 1
"$1" --user --unit=basic.target --log-target=console &
wait
"""
_ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


def why_not() -> str:
    """Return why no manager can run here, "" if one can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [one for one in ("unshare", "nsenter", "systemctl") if shutil.which(one) is None]
    if missing or not _SYSTEMD.exists():
        return f"needs {', '.join(missing) or _SYSTEMD}"
    try:
        _group().mkdir()
        _group().rmdir()
    except OSError as error:
        return f"needs control groups: {error}"
    probe = ["unshare", "-pfm", "--cgroup", "--mount-proc", "mount", "-t", "tmpfs", "none", "/run"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    return f"needs namespaces: {done.stderr}" if done.returncode else ""


def _group(name: str = "probe") -> Path:
    """Return a control group of the hierarchy in which systemd has its own."""
    named = _GROUPS / "systemd"
    return (named if named.is_dir() else _GROUPS) / f"motet-test-{os.getpid()}-{name}"


class SystemdManager:
    """`with SystemdManager(folder, env) as manager: manager.control("start", "motet")`.

    folder: for its sockets, with a short path. All that it has started ends with it.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]):
        self.env = {**env, "XDG_RUNTIME_DIR": str(folder)}
        self._group = _group(secrets.token_hex(4))
        self._log = folder / "manager.log"
        self._outer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SystemdManager:
        self._group.mkdir()
        apart = ["unshare", "-pfm", "--cgroup", "--mount-proc", "--kill-child"]
        inside = ["sh", "-c", _INSIDE, "sh", str(_SYSTEMD)]
        with self._log.open("wb") as log:
            self._outer = subprocess.Popen(
                ["sh", "-c", _ENTER, "sh", str(self._group), *apart, *inside],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            until(lambda: "running" in self.control("is-system-running"), "the manager runs")
        except BaseException as error:
            error.add_note(self.log())
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self.log()[-4000:])
        if self._outer is not None:
            self._outer.kill()  # the first process of its namespace is killed with it
            self._outer.wait()
        until(lambda: not self.processes(), "nothing is left")
        for path, _, _ in os.walk(self._group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def control(self, *args: str, seconds: float = 60) -> str:
        """Return what `systemctl --user` writes, or the error that it reports."""
        first = self._first()
        if first is None:
            return ""
        command = ["nsenter", "-t", str(first), "-m", "-p", "systemctl", "--user", *args]
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=seconds, check=False
        )
        return (done.stdout + done.stderr).strip()

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.control("show", unit, "--property", name, "--value")

    def processes(self) -> list[psutil.Process]:
        """Return what runs in the control group, but for what holds the namespaces."""
        found = []
        for path in self._group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found += [int(line) for line in path.read_text().split() if line != "0"]
        outer = -1 if self._outer is None or self._outer.poll() is not None else self._outer.pid
        running = []
        for pid in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                one = psutil.Process(pid)
                if pid != outer and one.status() != psutil.STATUS_ZOMBIE:
                    running.append(one)
        return running

    def _first(self) -> int | None:
        """Return the first process of the namespace, None before it runs."""
        if self._outer is None or self._outer.poll() is not None:
            raise RuntimeError(f"the manager has ended: {self.log()}")
        children = psutil.Process(self._outer.pid).children()
        return children[0].pid if children else None
