"""Checkouts of two releases that take each other's place under a running stack, as an upgrade does."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("shared", "kernels", "services", "pipelines", "cli")
OLD_RELEASE = "MOTET_OLD_RELEASE"  # variable: a commit or tag
_VERSION = re.compile(r'__version__ = "([0-9.]+)[^"]*"')


def old_release() -> str:
    """Return the commit to upgrade from; "" without a history.

    It is that of MOTET_OLD_RELEASE, else the last tag, else the last commit that changed the notes of a release.
    """
    if given := os.environ.get(OLD_RELEASE):
        return _git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}")
    tag = _git("describe", "--tags", "--abbrev=0")
    return (
        _git("rev-list", "-1", tag)
        if tag
        else _git("log", "-1", "--format=%H", "--", "docs/releases")
    )


def described(commit: str) -> str:
    """Return a commit, its date and subject."""
    return _git("log", "-1", "--format=%h of %as, %s", commit)


class Checkout:
    """Hold both releases below `folder`; `path` is the one that processes started from now on import.

    Each has its own `__version__`, which $SRV.INFO of an instance says: X.Y.Z+old and X.Y.Z+new.
    """

    def __init__(self, folder: Path, commit: str):
        self.path = folder / "release"
        self._folder = folder
        self._lay("old", ["git", "archive", "--format=tar", commit, *PACKAGES, "compose.yaml"])
        # The working tree, uncommitted changes included, without what git ignores.
        files = _git(
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
            *PACKAGES,
            "compose.yaml",
        )
        names = folder / "names"
        names.write_text("\0".join(name for name in files.split("\0") if (ROOT / name).is_file()))
        self._lay("new", ["tar", "-c", "--null", "-T", str(names)])
        self.use("old")

    def use(self, which: str) -> None:
        """Put a release into `path`."""
        link = self._folder / "next"
        link.symlink_to(self._folder / which)
        link.rename(self.path)

    def old_source(self, name: str) -> str:
        """Return the text of a file of the older release."""
        return (self._folder / "old" / name).read_text()

    @property
    def python_path(self) -> str:
        return os.pathsep.join(str(self.path / package) for package in PACKAGES)

    def _lay(self, which: str, packed: list[str]) -> None:
        target = self._folder / which
        target.mkdir()
        archive = subprocess.run(packed, cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
        file = target / "shared" / "motet_shared" / "__init__.py"
        file.write_text(_VERSION.sub(rf'__version__ = "\1+{which}"', file.read_text()))


def _git(*argv: str) -> str:
    """Return what a git command prints; "" if it fails."""
    try:
        done = subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
