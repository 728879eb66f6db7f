"""Who may ask: API keys, and for a server without keys only pages that it served itself."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from .asgi import Scope, header
from .problems import Forbidden, Unauthorized

_SUBPROTOCOL = "openai-insecure-api-key."  # browsers cannot set headers on a WebSocket


class Keys:
    """The accepted API keys. None at all: everyone who can reach the port may ask."""

    def __init__(self, keys: tuple[str, ...]):
        self._digests = [_digest(key) for key in keys]

    def check(self, scope: Scope) -> None:
        """Unauthorized without an accepted key; Forbidden for another site's page where no key is needed."""
        if not self._digests:
            _check_origin(scope)
            return
        given = _bearer(scope) or _from_subprotocol(scope)
        if not given:
            raise Unauthorized("no API key was sent; send `Authorization: Bearer <key>`")
        # All keys are compared, digests of one length: time tells nothing about any of them.
        digest = _digest(given)
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("the API key is not accepted here")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _bearer(scope: Scope) -> str:
    scheme, _, key = header(scope, b"authorization").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _from_subprotocol(scope: Scope) -> str:
    offered = (name for name in scope.get("subprotocols", ()) if name.startswith(_SUBPROTOCOL))
    return next(offered, "")[len(_SUBPROTOCOL) :]


def _check_origin(scope: Scope) -> None:
    """A browser lets any site talk to a local port; without keys only the page's own address tells them apart."""
    origin = header(scope, b"origin").decode("latin-1")
    if origin and urlsplit(origin).netloc.lower() != header(scope, b"host").decode("latin-1").lower():
        raise Forbidden(f"a page of {origin} may not use this server; set an API key to allow other sites")
