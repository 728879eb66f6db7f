"""Create the stack's certificate authority and the certificates of its hosts, with openssl.

Keys are elliptic-curve keys on P-256, in files that only their owner can read. The authority's key
stays in its folder; the key of a host that joins never leaves that host, which sends a request.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from motet_shared.credentials import write_private
from motet_shared.errors import BadRequest, ConfigError

AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"  # files of the authority's folder
AUTHORITY_DAYS, HOST_DAYS = 3650, 365
_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,250}[A-Za-z0-9_])?")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_USES = ("basicConstraints=critical,CA:FALSE", "extendedKeyUsage=serverAuth,clientAuth")


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> None:
    """Create the authority's key and certificate in `folder`. Raises ConfigError."""
    uses = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
    added = [part for use in uses for part in ("-addext", use)]
    out = ["-keyout", str(folder / AUTHORITY_KEY), "-out", str(folder / AUTHORITY)]
    _openssl(["req", "-x509", *_KEY, *out, "-days", str(days), "-subj", "/CN=Motet stack", *added])


def make_certificate(
    folder: Path, names: Sequence[str], stem: str, days: int = HOST_DAYS
) -> tuple[Path, Path]:
    """Create `stem`.crt and `stem`.key for these names and addresses, signed by the authority.

    folder: that of the authority. Raises ConfigError for a wrong name, or if openssl refuses.
    """
    alternatives = ",".join(map(alternative, names))
    cert, key = folder / f"{stem}.crt", folder / f"{stem}.key"
    signed = ["-CA", str(folder / AUTHORITY), "-CAkey", str(folder / AUTHORITY_KEY)]
    uses = (f"subjectAltName={alternatives}", *_USES)
    added = [part for use in uses for part in ("-addext", use)]
    subject = ["-subj", f"/CN={names[0][:64]}", *added]
    out = ["-keyout", str(key), "-out", str(cert), "-days", str(days)]
    _openssl(["req", "-x509", *_KEY, *out, *signed, *subject])
    return cert, key


def make_request(key: Path) -> str:
    """Create a key and return a request for a certificate of it, in PEM. Raises ConfigError."""
    return _openssl(["req", "-new", *_KEY, "-keyout", str(key), "-subj", "/CN=joining host"])


def sign_request(folder: Path, request: str, name: str, days: int = HOST_DAYS) -> str:
    """Return a certificate for `name` alone, whatever names the request has, in PEM.

    folder: that of the authority. Raises BadRequest for a request that openssl refuses.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given, extensions = Path(scratch) / "request.csr", Path(scratch) / "extensions.cnf"
        given.write_text(request)
        lines = (f"subjectAltName={alternative(name)}", *_USES)
        extensions.write_text("\n".join(lines) + "\n")
        signed = ["-CA", str(folder / AUTHORITY), "-CAkey", str(folder / AUTHORITY_KEY)]
        argv = ["x509", "-req", "-in", str(given), *signed, "-days", str(days)]
        try:
            return _openssl([*argv, "-extfile", str(extensions), "-subj", f"/CN={name[:64]}"])
        except ConfigError as error:
            raise BadRequest(f"request: is refused: {error.message}", param="request") from None


def fingerprint(certificate: str) -> bytes:
    """Return the SHA-256 of a certificate in PEM. Raises ValueError for other texts."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.strip())).digest()


def keep_certificate(folder: Path, authority: str, certificate: str) -> None:
    """Write the authority's certificate and that of this host into `folder`."""
    write_private(folder / AUTHORITY, authority)
    write_private(folder / "host.crt", certificate)


def alternative(name: str) -> str:
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


def _openssl(argv: Sequence[str]) -> str:
    """Run openssl and return its output; files that it writes are readable only by their owner.

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
    return done.stdout
