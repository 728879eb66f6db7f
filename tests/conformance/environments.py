"""Make the environments of suites: virtual ones of Python, and a folder of packages from npm.

They lie in `.cache/conformance`, and are made again when their pins change.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.running.node import node

from .suites import AUTOBAHN, NODE, PYTHON

CACHE = Path(__file__).parents[2] / ".cache" / "conformance"
INSTALL_SECONDS = 900


def python_of(name: str) -> Path:
    """Return the interpreter of an environment, with what `PYTHON` names for it."""
    pins = PYTHON[name]

    def make(folder: Path) -> None:
        venv.create(folder, with_pip=False)
        pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
        _run([*pip, "install", "--quiet", *pins])

    return _made(CACHE / name, pins, make) / "bin" / "python"


def node_of() -> tuple[str, Path]:
    """Return Node.js, and the folder below which scripts find the packages of `NODE`."""
    if (npm := shutil.which("npm")) is None:
        raise RuntimeError("npm is not installed; the suites in JavaScript need it")

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        manifest = {"private": True, "type": "module", "dependencies": NODE}
        (folder / "package.json").write_text(json.dumps(manifest))
        _run([npm, "install", "--no-audit", "--no-fund", "--loglevel=error"], folder)

    pins = [f"{name}@{version}" for name, version in NODE.items()]
    return node(), _made(CACHE / "node", pins, make)


def autobahn_of() -> tuple[list[str], dict[str, str]]:
    """Return the command of Autobahn|Testsuite and the environment variables that it needs.

    It is written for Python 2.7, which `MOTET_PYTHON2` names unless `python2.7` is found.
    """
    python = os.environ.get("MOTET_PYTHON2") or shutil.which("python2.7")
    if python is None:
        raise RuntimeError("Autobahn|Testsuite needs Python 2.7; MOTET_PYTHON2 names it")

    def make(folder: Path) -> None:
        known = {**os.environ, "PYTHONUSERBASE": str(folder)}
        install = (python, "-m", "pip", "install", "--quiet", "--user", "--no-deps")
        _run([*install, *AUTOBAHN], env=known)

    folder = _made(CACHE / "autobahn", AUTOBAHN, make)
    return [python, str(folder / "bin" / "wstest")], {"PYTHONUSERBASE": str(folder)}


def _made(folder: Path, pins: Sequence[str], make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has made for these pins, now or earlier."""
    stamp = folder / "pins.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != list(pins):
        shutil.rmtree(folder, ignore_errors=True)
        make(folder)
        stamp.write_text(json.dumps(list(pins)))
    return folder


def _run(
    command: Sequence[str], folder: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{os.path.basename(command[0])}: {done.stderr[-2000:]}")
