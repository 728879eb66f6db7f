"""Issue and check the tokens with which machines join a stack.

A token is `motet1.FINGERPRINT.SECRET`: the SHA-256 of the stack's certificate authority, which the
joining machine demands of the host that it connects to, and 192 random bits, which it sends only
after that. Tokens expire, admit a bounded number of hosts, and end with `motet up`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from motet_cli.joining.errors import TokenExpired, TokenUnknown, TokenUsed
from motet_shared.errors import ConfigError

_PREFIX = "motet1"
_FINGERPRINT_BYTES, _SECRET_BYTES = 32, 24
_KEPT = 1000  # tokens; the oldest are forgotten


@dataclass(frozen=True)
class Token:
    """Hold the two parts of a token. `secret` appears in no repr."""

    fingerprint: bytes
    secret: str

    def __repr__(self) -> str:
        return f"Token(fingerprint={self.fingerprint.hex()})"

    @property
    def text(self) -> str:
        """Return the token as it is given on a command line."""
        return f"{_PREFIX}.{_encode(self.fingerprint)}.{self.secret}"


def parse_token(text: str) -> Token:
    """Parse a token. Raises ConfigError, without the token, if it is incomplete or damaged."""
    prefix, _, rest = text.strip().partition(".")
    fingerprint, _, secret = rest.partition(".")
    try:
        parts = _decode(fingerprint), _decode(secret)
    except (ValueError, binascii.Error):
        parts = b"", b""
    if prefix != _PREFIX or tuple(map(len, parts)) != (_FINGERPRINT_BYTES, _SECRET_BYTES):
        raise ConfigError(
            "--token: is no token of a stack; give the whole command that `motet invite` printed",
            param="--token",
        )
    return Token(parts[0], secret)


@dataclass(frozen=True)
class Invitation:
    """Describe an issued token: when it expires, the hosts that it still admits, and their roles."""

    expires: float
    uses: int
    roles: tuple[str, ...]


class Invitations:
    """Keep the tokens that a stack has issued, by the digests of their secrets."""

    def __init__(self, fingerprint: bytes, clock: Callable[[], float] = time.time) -> None:
        self._fingerprint, self._clock = fingerprint, clock
        self._known: dict[str, Invitation] = {}

    def issue(self, roles: Sequence[str], seconds: float, uses: int) -> Token:
        """Return a new token for so many seconds and hosts, each of which may run these roles."""
        while len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        secret = _encode(secrets.token_bytes(_SECRET_BYTES))
        self._known[_digest(secret)] = Invitation(self._clock() + seconds, uses, tuple(roles))
        return Token(self._fingerprint, secret)

    def accept(self, secret: str) -> tuple[str, ...]:
        """Count a use of a token and return its roles.

        Raises TokenUnknown, TokenExpired or TokenUsed.
        """
        digest = _digest(secret)  # looked up by its digest: the time tells nothing of the secret
        found = self._known.get(digest)
        again = "issue another one with `motet invite` on the first host"
        if found is None:
            raise TokenUnknown(
                f"token: is not known to this stack, or from before its last start; {again}",
                param="token",
            )
        if self._clock() >= found.expires:
            raise TokenExpired(f"token: has expired; {again}", param="token")
        if found.uses < 1:
            raise TokenUsed(
                f"token: has admitted as many hosts as it may; {again}, perhaps with --uses",
                param="token",
            )
        self._known[digest] = replace(found, uses=found.uses - 1)
        return found.roles


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
