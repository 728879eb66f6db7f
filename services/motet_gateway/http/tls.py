"""Validate the certificate of the gateway's own listener."""

from __future__ import annotations

import ssl
from pathlib import Path

from motet_shared.errors import ConfigError


def check_tls(cert: Path, key: Path) -> None:
    """Raise ConfigError if a server cannot start with this certificate and key.

    The key must not be encrypted.
    """
    for path, param in ((cert, "tls_cert"), (key, "tls_key")):
        try:
            path.read_bytes()
        except OSError as error:
            message = f"{param}: cannot read {str(path)!r}: {error.strerror}; give a PEM file"
            raise ConfigError(message, param=param) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"tls_key: {str(key)!r} is not the key of the certificate {str(cert)!r}"
            message += "; give the one made with it"
            raise ConfigError(message, param="tls_key") from None
        message = f"tls_cert: {str(cert)!r} and {str(key)!r} are not a certificate and key in PEM ({error.reason})"
        raise ConfigError(
            f"{message}; give the chain, own certificate first, and its key", param="tls_cert"
        ) from None


def _no_password() -> str:
    """Raise ConfigError for an encrypted key, instead of prompting on the terminal."""
    raise ConfigError(
        "tls_key: it is encrypted; give one without a passphrase, readable by this user alone",
        param="tls_key",
    )
