"""Check the Python environment of another engine, and make the command of a host inside it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

from motet_shared.errors import ConfigError

# Modules and what brings them: dependencies of Motet's package without extras.
WIRE = {
    "msgspec": "msgspec",
    "nats": "nats-py",
    "opentelemetry.trace": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "uvloop": "uvloop",
}
ENGINES = {"vllm": {"vllm": "vllm", **WIRE}, "llama.cpp": {"xllamacpp": "xllamacpp"}}
_PACKAGES = ("motet_shared", "motet_media", "motet_models", "motet_engines")
_LEAST = (3, 11)
_SECONDS = 60.0
_PROBE = """
import importlib.util, json, sys
def missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return True
print(json.dumps([sys.version_info[:2], [name for name in sys.argv[1:] if missing(name)]]))
"""


def check_environment(python: str, kind: str, flag: str = "--engine-python") -> str:
    """Return the absolute path of an interpreter whose environment can run an engine.

    Raises ConfigError, with the packages that are missing and the command that installs them.
    """
    path = Path(os.path.abspath(Path(python).expanduser()))  # a venv's link must not be followed
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(
            f"{flag}={python!r} is no program; give such as venv/bin/python", param=flag
        )
    wanted = ENGINES[kind]
    version, missing = _probe(path, list(wanted), flag)
    if kind == "vllm" and tuple(version) < _LEAST:
        raise ConfigError(
            f"{flag}={python!r} is Python {version[0]}.{version[1]}; give 3.11 or newer", param=flag
        )
    if missing:
        packages = " ".join(wanted[name] for name in missing)
        raise ConfigError(
            f"{flag}={python!r} lacks {', '.join(missing)}; run {path} -m pip install {packages}",
            param=flag,
        )
    return str(path)


def _probe(path: Path, modules: list[str], flag: str) -> tuple[list[int], list[str]]:
    try:
        done = subprocess.run(
            [str(path), "-c", _PROBE, *modules],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        version, missing = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{flag}={str(path)!r} is no Python: {error}", param=flag) from None
    return version, missing


def host_command(python: str) -> tuple[str, ...]:
    """Return the beginning of the command line of a host in another environment."""
    return (python, str(_folder("motet_engines") / "other_environment.py"))


def host_variables() -> dict[str, str]:
    """Return the environment of such a host: where Motet's packages are, and nothing else of ours."""
    packages = os.pathsep.join(str(_folder(name)) for name in _PACKAGES)
    return {"MOTET_ENGINE_PACKAGES": packages, "PYTHONPATH": "", "PYTHONHOME": ""}


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"--engine: package {package} is not installed; install motet[engines]")
    return Path(spec.origin).parent
