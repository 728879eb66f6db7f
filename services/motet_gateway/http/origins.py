"""Check which web pages may use this server: its own and those of configured sites."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers as ReadHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from motet_shared.errors import ConfigError

from .asgi import Headers, Scope, header
from .problems import ForbiddenOrigin

ANY = "*"
_EXPOSED = (
    "x-request-id",
    "retry-after",
    "server-timing",
    "motet-ignored",
    "motet-served-by",
    "location",
    *(
        f"x-ratelimit-{what}-{kind}"
        for kind in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)


class Origins:
    """Allow pages of this server and of the sites in `allowed`; "*" allows all sites.

    Raises ConfigError for an entry that is not an origin.
    """

    def __init__(self, allowed: tuple[str, ...]):
        for origin in allowed:
            _check(origin)
        self._allowed = allowed
        # The wrapped app is never called, since streams bypass all middleware; this only answers
        # preflight requests.
        self._cors = CORSMiddleware(
            lambda *_: None,  # type: ignore[arg-type]
            allow_origins=allowed,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )

    def check(self, scope: Scope, *, keyed: bool) -> None:
        """Raise ForbiddenOrigin for a page of a site that is not allowed.

        A browser lets any site send requests to a local port; without API keys (`keyed` False),
        only the origin distinguishes them. With keys, a page that has one may send requests from
        any site, unless allowed sites are configured.
        """
        origin = header(scope, b"origin").decode("latin-1")
        if not origin or _is_own(scope, origin) or self._cors.is_allowed_origin(origin):
            return
        if not keyed:
            raise ForbiddenOrigin(
                f"pages of {origin} may not use this server; set an API key, or allow the origin (--allowed-origins)"
            )
        if self._allowed:
            raise ForbiddenOrigin(
                f"pages of {origin} may not use this server; allow the origin (--allowed-origins)"
            )

    def headers(self, scope: Scope) -> Headers:
        """Return the CORS headers that let a browser show the response to the requesting page."""
        origin = header(scope, b"origin")
        if not (
            self._allowed and origin and self._cors.is_allowed_origin(origin.decode("latin-1"))
        ):
            return []
        return [
            (
                b"access-control-allow-origin",
                ANY.encode() if self._cors.allow_all_origins else origin,
            ),
            (b"access-control-expose-headers", ", ".join(_EXPOSED).encode()),
            (b"vary", b"Origin"),
        ]

    def preflight(self, scope: Scope) -> Response | None:
        """Return the response to a CORS preflight request.

        Returns None if the request is not a preflight, or if no sites are allowed.
        """
        headers = ReadHeaders(scope=scope)
        asks = (
            scope["method"] == "OPTIONS"
            and "origin" in headers
            and "access-control-request-method" in headers
        )
        return self._cors.preflight_response(headers) if self._allowed and asks else None


def _is_own(scope: Scope, origin: str) -> bool:
    return urlsplit(origin).netloc.lower() == header(scope, b"host").decode("latin-1").lower()


def _check(origin: str) -> None:
    parts = urlsplit(origin)
    if origin != ANY and (
        parts.scheme not in ("http", "https") or f"{parts.scheme}://{parts.netloc}" != origin
    ):
        message = f"allowed_origins: {origin!r} is not an origin; give https://HOST or https://HOST:PORT, or * for all"
        raise ConfigError(message, param="allowed_origins")
