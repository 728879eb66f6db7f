"""Build the TLS contexts of connections between processes: to NATS, and for bulk data.

Both sides present a certificate of the stack's own CA. Only that CA is trusted: certificates of
public CAs are refused. The connecting side also checks that the certificate names the requested
host.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import ConfigError


@dataclass(frozen=True)
class PeerTls:
    """Hold the TLS context of each direction."""

    client: ssl.SSLContext
    server: ssl.SSLContext


def peer_tls(peer_ca: Path | None, peer_cert: Path | None, peer_key: Path | None) -> PeerTls | None:
    """Load the three PEM files; return None if none is configured.

    Raises ConfigError that names the setting.
    """
    given = {"peer_ca": peer_ca, "peer_cert": peer_cert, "peer_key": peer_key}
    if not any(given.values()):
        return None
    for name, path in given.items():
        if path is None:
            raise ConfigError(
                f"{name}: is not set; give all of peer_ca, peer_cert and peer_key, or none of them",
                param=name,
            )
        if not path.is_file():
            raise ConfigError(
                f"{name}: {str(path)!r} is no file; make it with `motet credentials certificate`",
                param=name,
            )
    client, server = (
        _context(side, given) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
    )
    server.verify_mode = ssl.CERT_REQUIRED
    return PeerTls(client, server)


def _context(side: ssl._SSLMethod, given: dict[str, Path | None]) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    name = "peer_ca"
    try:
        context.load_verify_locations(str(given["peer_ca"]))
        name = "peer_cert"
        # Without a password callback, openssl would prompt for an encrypted key on the terminal.
        context.load_cert_chain(
            str(given["peer_cert"]), str(given["peer_key"]), password=lambda: ""
        )
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{name}: {str(given[name])!r} cannot be used: {error}; give PEM files, and the certificate's own key"
            " without a passphrase",
            param=name,
        ) from None
    return context
