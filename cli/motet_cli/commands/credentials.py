"""Create passwords of NATS users and servers, and certificates of hosts: `motet credentials`.

The authority's key stays in its folder: a host needs only its own key and certificate, and `ca.crt`.
`environment` prints where a running `motet up` has NATS and its passwords.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from motet_cli.joining import certificates, server_links
from motet_cli.supervision import connection, nats
from motet_shared.credentials import USERS, make_passwords
from motet_shared.errors import ConfigError


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
        "hub": _hub,
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
    for name, value in (variables | found.peer_variables()).items():
        print(f"export {name}={shlex.quote(value)}")


def _passwords(folder: Path, args: Namespace) -> None:
    users = make_passwords(folder, rotate=args.rotate)
    nats.stage(folder)
    print(f"{folder}: the passwords of {len(users)} users, and nats.conf for the server")


def _hub(folder: Path, args: Namespace) -> None:
    leafnodes = args.leafnodes.split(",") if args.leafnodes else ()
    made = server_links.write_links(folder, args.addresses, leafnodes, rotate=args.rotate)
    nats.stage(folder)
    *own, leaf = (str(path) for path in made)
    print(
        f"{', '.join(own)}: for the hub; {leaf}: for server/hub.conf beside each leaf's nats-leaf.conf"
    )


def _authority(folder: Path, args: Namespace) -> None:
    cert, key = folder / certificates.AUTHORITY, folder / certificates.AUTHORITY_KEY
    if key.exists():
        raise ConfigError(
            f"FOLDER: {key} exists; remove it first to replace the authority and every certificate",
            param="FOLDER",
        )
    certificates.make_authority(folder, _days(args))
    print(f"{cert}: for every host; {key} stays here")


def _certificate(folder: Path, args: Namespace) -> None:
    for name in args.names:
        certificates.alternative(name)
    if not (folder / certificates.AUTHORITY_KEY).is_file():
        raise ConfigError(
            f"FOLDER: {str(folder)!r} has no ca.key; create it with `motet credentials ca {args.folder}`",
            param="FOLDER",
        )
    stem = args.names[0].replace("*", "_").replace(":", "_")
    cert, key = certificates.make_certificate(folder, args.names, stem, _days(args))
    print(f"{cert} and {key}: for {', '.join(args.names)}, with ca.crt")


def _days(args: Namespace) -> int:
    if not 1 <= args.days <= 36500:
        raise ConfigError(f"--days: {args.days} is out of range; give 1 to 36500", param="--days")
    return int(args.days)
