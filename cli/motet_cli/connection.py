"""How a command of the same user finds the NATS server of a running `motet up`.

`motet up` picks a port and a password for each run. It keeps them, while it runs, in a file that only its user can
read: one per HTTP port, in `$XDG_RUNTIME_DIR/motet`, or in `motet-<uid>` under the temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from motet_cli import address
from motet_shared.errors import ConfigError


@dataclass(frozen=True)
class Connection:
    """Where NATS is and the password of its users; None: it asks for none."""

    nats_url: str
    nats_password: str | None = field(default=None, repr=False)


def folder() -> Path:
    """Where the files are. It may not exist."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "motet"
    return Path(tempfile.gettempdir()) / f"motet-{os.getuid()}"


@contextlib.contextmanager
def published(port: int, connection: Connection) -> Iterator[None]:
    """While in the block, commands of the same user find `connection` by the HTTP port."""
    path = _private(folder()) / f"{port}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(connection), file)
    part.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find(url: str, nats_url: str | None) -> Connection:
    """The connection for what a command was told: `--nats` with the password of the environment, else by `--url`.

    ConfigError if nothing is known of a stack at `url`.
    """
    password = os.environ.get("MOTET_NATS_PASSWORD")
    if nats_url is not None:
        return Connection(nats_url, password)
    parts = urlsplit(url)
    path = folder() / f"{parts.port}.json"
    if not address.is_loopback(parts.hostname or "") or not path.is_file():
        raise ConfigError(
            f"--url: no `motet up` of this user serves {url}; start one, or give --nats URL and MOTET_NATS_PASSWORD"
        )
    found = Connection(**json.loads((_private(folder()) / path.name).read_text()))
    return Connection(found.nats_url, found.nats_password or password)


def _private(path: Path) -> Path:
    """The folder, made if need be. ConfigError if others could have put something into it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} must be a folder that only its user can read; remove it, or set XDG_RUNTIME_DIR")
    return path
