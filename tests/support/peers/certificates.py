"""Make TLS certificates with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """Return (certificate, key) for 127.0.0.1 and localhost, in PEM."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    argv += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(argv, check=True, capture_output=True)
    return cert, key


def encrypted(key: Path) -> Path:
    """Return the key encrypted with a passphrase."""
    path = key.with_suffix(".locked")
    argv = [
        "openssl",
        "ec",
        "-in",
        str(key),
        "-aes256",
        "-passout",
        "pass:secret",
        "-out",
        str(path),
    ]
    subprocess.run(argv, check=True, capture_output=True)
    return path
