"""Publish the NATS server of a running `motet up` to commands of the same user, and find it.

`motet up` picks a port and passwords for each run. While it runs, it keeps them in files that only
its user can read, in `$XDG_RUNTIME_DIR/motet`, or in `motet-<uid>` in the temporary folder: for
each HTTP port a file with the address of NATS, and a folder with the passwords of all roles.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from motet_cli.supervision import address
from motet_shared.credentials import read_password
from motet_shared.errors import ConfigError


def certificate_variables(folder: Path) -> dict[str, str]:
    """Return the variables that give a process the authority, certificate and key of a folder."""
    files = {"CA": "ca.crt", "CERT": "host.crt", "KEY": "host.key"}
    return {f"MOTET_PEER_{name}": str(folder / file) for name, file in files.items()}


@dataclass(frozen=True)
class PeerNetwork:
    """Hold what the processes of one host need to be reached by those of others, under TLS.

    address: of this host, for bulk data. folder: has `ca.crt`, `host.crt` and `host.key`.
    """

    address: str
    folder: Path

    def variables(self) -> dict[str, str]:
        """Return the environment of a process."""
        return {**certificate_variables(self.folder), "MOTET_BLOB_HOST": self.address}


@dataclass(frozen=True)
class NatsAccess:
    """Hold the address and the credentials of NATS.

    nats_credentials: folder with the passwords of all roles, or with that of one.
    nats_password: without a folder, the password of any user; None if the server asks for none.
    peer_folder: folder of this host's certificate, see `PeerNetwork`; None: without TLS.
    """

    nats_url: str
    nats_password: str | None = field(default=None, repr=False)
    nats_credentials: str | None = None
    peer_folder: str | None = None

    def peer_variables(self) -> dict[str, str]:
        """Return the variables that give a process the certificate; empty without TLS."""
        return {} if self.peer_folder is None else certificate_variables(Path(self.peer_folder))

    def password(self, role: str) -> str | None:
        """Return the password of a role's user; None if the server asks for none.

        Raises ConfigError if the folder does not have it.
        """
        if self.nats_credentials is None:
            return self.nats_password
        credentials = Path(self.nats_credentials)
        below = credentials / role
        return read_password(below if below.is_dir() else credentials, role)


def folder() -> Path:
    """Return the folder of the published files, which may not exist."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "motet"
    return Path(tempfile.gettempdir()) / f"motet-{os.getuid()}"


@contextlib.contextmanager
def published(port: int, connection: NatsAccess) -> Iterator[None]:
    """Publish `connection` under the HTTP port to commands of the same user."""
    path = private(folder()) / f"{port}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(connection), file)
    part.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def private_folder(name: str, *, keep: bool = False) -> Iterator[Path]:
    """Create an empty folder that only this user can read; remove it after the context.

    keep: begin with what a killed run has left there.
    """
    path = private(folder()) / name
    if not keep:
        shutil.rmtree(path, ignore_errors=True)  # no other run has this port
    path.mkdir(mode=0o700, exist_ok=keep)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def forget(port: int) -> None:
    """Remove what a killed run has published under the HTTP port, with its passwords."""
    for name in (f"{port}.json", f"{port}.sock", f"{port}.front.sock"):
        (folder() / name).unlink(missing_ok=True)
    shutil.rmtree(folder() / f"{port}-nats", ignore_errors=True)


def given_credentials() -> Path | None:
    """Return the folder of passwords that MOTET_NATS_CREDENTIALS names, or None."""
    given = os.environ.get("MOTET_NATS_CREDENTIALS")
    return Path(given).expanduser().resolve() if given else None


def with_environment(connection: NatsAccess) -> NatsAccess:
    """Add missing passwords from MOTET_NATS_PASSWORD or else MOTET_NATS_CREDENTIALS."""
    if connection.nats_password is not None or connection.nats_credentials is not None:
        return connection
    password, folder = os.environ.get("MOTET_NATS_PASSWORD") or None, given_credentials()
    if password is not None or folder is None:
        return NatsAccess(connection.nats_url, password)
    return NatsAccess(connection.nats_url, nats_credentials=str(folder))


def find(url: str, nats_url: str | None) -> NatsAccess:
    """Return the access for `--nats` (password from the environment), else for `--url`.

    Raises ConfigError if this user runs no stack at `url`.
    """
    if nats_url is not None:
        return with_environment(NatsAccess(nats_url))
    parts = urlsplit(url)
    path = folder() / f"{parts.port}.json"
    if not address.is_loopback(parts.hostname or "") or not path.is_file():
        raise ConfigError(
            f"--url: no `motet up` of this user serves {url}; start one, or give --nats URL and"
            " MOTET_NATS_CREDENTIALS",
            param="--url",
        )
    return with_environment(NatsAccess(**json.loads((private(folder()) / path.name).read_text())))


def private(path: Path) -> Path:
    """Return the folder, created if missing. Raises ConfigError if other users can access it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} must be a folder that only its user can read; remove it, or set XDG_RUNTIME_DIR",
            param="XDG_RUNTIME_DIR",
        )
    return path
