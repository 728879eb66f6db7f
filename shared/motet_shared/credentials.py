"""Manage the passwords of the NATS users, one per role, in files readable by their owner only.

    FOLDER/server/passwords.conf     all passwords, included by `services/nats.conf`, for nats-server
    FOLDER/<role>/<user>             the password of one user; a process gets its role's folder

Passwords are 256 random bits. nats-server stores them in plain text: access to its file or its
memory gives access to every message anyway, and hashing 256 random bits would protect nothing else.
They are read anew at each connection, so that `rotate` and a reload of nats-server change them
without restarting a process.

Containers call it as `python -m motet_shared.credentials FOLDER`, see `compose.yaml`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from motet_shared.errors import ConfigError

# The users of services/nats.conf, each named after its role. `operator` is used by the commands of
# `motet`.
USERS = (
    "gateway",
    "tokenizer",
    "decode",
    "prefill",
    "encoder",
    "asr",
    "vad",
    "speakers",
    "tts",
    "diffusion",
    "embedding",
    "ranking",
    "planner",
    "operator",
)
# An engine may change its role while it runs (`motet role`), and its user with it.
SHARED = {"decode": ("decode", "prefill"), "prefill": ("prefill", "decode")}
SERVER_FILE = "server/passwords.conf"
_PASSWORD = re.compile(r"[A-Za-z0-9_-]{16,}")


def new_password() -> str:
    """Return 256 random bits as 65 characters.

    They begin with a letter, since nats-server would parse a leading digit as a number.
    """
    return "p" + secrets.token_hex(32)


def read_password(folder: Path, user: str) -> str:
    """Read the password of `user` from its file in `folder`. Raises ConfigError with the remedy."""
    path = folder / user
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"nats_credentials: cannot read {str(path)!r}: {error}; make it with `motet credentials passwords`",
            param="nats_credentials",
        ) from None


class PasswordFile:
    """Read a password anew on each call; if the file has become unreadable, return the last one."""

    def __init__(self, folder: Path, user: str) -> None:
        """Read the password once; raise ConfigError if that fails."""
        self._folder, self._user = folder, user
        self._last = read_password(folder, user)

    def __call__(self) -> str:
        with contextlib.suppress(ConfigError):  # an exception would end the attempts to reconnect
            self._last = read_password(self._folder, self._user)
        return self._last


def make_passwords(
    folder: Path, *, users: Sequence[str] = USERS, rotate: bool = False, owner: int | None = None
) -> dict[str, str]:
    """Write missing passwords below `folder` and return the password of each user.

    `rotate`: also replace existing ones. `owner`: user id that the files are given to. Raises
    ConfigError if a file cannot be read or written.
    """
    try:
        known = {} if rotate else _known(folder, users)
        passwords = {user: known.get(user) or new_password() for user in users}
        _write(folder, passwords, owner)
    except OSError as error:
        raise ConfigError(f"{folder}: the passwords cannot be kept there: {error}") from None
    return passwords


def _known(folder: Path, users: Sequence[str]) -> dict[str, str]:
    """Return the existing passwords that are well-formed."""
    found: dict[str, str] = {}
    for user in users:
        with contextlib.suppress(FileNotFoundError):
            text = (folder / user / user).read_text().strip()
            if _PASSWORD.fullmatch(text):
                found[user] = text
    return found


def write_passwords(folder: Path, passwords: Mapping[str, str], owner: int | None = None) -> None:
    """Write the folder of each role whose user's password is given."""
    for role in passwords:
        for user in users_of(role) & passwords.keys():
            write_private(folder / role / user, passwords[user] + "\n", owner)


def users_of(role: str) -> set[str]:
    """Return the users as which processes of a role may log in."""
    return set(SHARED.get(role, (role,)))


def _write(folder: Path, passwords: Mapping[str, str], owner: int | None) -> None:
    write_passwords(folder, passwords, owner)
    # The server's file is last: until a reload, the server accepts the old passwords.
    lines = [f'PASSWORD_{user.upper()} = "{password}"\n' for user, password in passwords.items()]
    write_private(folder / SERVER_FILE, "".join(lines), owner)


def write_private(path: Path, text: str, owner: int | None = None) -> None:
    """Replace the file atomically; it is readable only by its owner from the start."""
    path.parent.mkdir(mode=0o700 if owner is None else 0o755, parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        if owner is not None:
            os.chown(part, owner, -1)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Make the passwords for a stack of containers.

    Returns 0, or 78 if they cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="motet_shared.credentials", description="Make passwords of NATS users."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument(
        "--owner", metavar="UID", type=int, help="user id that the files are given to"
    )
    parser.add_argument("--rotate", action="store_true", help="replace those that are there")
    args = parser.parse_args(argv)
    try:
        make_passwords(args.folder, rotate=args.rotate, owner=args.owner)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main())
