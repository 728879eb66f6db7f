"""Create passwords of NATS users and certificates of hosts: `motet credentials`.

Certificates are created with openssl, with elliptic-curve keys on P-256. The authority's key stays
in its folder: a host needs only its own key and certificate, and `ca.crt`.
`environment` prints where a running `motet up` has NATS and its passwords.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from motet_cli.supervision import connection, nats
from motet_shared.credentials import USERS, make_passwords
from motet_shared.errors import ConfigError

_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,250}[A-Za-z0-9_])?")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def run(args: Namespace) -> int:
    """Create passwords, an authority or a certificate, or print variables, as `args.action` says."""
    if args.action == "environment":
        _environment(args)
        return 0
    folder = Path(args.folder).expanduser().resolve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"FOLDER: {args.folder!r} cannot be created: {error.strerror}; give another",
            param="FOLDER",
        ) from None
    actions: dict[str, Callable[[Path, Namespace], None]] = {
        "passwords": _passwords,
        "ca": _authority,
        "certificate": _certificate,
    }
    actions[args.action](folder, args)
    return 0


def _environment(args: Namespace) -> None:
    """Print the variables with which a process of a role finds the stack, for a shell to read."""
    if args.role not in USERS:
        raise ConfigError(
            f"--role: {args.role!r} is no NATS user; give one of {', '.join(USERS)}", param="--role"
        )
    found = connection.find(args.url, None)
    variables = {"MOTET_NATS_URL": found.nats_url}
    if found.nats_credentials is not None:
        variables["MOTET_NATS_CREDENTIALS"] = str(Path(found.nats_credentials) / args.role)
    elif found.nats_password is not None:
        variables["MOTET_NATS_PASSWORD"] = found.nats_password
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


def _passwords(folder: Path, args: Namespace) -> None:
    users = make_passwords(folder, rotate=args.rotate)
    nats.stage(folder)
    print(f"{folder}: the passwords of {len(users)} users, and nats.conf for the server")


def _authority(folder: Path, args: Namespace) -> None:
    cert, key = folder / "ca.crt", folder / "ca.key"
    if key.exists():
        raise ConfigError(
            f"FOLDER: {key} exists; remove it first to replace the authority and every certificate",
            param="FOLDER",
        )
    usage = "keyUsage=critical,keyCertSign,cRLSign"
    subject = [
        "-subj",
        "/CN=Motet stack",
        "-addext",
        "basicConstraints=critical,CA:TRUE",
        "-addext",
        usage,
    ]
    out = ["-keyout", str(key), "-out", str(cert), "-days", str(_days(args))]
    _openssl(["req", "-x509", *_KEY, *out, *subject])
    print(f"{cert}: for every host; {key} stays here")


def _certificate(folder: Path, args: Namespace) -> None:
    names = [_alternative(name) for name in args.names]
    if not (folder / "ca.key").is_file():
        raise ConfigError(
            f"FOLDER: {str(folder)!r} has no ca.key; create it with `motet credentials ca {args.folder}`",
            param="FOLDER",
        )
    first = args.names[0].replace("*", "_").replace(":", "_")
    cert, key = folder / f"{first}.crt", folder / f"{first}.key"
    signed = [
        "-CA",
        str(folder / "ca.crt"),
        "-CAkey",
        str(folder / "ca.key"),
        "-days",
        str(_days(args)),
    ]
    uses = [
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-addext",
        "extendedKeyUsage=serverAuth,clientAuth",
    ]
    subject = [
        "-subj",
        f"/CN={args.names[0][:64]}",
        "-addext",
        "subjectAltName=" + ",".join(names),
        *uses,
    ]
    _openssl(["req", "-x509", *_KEY, "-keyout", str(key), "-out", str(cert), *signed, *subject])
    print(f"{cert} and {key}: for {', '.join(args.names)}, with ca.crt")


def _alternative(name: str) -> str:
    """Return a host name or address as a subject alternative name. Raises ConfigError."""
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        pass
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"NAME: {name!r} is neither a host name nor an address; give one such as node-1",
            param="NAME",
        )
    return f"DNS:{name}"


def _days(args: Namespace) -> int:
    if not 1 <= args.days <= 36500:
        raise ConfigError(f"--days: {args.days} is out of range; give 1 to 36500", param="--days")
    return int(args.days)


def _openssl(argv: Sequence[str]) -> None:
    """Run openssl; files that it writes are readable only by their owner.

    Raises ConfigError with openssl's message.
    """
    before = os.umask(0o077)
    try:
        done = subprocess.run(
            ["openssl", *argv], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        raise ConfigError("openssl is not installed; install version 3 or newer") from None
    except subprocess.TimeoutExpired:
        raise ConfigError("openssl did not end within 60 s; try again") from None
    finally:
        os.umask(before)
    if done.returncode != 0:
        raise ConfigError(
            f"openssl refused: {done.stderr.strip()[-500:]}; version 3 or newer is needed"
        )
