"""Create, list and revoke keys of tenants in the gateway's tenants file: `motet keys`."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import stat
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.tenants import (
    TenantKey,
    TenantLimits,
    Tenants,
    check_name,
    digest,
    new_key,
    parse_tenants,
)

_MIN_ID_DIGITS = 4  # of a key's digest, to name the key
_TEMPLATE = """[tenants.{name}]
# requests_per_minute = 600
# tokens_per_minute = 100_000
# concurrent_streams = 16
# concurrent_sockets = 16
# images_per_hour = 100
# audio_seconds_per_hour = 3600
# max_context = 8192
# service_tier = "default"  # the highest that requests may ask for; or "priority"
"""


def run(args: Namespace) -> int:
    """Create, list or revoke keys, as `args.action` says."""
    path = tenants_path(args.tenants_file)
    actions: dict[str, Callable[[Path, Namespace], None]] = {
        "new": _new,
        "list": _list,
        "revoke": _revoke,
    }
    actions[args.action](path, args)
    return 0


def tenants_path(given: str | None) -> Path:
    """Return the tenants file: `given`, or MOTET_TENANTS_FILE. Raises ConfigError if neither is set."""
    named = given or os.environ.get("MOTET_TENANTS_FILE")
    if not named:
        raise ConfigError(
            "--tenants-file: is not set; give the tenants file, or set MOTET_TENANTS_FILE",
            param="--tenants-file",
        )
    return Path(named).expanduser().resolve()


# ------------------------------------------------------------------------------------------------------------- actions
def _new(path: Path, args: Namespace) -> None:
    """Create a key; print it to standard output and a message to standard error."""
    key, about = create_key(path, args.tenant, args.note or "")
    print(key)
    print(about, file=sys.stderr)


def create_key(path: Path, tenant: str, note: str) -> tuple[str, str]:
    """Add a key of a tenant to the file; return it, and a message about it. Raises ConfigError."""
    check_name(tenant)
    key = new_key()
    with _editing(path) as file:
        known = tenant in file.tenants.limits
        line = f"note = {json.dumps(note)}\n" if note else ""
        today = datetime.datetime.now(datetime.UTC).date()
        block = (
            f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest(key)}"\ncreated = {today}\n{line}'
        )
        file.append(block if known else _TEMPLATE.format(name=tenant) + "\n" + block)
        added = TenantKey(tenant=tenant, sha256=digest(key), created=today, note=note)
        limits = dict(file.tenants.limits) | ({} if known else {tenant: TenantLimits()})
        file.replace(Tenants(limits, (*file.tenants.keys, added)))
    about = f"key {added.id} of {tenant} is stored in {path} as a digest, and not shown again"
    if not known:
        about += f"; {tenant} is new and has no limits until you set them in that file"
    return key, about


def _list(path: Path, args: Namespace) -> None:
    tenants = _read(path)[1]
    names = [args.tenant] if args.tenant else sorted(tenants.limits)
    for name in names:
        if name not in tenants.limits:
            raise ConfigError(
                f"TENANT: {name!r} is not in {path}; choose one of {', '.join(sorted(tenants.limits))}",
                param="TENANT",
            )
        for key in (key for key in tenants.keys if key.tenant == name):
            print("  ".join(filter(None, (key.id, name, str(key.created or "-"), key.note))))


def _revoke(path: Path, args: Namespace) -> None:
    with _editing(path) as file:
        key = _named(args.id, file.tenants, path)
        file.remove(key)
        file.replace(
            Tenants(file.tenants.limits, tuple(k for k in file.tenants.keys if k is not key))
        )
    print(f"key {key.id} of {key.tenant} is revoked", file=sys.stderr)


def _named(start: str, tenants: Tenants, path: Path) -> TenantKey:
    """Return the only key whose digest begins with `start`. Raises ConfigError."""
    found = [key for key in tenants.keys if key.sha256.startswith(start)]
    if len(start) < _MIN_ID_DIGITS or len(found) != 1:
        why = f"{len(found)} keys of {path} begin so; give more, at least {_MIN_ID_DIGITS} digits"
        raise ConfigError(
            f"ID: {start!r} is not the id of one key: {why}; `motet keys list` shows the ids",
            param="ID",
        )
    return found[0]


# ------------------------------------------------------------------------------------------------------------- the file
class _TenantsFile:
    """Edit a tenants file; comments and order are kept."""

    def __init__(self, path: Path, text: str, tenants: Tenants):
        self.path, self.text, self.tenants = path, text, tenants

    def append(self, block: str) -> None:
        gap = "" if not self.text else "\n" if self.text.endswith("\n") else "\n\n"
        self.text += gap + block

    def remove(self, key: TenantKey) -> None:
        """Remove the table of a key."""
        lines = self.text.splitlines(keepends=True)
        here = next(
            (
                n
                for n, line in enumerate(lines)
                if re.match(rf'\s*sha256\s*=\s*["\']{key.sha256}', line)
            ),
            None,
        )
        if here is None:
            raise ConfigError(
                f"{self.path}: key {key.id} is not a [[keys]] table; remove it by hand"
            )
        begin = next((n for n in range(here, -1, -1) if lines[n].lstrip().startswith("[")), here)
        end = next(
            (n for n in range(here, len(lines)) if lines[n].lstrip()[:1] in ("", "[", "#")),
            len(lines),
        )
        while end < len(lines) and not lines[end].strip():
            end += 1
        self.text = "".join(lines[:begin] + lines[end:])

    def replace(self, expected: Tenants) -> None:
        """Write the file atomically; a new file is readable only by its owner.

        Raises ConfigError if the new text does not parse to `expected`.
        """
        try:
            now = parse_tenants(self.text, str(self.path))
        except ConfigError:
            now = None
        if now != expected:
            raise ConfigError(
                f"{self.path}: the change would alter other entries; edit the file by hand"
            )
        mode = stat.S_IMODE(self.path.stat().st_mode) if self.path.exists() else 0o600
        number, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        part = Path(name)
        try:
            with open(number, "w") as file:
                file.write(self.text)
            part.chmod(mode)
            part.replace(self.path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _editing(path: Path) -> Iterator[_TenantsFile]:
    """Yield the file, locked against other processes; a missing file counts as empty."""
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"--tenants-file: {str(path.parent)!r}: {error.strerror}; create the folder first",
            param="--tenants-file",
        ) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        text, tenants = _read(path) if path.exists() else ("", Tenants({}, ()))
        yield _TenantsFile(path, text, tenants)
    except OSError as error:
        raise ConfigError(
            f"--tenants-file: {str(path)!r}: {error.strerror}; check the permissions of its folder",
            param="--tenants-file",
        ) from None
    finally:
        os.close(folder)


def _read(path: Path) -> tuple[str, Tenants]:
    """Return the text of the file and its parsed contents. Raises ConfigError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--tenants-file: cannot read {str(path)!r}: {error}; give a tenants file",
            param="--tenants-file",
        ) from None
    return text, parse_tenants(text, str(path))
