"""A root of Debian with nothing but its minimum, in which commands run, as on the fresh machine of a reader.

Commands see this machine's network and devices, and processes, mounts and files of their own. pip finds packages as it
does here: its settings are copied, and local folders that they name are mounted.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from containers.engine import unmount_below
from containers.images import CERTIFICATES, ROOT, SUITE, call, proxies

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = "/root"
AUTHORITIES = "/authorities.crt"  # that this machine trusts; Debian's own file is written when packages are installed


class BareDebian:
    """A root folder. `run` and `start` take a command of bash, which begins in the home folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pip = _pip_settings()
        self._mounts = _local_folders(self._pip)

    def run(self, command: str, timeout: float) -> str:
        """Return what a command prints. Raises RuntimeError if it fails, TimeoutExpired if it takes too long."""
        return call(*self._argv(command), timeout=timeout)

    def start(self, command: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a command that runs on; ending the process that is returned ends all that it has started."""
        with log.open("wb") as file:
            return subprocess.Popen(
                self._argv(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def copy_project(self) -> Path:
        """Copy the files of this working tree that git knows or does not ignore; return where they are in the root."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        target = self.root / HOME.strip("/") / "motet"
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (source := ROOT / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target / name)
        return target

    def _argv(self, command: str) -> list[str]:
        env = {"HOME": HOME, "PATH": PATH, "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        env |= proxies() | {
            f"PIP_{key.upper().replace('-', '_')}": value for key, value in self._pip.items()
        }
        if CERTIFICATES.exists():
            env["PIP_CERT"] = AUTHORITIES
        mounts = [f"mount --rbind /dev {shlex.quote(f'{self.root}/dev')}"]
        mounts += [
            f"mount --bind {shlex.quote(str(one))} {shlex.quote(f'{self.root}{one}')}"
            for one in self._mounts
        ]
        inside = ["env", "-i", *(f"{key}={value}" for key, value in env.items())]
        chroot = ["chroot", str(self.root), *inside, "bash", "-c", f"cd {HOME} && {command}"]
        script = " && ".join([*mounts, f"exec {shlex.join(chroot)}"])
        own = ["--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={self.root}/proc"]
        return ["unshare", *own, "sh", "-c", script]


@contextmanager
def bare_debian(folder: Path) -> Iterator[BareDebian]:
    """Yield a fresh root below `folder`, which is deleted afterwards. Raises RuntimeError where debootstrap fails."""
    root = folder / "debian"
    mirror = [os.environ["MOTET_DEBIAN_MIRROR"]] if "MOTET_DEBIAN_MIRROR" in os.environ else []
    try:
        call("debootstrap", "--variant=minbase", SUITE, str(root), *mirror, timeout=1200)
        copies = {CERTIFICATES: AUTHORITIES} | {
            Path(f"/etc/{name}"): f"/etc/{name}" for name in ("resolv.conf", "hosts")
        }
        for file, target in copies.items():
            if file.exists():
                shutil.copy(file, f"{root}{target}")
        made = BareDebian(root)
        for one in made._mounts:
            (root / one.relative_to("/")).mkdir(parents=True, exist_ok=True)
        yield made
    finally:
        unmount_below(root)
        shutil.rmtree(root, ignore_errors=True)


def _pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine by their names, such as `find-links`; those of the environment win."""
    lines = call(sys.executable, "-m", "pip", "config", "list", timeout=60).splitlines()
    lines.sort(key=lambda line: line.startswith(":env:"))  # stable: files stay in pip's order
    pairs = (line.partition("=") for line in lines)
    return {key.partition(".")[2]: " ".join(shlex.split(value)) for key, _, value in pairs}


def _local_folders(settings: Mapping[str, str]) -> list[Path]:
    """Return the folders where pip finds packages; of an index the one above, because its pages name files there."""
    named = [part.removeprefix("file://") for value in settings.values() for part in value.split()]
    found = [Path(name) for name in named if name.startswith("/") and Path(name).is_dir()]
    return sorted({one.parent if one.name == "simple" else one for one in found})
